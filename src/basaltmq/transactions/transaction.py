"""Store transactions: enqueue and dequeue over any queues, committed as one batch (SPEC A5).

    OPEN ──commit──> COMMITTING ──> COMMITTED
      │  ^               │ └──────> FAILED     the store broke; only opening it again tells what became of it
      │  └───────────────┘ the store took nothing (stalled, too large): commit again, or abort
      └──abort──> ABORTED

Nothing reaches the disk before commit but the content of large messages, which nobody can see. The entries a
transaction takes are locked from `dequeue` to the end, so two transactions never take the same one. Messages that are
not stored belong to the transaction; aborting it discards them. Used by one thread or one loop.
"""

from __future__ import annotations

import asyncio
import enum
from types import TracebackType
from typing import Final, Self
from uuid import UUID

from basaltmq.errors import InvalidArgumentError, LimitExceededError, StorageError, StoreStalledError, TransactionError
from basaltmq.messages.store import MessageStore
from basaltmq.messages.stored import StoredMessage
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

TRANSACTION_BYTES_MAX: Final = 128 << 20
"""Half of what a store takes as one batch, so that a full transaction still fits a group."""

ENTRY_COST_BYTES: Final = 64
"""What an entry's rows count towards the limit."""

NOTHING_WRITTEN: Final = (StoreStalledError, LimitExceededError)
"""Errors of a write that was refused as a whole; the transaction may be tried again."""


class State(enum.Enum):
    OPEN = "open"
    COMMITTING = "being committed"
    COMMITTED = "committed"
    ABORTED = "aborted"
    FAILED = "failed"


class Changes:
    """What a transaction or a branch is to do, with the locks and messages it holds for it."""

    def __init__(self, messages: MessageStore, owner: object) -> None:
        self._messages = messages
        self._owner = owner
        self.batch = Batch()
        self.pending: dict[int, StoredMessage] = {}
        self.removed: list[StoredMessage] = []
        self.locked: set[bytes] = set()
        self.size_bytes = 0

    def enqueue(self, queue_id: UUID, message: StoredMessage) -> None:
        self._messages.hold_if_overfull()
        key = entry_key(queue_id, message.id)
        added = ENTRY_COST_BYTES
        if not message.is_stored and message.id not in self.pending:
            added += message.pending_bytes
        self._grow(added)
        message.claim(self._owner)
        if not message.is_stored:
            self.pending[message.id] = message
        self.size_bytes += added
        self.batch.put(Family.QUEUE_ENTRIES, key, b"")

    def dequeue(self, queue_id: UUID, message_id: int) -> None:
        key = entry_key(queue_id, message_id)
        if key in self.locked:
            raise TransactionError(f"message {message_id} of queue {queue_id} is dequeued twice in one transaction")
        self._grow(ENTRY_COST_BYTES)
        self._messages.locks.take(key)
        self.locked.add(key)
        self.size_bytes += ENTRY_COST_BYTES
        self.batch.delete(Family.QUEUE_ENTRIES, key)

    def remove(self, message: StoredMessage) -> None:
        if not message.is_stored:
            raise TransactionError(f"message {message.id} is not stored; only a stored message can be removed")
        message.claim(self._owner)
        self._grow(ENTRY_COST_BYTES)
        self.size_bytes += ENTRY_COST_BYTES
        message.delete_rows(self.batch)
        self.removed.append(message)

    def rows(self) -> Batch:
        """Message rows first, then the entries: one batch."""
        batch = Batch()
        for message in self.pending.values():
            message.put_rows(batch)
        batch.extend(self.batch)
        return batch

    @property
    def top_id(self) -> int:
        return max(self.pending, default=0)

    def set_stored(self) -> None:
        for message in self.pending.values():
            message.set_stored()
        for message in self.removed:
            message.set_removed()

    def unlock(self) -> None:
        self._messages.locks.release(self.locked)
        self.locked = set()

    def discard(self) -> None:
        """Undo everything but what is on disk for others: let go of entries, discard own messages."""
        self.unlock()
        for message in self.pending.values():
            try:
                message.discard()
            except StorageError:
                # What was spilled of it stays unfinished, and recovery removes it.
                message.set_removed()
        self.pending = {}

    def _grow(self, added_bytes: int) -> None:
        if self.size_bytes + added_bytes > TRANSACTION_BYTES_MAX:
            raise LimitExceededError(
                f"the transaction would pass {TRANSACTION_BYTES_MAX} bytes; commit what it has and begin another"
            )


class Transaction:
    """A local transaction. As a context manager it aborts unless it was committed."""

    def __init__(self, messages: MessageStore) -> None:
        self._messages = messages
        self._changes = Changes(messages, self)
        self.state = State.OPEN

    def enqueue(self, queue_id: UUID, message: StoredMessage) -> None:
        """Put a message into a queue. Held with StoreOverfullError while the store is over its limit."""
        self._require_open("enqueue")
        self._changes.enqueue(queue_id, message)

    def dequeue(self, queue_id: UUID, message_id: int) -> None:
        """Take an entry, which the caller knows to be there, out of a queue. Never held."""
        self._require_open("dequeue")
        self._changes.dequeue(queue_id, message_id)

    def remove(self, message: StoredMessage) -> None:
        """Delete a stored message whose last entry goes with this transaction."""
        self._require_open("remove a message")
        self._changes.remove(message)

    def commit(self) -> None:
        """Return when everything is durable. Blocks the calling thread."""
        self._require_open("commit")
        batch = self._changes.rows()
        if len(batch):
            self.state = State.COMMITTING
            try:
                self._messages.commit(batch, self._changes.top_id)
            except BaseException as error:
                self._failed(error)
                raise
        self._committed()

    def commit_async(self) -> asyncio.Future[None]:
        """Write with this turn of the running loop; the future resolves when durable. Cancelling it undoes nothing."""
        self._require_open("commit")
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()
        batch = self._changes.rows()
        if not len(batch):
            self._committed()
            told.set_result(None)
            return told
        self.state = State.COMMITTING
        try:
            durable = self._messages.commit_async(batch, self._changes.top_id)
        except BaseException as error:
            self._failed(error)
            raise
        durable.add_done_callback(lambda done: self._tell(done, told))
        return told

    def abort(self) -> None:
        """Give everything up. Aborting twice is fine; what is committed cannot be aborted."""
        if self.state in (State.ABORTED, State.FAILED):
            return
        self._require_open("abort")
        self._changes.discard()
        self.state = State.ABORTED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state is State.OPEN:
            self.abort()

    def _tell(self, done: asyncio.Future[None], told: asyncio.Future[None]) -> None:
        error = done.exception()
        if error is None:
            self._committed()
        else:
            self._failed(error)
        if not told.done():
            if error is None:
                told.set_result(None)
            else:
                told.set_exception(error)

    def _committed(self) -> None:
        self.state = State.COMMITTED
        self._changes.set_stored()
        self._changes.unlock()

    def _failed(self, error: BaseException) -> None:
        # Locks stay: after a failed sync nobody knows whether the entries are there, and only recovery can tell.
        self.state = State.OPEN if isinstance(error, NOTHING_WRITTEN) else State.FAILED

    def _require_open(self, verb: str) -> None:
        if self.state is not State.OPEN:
            raise TransactionError(f"cannot {verb}: the transaction is {self.state.value}; begin another")


def entry_key(queue_id: UUID, message_id: int) -> bytes:
    if not isinstance(queue_id, UUID):
        raise InvalidArgumentError(f"a queue is named by its UUID, not {queue_id!r:.80}")
    if not isinstance(message_id, int) or not 0 <= message_id < 1 << 64:
        raise InvalidArgumentError(f"a message id of the store is a number of 64 bits, not {message_id!r:.80}")
    return keys.queue_entry_key(queue_id, message_id)
