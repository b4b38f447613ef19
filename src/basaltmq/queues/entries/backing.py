"""The backing queue: stores the ready messages of a queue in order, in memory and on disk.

Theory of operation
-------------------
`Queue` handles consumers, leases, TTL and limits. Below it, a backing queue keeps the order and decides what is in
memory. `PagingQueue` is the main implementation. `FairQueue` and `PriorityQueue` implement the same protocol on top of
it.

A message is in one of four states:

    alpha   row and body in memory. A persistent message is also on disk, in the family `messages`, since the batch that
            published it. A transient one is in memory only.
    beta    row in memory, body on disk: a transient message whose body is too large for the row (content.py).
    gamma   row in memory and on disk, body on disk: the same for a persistent message. Also every leased message, whose
            row is dropped from memory on delivery.
    delta   on disk only: a persistent message beyond the window, or a transient one spilled for lack of memory.

                        published while there is room          fetched
        publisher ────────────────────────────────────> alpha ────────> leased (gamma) ──ack──> deleted
              │         memory is full    │   ▲                           │
              └───────────> delta <───────┘   └──────── requeue ──────────┘
                              │  shrink           (to its place: the key does not change)
                              └── read ahead ──> alpha

Invariants
----------
- The key (enqueue time, id) is the message's position. It never changes while the message is in the queue, so requeue
  puts the entry back by key. Returning a message with an unchanged row writes nothing.
- Delta is everything on disk at or above the cursor that is not leased. So closing and reopening the window and
  returning messages need no bookkeeping on disk. The range below the cursor is full of tombstones and is never read
  again.
- Memory is bounded, per queue by `PagingLimits` and in total by one `MemoryBudget`. Messages that do not fit are delta.
  A queue without any memory still reads one message at a time, so it makes progress.
- A backing queue adds rows to the given change and never writes persistent rows itself: one operation, one batch.
  Messages are added to memory after the write. Messages taken from memory are put back if the write fails.

After a crash
-------------
Nothing here is recovered: a queue opens with an empty window and the cursor at its head, so all messages are delta.
Counts come from the queue's stats row, which is part of every batch. Transient messages are lost, and the family they
spill to is wiped at open. Leased messages are known from their lease rows and skipped when read.

Rejected designs: an iterator kept open as the cursor (it pins memtables and files of the whole store for the slowest
consumer); a count per fairness key on disk (it doubles the writes of a queue with many keys; seeking from key to key
finds the keys instead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from basaltmq.queues.change import Change

if TYPE_CHECKING:
    from basaltmq.queues.entries.plain import Plain

TRANSIENT: Final = 1
"""May be lost at a restart."""
SPILLED: Final = 2
"""A transient message that is on disk for lack of memory."""
APART: Final = 4
"""The body is stored separately, in the family `message_content`."""
SHARED: Final = 8
"""The separate body is shared with other messages through reference rows."""
TIMED: Final = 16
"""Has a row in the expiry index."""
RETURNED: Final = 32
"""Was delivered before and returned. In a row: with the number of returns without a failure."""

ENTRY_OVERHEAD_BYTES: Final = 320
"""Memory of an entry besides its row: the object, its key, its slots in containers (measured, rounded up)."""


class Entry(msgspec.Struct, gc=False):
    """A message in a queue: its key, its encoded row, and frequently used fields.

    `row` is empty while the row is not in memory. `size_bytes` is the size of the body, which limits and counts use.
    `expires_ns` is 0 for never.
    """

    key: bytes
    row: bytes
    size_bytes: int
    flags: int = 0
    expires_ns: int = 0

    def cost_bytes(self) -> int:
        """Memory that the entry takes."""
        return len(self.row) + ENTRY_OVERHEAD_BYTES


class Leased(Protocol):
    """The leased messages of a queue. Their rows are on disk, but they are not ready."""

    def has_key(self, key: bytes) -> bool: ...

    def leased_among(self, keys: Sequence[bytes]) -> list[int]:
        """Return the indexes of the leased messages among these keys, which are in ascending order."""
        ...

    def paged_out(self, entry: Entry) -> None:
        """Note that a returned message leaves memory, and with it its RETURNED flag."""
        ...


class Info(msgspec.Struct, frozen=True):
    """State of a backing queue."""

    resident: int
    resident_bytes: int
    paged: bool
    """Whether some messages are only on disk."""
    spilled: bool
    """Whether some transient messages were spilled to disk."""
    sub_queues: int = 1


class BackingQueue(Protocol):
    """Ready messages in order. Not thread-safe: the plane's lock protects every call."""

    def publish(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        """Add messages, all of the sub-queue `sub` if it is given. They can be fetched after the change is written."""
        ...

    def append(self, entries: Sequence[Entry], sub: str | None = None, weight: int | None = None) -> None:
        """Add messages whose rows are written, as `publish` does after the write. `weight` applies to all, if given."""
        ...

    def publish_delivered(self, change: Change, entries: Sequence[Entry]) -> None:
        """Add messages that are delivered in the same change and never wait in the queue."""
        ...

    def discard(self, change: Change, entries: Sequence[Entry]) -> None:
        """Remove messages that were published in this same change. Their rows are never written."""
        ...

    def fetch(self, count: int) -> list[Entry]:
        """Take up to `count` messages off the head, with their rows. The caller puts them back if its write fails."""
        ...

    def fetch_plain(self, count: int) -> Plain | None:
        """Take up to `count` persistent messages off the head as columns. Return None and take nothing if they are not
        kept in columns."""
        ...

    def drop(self, change: Change, count: int) -> list[Entry]:
        """Take up to `count` messages off the head and delete them."""
        ...

    def ack(self, change: Change, entries: Sequence[Entry]) -> None:
        """Delete messages that were fetched."""
        ...

    def requeue(self, change: Change, entries: Sequence[Entry]) -> None:
        """Return fetched messages to their places when the change is written."""
        ...

    def put_back(self, entries: Sequence[Entry]) -> None:
        """Return fetched messages to their places at once, without a write."""
        ...

    def remove(self, change: Change, entries: Sequence[Entry]) -> None:
        """Delete messages that wait anywhere in the queue."""
        ...

    def purge(self) -> None:
        """Forget all waiting messages. The caller deletes the rows."""
        ...

    def dropwhile(
        self, change: Change, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None
    ) -> list[Entry]:
        """Drop messages from the head while `holds`, of one sub-queue or of all."""
        ...

    def fetchwhile(self, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None) -> list[Entry]:
        """Fetch messages from the head while `holds`, of one sub-queue or of all."""
        ...

    def block(self, sub: str) -> None:
        """Skip a sub-queue in fetches until `unblock`."""
        ...

    def unblock(self, sub: str) -> None: ...

    def shrink(self) -> None:
        """Free as much memory as possible."""
        ...

    def head(self) -> Entry | None:
        """Return the message that a fetch would return first, without taking it."""
        ...

    def is_empty(self) -> bool:
        """Whether a fetch would find nothing."""
        ...

    def floor(self) -> bytes | None:
        """Return an enqueue time at or below that of every waiting message; empty if unknown, None if nothing waits."""
        ...

    def forget_returned(self) -> None:
        """Call `paged_out` for every returned message in memory, because memory is about to be dropped."""
        ...

    def resident_len(self) -> int:
        """Messages in memory. The total is in the queue's stats."""
        ...

    def is_duplicate(self, key: bytes) -> bool:
        """Whether a message with this key waits in the queue."""
        ...

    def browse(self, after: bytes, count: int) -> list[Entry]:
        """Return up to `count` waiting messages with keys above `after`, in key order, without changes."""
        ...

    def pick(self, keys: Sequence[bytes], *, leave: bool) -> list[Entry]:
        """Return the messages with these keys that wait in the queue, with their rows. Without `leave`, take them out,
        and the caller puts them back if its write fails."""
        ...

    def has_room_for(self, entries: Sequence[Entry]) -> bool:
        """Whether the messages fit into the limit of sub-queues."""
        ...

    def info(self) -> Info: ...
