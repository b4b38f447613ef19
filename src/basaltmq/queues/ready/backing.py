"""The backing queue: where the ready messages of one (sub-)queue are, and in which order.

Theory of operation
-------------------
A queue above (queue.py) knows consumers, leases, TTL and limits. Below it, a backing queue keeps order and decides what
is in memory. `paging.PagingQueue` is the main implementation; `fair.FairQueue` and `priority.PriorityQueue` implement
the same protocol over several of it, and can be stacked.

A message is in one of four states:

    alpha   row and body in memory. A persistent message is on disk too, in the family `messages`, from the batch that
            published it; a transient one is in memory only.
    beta    row in memory, body on disk: a body too large to be kept in the row (content.py), of a transient message.
    gamma   row in memory and on disk, body on disk: the same of a persistent message; and every leased message, whose
            row is dropped from memory the moment it is handed out.
    delta   on disk only: a persistent message beyond the window, or a transient one that memory had no room for.

                        published while there is room          fetched
        publisher ────────────────────────────────────> alpha ────────> leased (gamma) ──ack──> gone
              │         memory is full    │   ▲                           │
              └───────────> delta <───────┘   └──────── requeue ──────────┘
                              │  shrink           (to its place: the key has not moved)
                              └── read ahead ──> alpha

Invariants
----------
- The key (enqueue time, id) is the place. It never changes while a message is in the queue, so requeue is: put the
  entry back where its key says. Nothing is written to return a message whose row has not changed.
- Delta is everything on disk at or above the cursor that is not leased. So closing the window, opening it again and
  returning messages need no bookkeeping on disk, and the range below the cursor, which is full of tombstones, is
  never read again.
- Memory is bounded: per queue by `PagingLimits`, in total by one `MemoryBudget`. What does not fit is delta. A queue
  that may not hold anything still reads one message at a time, so it moves.
- A backing queue adds rows to the change it is handed and never writes persistent rows itself: one operation, one
  batch. What it adds to memory waits for the write; what it takes is put back if the write fails.

After a crash
-------------
Nothing here is recovered: a queue opens with an empty window and the cursor at its head, all of it delta. Counts come
from the queue's stats row, which is part of every batch. Transient messages are gone, with the family they were paged
to, which is wiped at open. Leased messages are known from their lease rows and are skipped when read.

What was tried and dropped: an iterator kept open as the cursor (it pins memory tables and files of a whole store for
the slowest consumer); a count per fairness key on disk (it doubles the writes of a queue with many keys; the keys are
found by skipping from one to the next instead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from basaltmq.queues.change import Change

if TYPE_CHECKING:
    from basaltmq.queues.ready.plain import Plain

TRANSIENT: Final = 1
"""Not promised to survive a restart."""
SPILLED: Final = 2
"""A transient message that is on disk for want of memory."""
APART: Final = 4
"""The body is not in the row but in the family `bodies`."""
SHARED: Final = 8
"""The body apart is shared with other messages, told by reference rows."""
TIMED: Final = 16
"""Has a row in the expiry index."""
RETURNED: Final = 32
"""Was delivered before and came back. In a row: with the number of times it came back without having failed."""

ENTRY_OVERHEAD_BYTES: Final = 320
"""What an entry costs beside its row: the object, its key, its slots in the containers (measured, rounded up)."""


class Entry(msgspec.Struct, gc=False):
    """A message as the queue machinery handles it: its place, its encoded row and what is looked at often.

    `row` is empty while the row is not in memory. `size_bytes` is the body's, which is what limits and counts are
    about. `expires_ns` is 0 for never.
    """

    key: bytes
    row: bytes
    size_bytes: int
    flags: int = 0
    expires_ns: int = 0

    def cost_bytes(self) -> int:
        """What the entry takes in memory."""
        return len(self.row) + ENTRY_OVERHEAD_BYTES


class Leased(Protocol):
    """What of a queue is handed out; such rows are on disk but not in the queue."""

    def has_key(self, key: bytes) -> bool: ...

    def held_among(self, keys: Sequence[bytes]) -> list[int]:
        """Which of the messages with these keys, which ascend, are handed out."""
        ...

    def paged_out(self, entry: Entry) -> None:
        """A message that came back leaves memory, and with it the mark that it did."""
        ...


class Info(msgspec.Struct, frozen=True):
    """What a backing queue says about itself."""

    resident: int
    resident_bytes: int
    paged: bool
    """Some of it is on disk only."""
    spilled: bool
    """Some transient messages went to disk for want of memory."""
    sub_queues: int = 1


class BackingQueue(Protocol):
    """Ready messages in order. Not thread-safe: the plane's lock is around every call."""

    def publish(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        """Add messages (all of one sub-queue, if that is named); they can be fetched when the change is written."""
        ...

    def publish_delivered(self, change: Change, entries: Sequence[Entry]) -> None:
        """Add messages that are handed to a consumer in the same change and never wait in the queue."""
        ...

    def discard(self, change: Change, entries: Sequence[Entry]) -> None:
        """Take messages back that were published in this same change: their rows are never written."""
        ...

    def fetch(self, count: int) -> list[Entry]:
        """Take up to `count` messages off the head, rows in memory. The caller requeues them if its write fails."""
        ...

    def fetch_plain(self, count: int) -> Plain | None:
        """Take up to `count` persistent messages off the head as columns, where that is how they are kept and there is
        nothing to say of them; otherwise None, and nothing is taken."""
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
        """Return fetched messages to their places at once, with nothing to write."""
        ...

    def remove(self, change: Change, entries: Sequence[Entry]) -> None:
        """Delete messages that wait in the queue, wherever they are in it."""
        ...

    def purge(self) -> None:
        """Forget everything that waits: the caller has deleted the rows."""
        ...

    def dropwhile(
        self, change: Change, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None
    ) -> list[Entry]:
        """Drop from the head as long as `holds`: of the one sub-queue, or of all."""
        ...

    def fetchwhile(self, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None) -> list[Entry]:
        """Fetch from the head as long as `holds`: of the one sub-queue, or of all."""
        ...

    def block(self, sub: str) -> None:
        """Leave a sub-queue out of fetches until `unblock`."""
        ...

    def unblock(self, sub: str) -> None: ...

    def shrink(self) -> None:
        """Give back all memory that can be given back."""
        ...

    def head(self) -> Entry | None:
        """The message a fetch would find first; it stays."""
        ...

    def is_empty(self) -> bool:
        """True if a fetch would find nothing."""
        ...

    def floor(self) -> bytes | None:
        """A place at or below that of every waiting message; empty if it is not known, None if nothing waits."""
        ...

    def forget_returned(self) -> None:
        """Say `paged_out` for every message in memory that came back: memory is about to be lost."""
        ...

    def resident_len(self) -> int:
        """Messages in memory. How many there are in all is the stats' matter: nobody counts what is on disk."""
        ...

    def is_duplicate(self, key: bytes) -> bool:
        """True if a message with this key waits in the queue."""
        ...

    def browse(self, after: bytes, count: int) -> list[Entry]:
        """Up to `count` waiting messages with keys above `after`, in key order, without changing anything."""
        ...

    def has_room_for(self, entries: Sequence[Entry]) -> bool:
        """False if messages would bring more sub-queues than are kept."""
        ...

    def info(self) -> Info: ...
