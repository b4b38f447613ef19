"""Collects the operations of a transaction until its commit or abort (SPEC A5).

Nothing is visible or written before the commit, which applies all operations in one change. Arguments are checked at
once: invalid drafts, expired leases, messages acked twice. Conditions known only at the commit (a lease that expired
meanwhile, a full or missing queue) fail the whole transaction.

Acks are applied before enqueues, regardless of their order, because they make room in queues with limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar

from basaltmq.errors import (
    InvalidArgumentError,
    LimitExceededError,
    QueueNotFoundError,
    StaleLeaseError,
    StoreStalledError,
    TransactionError,
)
from basaltmq.queues.change import Change
from basaltmq.queues.draft import Draft, to_message
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.queue import ENQUEUE_MAX, Queue

TRANSACTION_BYTES_MAX: Final = 128 << 20
"""Half of the largest batch of a store, so that a full transaction fits into a group commit."""

ENTRY_COST_BYTES: Final = 64
"""Bytes that a message's rows count towards the limit, besides its payload."""

NOTHING_WRITTEN: Final = (StoreStalledError, LimitExceededError)
"""Errors of a write that the store refused completely. The transaction can be retried."""

MESSAGES_MAX: Final = 100_000
"""Messages of one transaction. Its batch holds the plane's lock for some tenths of a second."""

T = TypeVar("T")
Find: TypeAlias = Callable[[str], Queue]
"""Returns the loaded queue with a name."""


class Plane(Protocol):
    """The part of the queue plane that transactions use."""

    def apply(self, operation: Callable[[Change, Find], T]) -> T:
        """Run an operation on any queues as one change, which is written on return."""
        ...

    def lease(
        self, name: str, count: int = 1, *, consumer: str = "", visibility_ms: int | None = None, wait_ms: int = 0
    ) -> list[Delivery]: ...


class Work:
    """Enqueues and acks of one transaction."""

    __slots__ = ("_acked", "_plane", "_taken", "acks", "enqueues", "messages", "size_bytes")

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._acked: set[tuple[str, bytes]] = set()
        self._taken: list[tuple[str, int]] = []
        self.enqueues: list[tuple[str, list[Draft | bytes]]] = []
        self.acks: list[tuple[str, int, list[bytes]]] = []
        self.messages = 0
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self.enqueues or self.acks)

    def enqueue(self, name: str, drafts: Sequence[Draft | bytes]) -> None:
        """Add messages for an existing queue."""
        kept = list(drafts)
        if len(kept) > ENQUEUE_MAX:
            raise LimitExceededError(
                f"{len(kept)} messages in one call exceed the limit of {ENQUEUE_MAX}; split the batch"
            )
        size_bytes = sum(_check(name, draft) for draft in kept)
        self._plane.apply(lambda change, find: find(name))
        self._grow(len(kept), size_bytes)
        if kept:
            self.enqueues.append((name, kept))

    def ack(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Add an ack of messages of a lease (all by default). Return their number."""
        chosen = self._plane.apply(lambda change, find: _held(find(name), token, ids))
        marks = {(name, message_id) for message_id in chosen}
        twice = marks & self._acked
        if twice or len(marks) < len(chosen):
            shown = next(iter(twice))[1].hex() if twice else "one"
            raise TransactionError(f"message {shown} of queue {name!r} is acked twice in one transaction")
        self._grow(len(chosen), 0)
        self._acked |= marks
        self.acks.append((name, token, chosen))
        return len(chosen)

    def dequeue(
        self, name: str, count: int, *, consumer: str = "", visibility_ms: int | None = None, wait_ms: int = 0
    ) -> list[Delivery]:
        """Lease messages that a commit acknowledges and an abort returns to their places."""
        found = self._plane.lease(name, count, consumer=consumer, visibility_ms=visibility_ms, wait_ms=wait_ms)
        if found:
            self._taken.append((name, found[0].token))
            self.ack(name, found[0].token)
        return found

    def run(self, change: Change, find: Find) -> list[bytes]:
        """Apply all operations. Return the ids of the enqueued messages in order. An overflow that dead-letters is a
        failure."""
        for name, token, ids in self.acks:
            find(name).ack(change, token, ids)
        made = [message_id for name, drafts in self.enqueues for message_id in find(name).enqueue(change, drafts)]
        if change.refusal is not None:
            raise change.refusal
        return made

    def give_back(self, change: Change, find: Find) -> None:
        """Release messages that the transaction leased itself, except expired or deleted ones."""
        for name, token in self._taken:
            try:
                find(name).release(change, token)
            except (StaleLeaseError, QueueNotFoundError):
                continue

    @property
    def took(self) -> bool:
        return bool(self._taken)

    def _grow(self, messages: int, size_bytes: int) -> None:
        size_bytes += messages * ENTRY_COST_BYTES
        if self.size_bytes + size_bytes > TRANSACTION_BYTES_MAX or self.messages + messages > MESSAGES_MAX:
            raise LimitExceededError(
                f"the transaction would exceed {TRANSACTION_BYTES_MAX} bytes or {MESSAGES_MAX} messages; "
                "commit it and begin another"
            )
        self.size_bytes += size_bytes
        self.messages += messages


class Operations:
    """The operations of a transaction, or of a session in a branch. They take effect at its commit."""

    def _work_for(self, operation: str) -> Work:
        """Return what collects operations, or raise if this one is not possible now."""
        raise NotImplementedError

    def enqueue(self, name: str, drafts: Sequence[Draft | bytes]) -> None:
        """Enqueue messages at the commit."""
        self._work_for("enqueue").enqueue(name, drafts)

    def ack(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Acknowledge messages of a lease (all by default) at the commit. The lease must last until then."""
        return self._work_for("ack").ack(name, token, ids)

    def dequeue(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str = "",
        visibility_ms: int | None = None,
        wait_ms: int = 0,
    ) -> list[Delivery]:
        """Lease messages that the commit acknowledges and an abort returns to their places."""
        work = self._work_for("dequeue")
        return work.dequeue(name, count, consumer=consumer, visibility_ms=visibility_ms, wait_ms=wait_ms)


def _held(queue: Queue, token: int, ids: Sequence[bytes] | None) -> list[bytes]:
    """Return the ids of messages of a live lease, all or the named ones."""
    call = queue.leases.require(token)
    if ids is None:
        return list(call.entries)
    for message_id in ids:
        if message_id not in call.entries:
            # Raises the error of the lease itself; nothing is taken.
            queue.leases.take(token, [message_id])
    return list(ids)


def _check(name: str, draft: Draft | bytes) -> int:
    """Check that a draft can be stored. Return its size."""
    whole = Draft(payload=draft) if isinstance(draft, bytes) else draft
    if not isinstance(whole, Draft):
        raise InvalidArgumentError(f"a message to enqueue must be bytes or a Draft, not {type(draft).__name__}")
    message = to_message(whole, name, bytes(16), 0, 0)
    return len(message.payload) + len(message.properties)
