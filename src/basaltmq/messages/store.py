"""The message store: messages by id, and in which queues they are (SPEC A4, A7).

Content is stored once whatever the number of queues; a queue entry is a key without a value, so a queue is walked in
the order of ids by one scan. What changes rows goes through transactions (`basaltmq.transactions`); this file reads,
hands out ids, and is the one way to the disk for all of them.

Invariants: an entry's message is stored in the same batch or before; a message is removed by whoever takes the last
entry, and what a crash leaves without an entry is removed by recovery; no id is ever used twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, Self, TypeAlias
from uuid import UUID

from basaltmq.errors import InvalidArgumentError, MessageNotFoundError, StoreOverfullError, TransactionError
from basaltmq.messages import upgrade
from basaltmq.messages.branches import PreparedBranch, decode_branch
from basaltmq.messages.locks import EntryLocks
from basaltmq.messages.metadata import (
    CHUNK_SHIFT,
    COMPLETE,
    CONTENT_BYTES_MAX,
    Metadata,
    check_metadata,
    decode_metadata,
)
from basaltmq.messages.sequence import ID_BLOCK, NEXT_MESSAGE_ID, IdSequence
from basaltmq.messages.stored import MessageWriter, StoredMessage
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.store.versions import bring_up_to_date, put_version, read_version

CONTENT: Final = "messages"
VERSION: Final = 2
FAMILIES: Final = (Family.MESSAGE_METADATA, Family.MESSAGE_CONTENT, Family.QUEUE_ENTRIES, Family.XIDS)


class Guard(Protocol):
    """Says whether producers are held (SPEC A11)."""

    @property
    def overfull(self) -> bool: ...


MessageHandler: TypeAlias = Callable[[StoredMessage], bool | None]
InstanceHandler: TypeAlias = Callable[[UUID, int], bool | None]
BranchHandler: TypeAlias = Callable[[PreparedBranch], bool | None]
"""Handlers of the visits: one that returns False stops its visit."""


class MessageStore:
    """Messages and queue entries on a store. Safe to share between threads."""

    def __init__(
        self,
        store: Store,
        group: GroupCommit,
        *,
        guard: Guard | None = None,
        content_bytes_max: int = CONTENT_BYTES_MAX,
        chunk_shift: int = CHUNK_SHIFT,
        id_block: int = ID_BLOCK,
    ) -> None:
        self.store = store
        self.content_bytes_max = content_bytes_max
        self.locks = EntryLocks()
        self.sequence = IdSequence(store, id_block)
        self.owners: dict[int, object] = {}
        """Stored messages that a prepared branch brought, and the branch."""
        self._group = group
        self._guard = guard
        self._chunk_shift = chunk_shift

    @classmethod
    def open(cls, store: Store, group: GroupCommit, *, guard: Guard | None = None, id_block: int = ID_BLOCK) -> Self:
        """Bring what is stored up to date, and open it."""
        if read_version(store, CONTENT) is None and store.get(Family.VERSION, NEXT_MESSAGE_ID) is not None:
            # Version 1 wrote no version row; emptied of messages it is told by its counter alone.
            first = Batch()
            put_version(first, CONTENT, 1)
            store.write(first)
        bring_up_to_date(store, CONTENT, VERSION, {1: upgrade.from_version_1}, FAMILIES)
        return cls(store, group, guard=guard, id_block=id_block)

    def hold_if_overfull(self) -> None:
        """Producers wait while the store is over its size limit; consumers never do."""
        if self._guard is not None and self._guard.overfull:
            raise StoreOverfullError("the store is over its size limit; consume or purge messages, then try again")

    def add_message(self, metadata: bytes, kind: int = 0) -> MessageWriter:
        """Begin a message; it is nowhere to be seen until a transaction that enqueues it commits."""
        check_metadata(metadata, kind)
        self.hold_if_overfull()
        return MessageWriter(self, self.sequence.take(), metadata, kind, self._chunk_shift)

    def get_message(self, message_id: int) -> StoredMessage:
        row = self._row(message_id)
        if row is None or row.state != COMPLETE:
            raise MessageNotFoundError(f"no message {message_id} is stored")
        return StoredMessage(self, message_id, row)

    def get_content(self, message_id: int, offset: int = 0, length: int | None = None) -> bytes:
        return self.get_message(message_id).get_content(offset, length)

    def remove(self, message: StoredMessage) -> None:
        """Delete a message that is in no queue any more, in all families. Survives a process crash on return."""
        if self.owner_of(message.id) is not None:
            raise TransactionError(
                f"message {message.id} belongs to a prepared branch; it can be removed once that is decided"
            )
        batch = Batch()
        message.delete_rows(batch)
        self.write(batch, 0)
        message.set_removed()

    def has_entry(self, queue_id: UUID, message_id: int) -> bool:
        return self.store.get(Family.QUEUE_ENTRIES, keys.queue_entry_key(queue_id, message_id)) is not None

    def visit_messages(self, handler: MessageHandler) -> None:
        """Every stored message in the order of ids, one at a time."""
        for key, raw in self.store.scan(Family.MESSAGE_METADATA):
            message_id = keys.decode_metadata_key(key)
            row = decode_metadata(message_id, raw)
            if row.state == COMPLETE and handler(StoredMessage(self, message_id, row)) is False:
                return

    def visit_message_instances(self, handler: InstanceHandler, queue_id: UUID | None = None) -> None:
        """Every queue entry by queue and id, or those of one queue."""
        start, end = (b"", None) if queue_id is None else keys.prefix_range(keys.queue_entry_prefix(queue_id))
        for key, _ in self.store.scan(Family.QUEUE_ENTRIES, start, end):
            if handler(*keys.decode_queue_entry_key(key)) is False:
                return

    def visit_distributed_transactions(self, handler: BranchHandler) -> None:
        """Every branch that is prepared or was decided heuristically."""
        for key, raw in self.store.scan(Family.XIDS):
            if handler(decode_branch(key, raw)) is False:
                return

    def owner_of(self, message_id: int) -> object | None:
        return self.owners.get(message_id)

    def read_chunk(self, message_id: int, chunk: int) -> bytes | None:
        return self.store.get(Family.MESSAGE_CONTENT, keys.content_key(message_id, chunk))

    def write(self, batch: Batch, top_id: int) -> None:
        """Write a batch whose highest id to be stored is `top_id`; survives a process crash on return."""
        if self.sequence.covers(top_id):
            self.store.write(batch)
        else:
            self.sequence.write(batch)

    def commit(self, batch: Batch, top_id: int) -> None:
        """Write a batch and return when it is durable. Blocks the calling thread."""
        if self.sequence.covers(top_id):
            self._group.commit(batch)
        else:
            self.sequence.write(batch)
            self._group.wait_durable()

    def commit_async(self, batch: Batch, top_id: int) -> asyncio.Future[None]:
        """The same on the running loop: the future resolves when durable."""
        if self.sequence.covers(top_id):
            return self._group.commit_async(batch)
        self.sequence.write(batch, wait_ms=0)
        return self._group.durable()

    def _row(self, message_id: int) -> Metadata | None:
        if not isinstance(message_id, int) or not 0 <= message_id < 1 << 64:
            raise InvalidArgumentError(f"a message id of the store is a number of 64 bits, not {message_id!r}")
        raw = self.store.get(Family.MESSAGE_METADATA, keys.metadata_key(message_id))
        return None if raw is None else decode_metadata(message_id, raw)
