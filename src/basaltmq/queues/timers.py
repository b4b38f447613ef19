"""Durable deadlines of all queues in one order: who has to be looked at when.

    timer   | due ns u64 | kind (1) | lp(queue) |  ->  nothing

A timer says that something of a kind may be due in a queue; what it is, the queue's own rows say (delayed, expiry,
dedup). So a timer may fire for nothing, two of one moment are one row, and the timers of a deleted queue run into the
void. In memory there is the next deadline and nothing else: a hundred thousand idle queues cost no timers.

Times are rounded up to a millisecond, so that the calls of one millisecond share a row.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import msgspec

from basaltmq.queues.change import Change
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys import decode_timer_key, timer_bound, timer_key

DELAYED: Final = b"d"
"""Delayed messages come due."""
EXPIRY: Final = b"e"
"""Messages expire."""
UNUSED: Final = b"u"
"""A queue may have been unused for too long."""
DEDUP: Final = b"p"
"""Publishers' ids leave their window."""

ROUND_NS: Final = 1_000_000


class Timer(msgspec.Struct, frozen=True):
    """One row."""

    due_ns: int
    kind: bytes
    queue: str


class Timers:
    """The rows of the family `timers`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._from_ns = 0
        self._deadline_ns: int | None = None
        self._look()

    def set(self, change: Change, due_ns: int, kind: bytes, queue: str) -> None:
        due_ns += -due_ns % ROUND_NS
        key = timer_key(due_ns, kind, queue)
        if key not in change.marks:
            change.marks.add(key)
            change.batch.put(Family.TIMERS, key, b"")
            change.after(lambda: self._lower(due_ns))

    def deadline_ns(self) -> int | None:
        return self._deadline_ns

    def due(self, now_ns: int, count_max: int) -> list[Timer]:
        """Up to `count_max` timers that are due. They stay until `clear`; ask again to go on."""
        if self._deadline_ns is None or self._deadline_ns > now_ns:
            return []
        rows = self._store.scan(Family.TIMERS, timer_bound(self._from_ns), timer_bound(now_ns + 1))
        found = [Timer(*decode_timer_key(key)) for key, _ in islice(rows, count_max)]
        if not found:
            self._look()
        return found

    def clear(self, change: Change, timer: Timer) -> None:
        """What the timer stood for is done."""
        change.batch.delete(Family.TIMERS, timer_key(timer.due_ns, timer.kind, timer.queue))
        change.after(self._look)

    def _lower(self, due_ns: int) -> None:
        self._from_ns = min(self._from_ns, due_ns)
        if self._deadline_ns is None or due_ns < self._deadline_ns:
            self._deadline_ns = due_ns

    def _look(self) -> None:
        """Find the first timer; everything before it is done, and not scanned again."""
        first = next(iter(self._store.scan(Family.TIMERS, timer_bound(self._from_ns))), None)
        if first is None:
            self._deadline_ns = None
        else:
            self._deadline_ns = self._from_ns = decode_timer_key(first[0])[0]
