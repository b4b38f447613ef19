"""What a transaction is to do to queues, gathered until it is decided (SPEC A5).

Nothing of it is seen or written before the end; then all of it is one change. What is handed in is checked at once,
where the caller can do something about it: drafts that cannot be stored, leases that are over, messages acked twice.
What can only be known at the end (a lease that expired meanwhile, a queue that is full or gone) fails the whole.

Acks come before enqueues, whatever the order they were asked for in: they make room in queues with limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar

from basaltmq.errors import (
    InvalidArgumentError,
    LimitExceededError,
    QueueNotFoundError,
    StaleLeaseError,
    TransactionError,
)
from basaltmq.queues.change import Change
from basaltmq.queues.draft import Draft, to_message
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.queue import ENQUEUE_MAX, Queue
from basaltmq.transactions.transaction import ENTRY_COST_BYTES, TRANSACTION_BYTES_MAX

MESSAGES_MAX: Final = 100_000
"""Messages of one transaction: its batch holds the plane for some tenths of a second."""

T = TypeVar("T")
Find: TypeAlias = Callable[[str], Queue]
"""The queue of a name, loaded."""


class Plane(Protocol):
    """What transactions need of the queue plane."""

    def apply(self, operation: Callable[[Change, Find], T]) -> T:
        """Run an operation on any queues as one change; it is written on return."""
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
        """Messages for a queue, which is there."""
        kept = list(drafts)
        if len(kept) > ENQUEUE_MAX:
            raise LimitExceededError(f"{len(kept)} messages in one call: at most {ENQUEUE_MAX}")
        size_bytes = sum(_check(name, draft) for draft in kept)
        self._plane.apply(lambda change, find: find(name))
        self._grow(len(kept), size_bytes)
        if kept:
            self.enqueues.append((name, kept))

    def ack(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Messages of a lease (all by default) are done when the transaction is; how many that are."""
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
        """Lease messages that are done when the transaction is, and go back to their places if it is given up."""
        found = self._plane.lease(name, count, consumer=consumer, visibility_ms=visibility_ms, wait_ms=wait_ms)
        if found:
            self._taken.append((name, found[0].token))
            self.ack(name, found[0].token)
        return found

    def run(self, change: Change, find: Find) -> list[bytes]:
        """Do it; the ids of what was enqueued, in order. All or nothing: an overflow that dead-letters is a failure."""
        for name, token, ids in self.acks:
            find(name).ack(change, token, ids)
        made = [message_id for name, drafts in self.enqueues for message_id in find(name).enqueue(change, drafts)]
        if change.refusal is not None:
            raise change.refusal
        return made

    def give_back(self, change: Change, find: Find) -> None:
        """What the transaction leased itself goes back; what has expired or is gone is somebody else's."""
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
                f"the transaction would pass {TRANSACTION_BYTES_MAX} bytes or {MESSAGES_MAX} messages; "
                "commit what it has and begin another"
            )
        self.size_bytes += size_bytes
        self.messages += messages


def _held(queue: Queue, token: int, ids: Sequence[bytes] | None) -> list[bytes]:
    """The messages of a live lease, or those named of it."""
    call = queue.leases.require(token)
    if ids is None:
        return list(call.entries)
    for message_id in ids:
        if message_id not in call.entries:
            # Refused in the words of the lease itself; nothing is taken.
            queue.leases.take(token, [message_id])
    return list(ids)


def _check(name: str, draft: Draft | bytes) -> int:
    """Refuse a draft that could not be stored; its size."""
    whole = Draft(payload=draft) if isinstance(draft, bytes) else draft
    if not isinstance(whole, Draft):
        raise InvalidArgumentError(f"a message to enqueue is bytes or a Draft, not {type(draft).__name__}")
    message = to_message(whole, name, bytes(16), 0, 0)
    return len(message.payload) + len(message.properties)
