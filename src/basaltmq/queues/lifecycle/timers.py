"""Durable timers of all queues, in due order.

    timer   | due ns u64 | kind (1) | lp(queue) |  ->  nothing

A timer marks that something of a kind may be due in a queue. The queue's own rows (delayed, expiry, dedup) define what
is due. So a timer may fire for nothing, and timers of a deleted queue have no effect. Timers with the same time, kind
and queue are one row. Only the next deadline is in memory, so 100,000 idle queues cost no memory for timers.

Times are rounded up to a millisecond, so that calls of the same millisecond share a row.

An unreadable key is noted for the quarantine. Its meaning is unknown, so `Rearm` scans the rows that need timers and
sets their timers again, as it does if the store has skipped unreadable timers. A timer that already exists is the same
row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.entries.quarantine import Suspects
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import take_lp
from basaltmq.store.keys.queues import decode_timer_key, timer_bound, timer_key

DELAYED: Final = b"d"
"""Delayed messages are due."""
EXPIRY: Final = b"e"
"""Messages expire."""
UNUSED: Final = b"u"
"""A queue may have been unused for too long."""
DEDUP: Final = b"p"
"""Deduplication ids expire."""

ROUND_NS: Final = 1_000_000

DEDUP_NS: Final = 1_000_000_000
"""Ids expire up to one second late: one timer per second and queue, instead of one per publish."""

REARM_PAGE: Final = 1000
"""Rows scanned per change when timers are set again: a few milliseconds of work."""


class Timer(msgspec.Struct, frozen=True):
    """A timer row."""

    due_ns: int
    kind: bytes
    queue: str


class Timers:
    """The rows of the family `timers`."""

    def __init__(self, store: Store, suspects: Suspects) -> None:
        self._store = store
        self._suspects = suspects
        self._from_ns = 0
        self._deadline_ns: int | None = None
        self.rearm: Rearm | None = None
        """Work left after a timer was lost; None if there is none."""
        self._has_skipped = False
        """Whether the store has skipped timers, which `rearm` sets again."""
        self._find_first()

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
        """Return up to `count_max` due timers. They stay until `clear`."""
        if self._deadline_ns is None or self._deadline_ns > now_ns:
            return []
        found = list(islice(self._timers(timer_bound(now_ns + 1)), count_max))
        if not found:
            self._find_first()
        return found

    def clear(self, change: Change, timer: Timer) -> None:
        """Delete a timer that was served."""
        change.batch.delete(Family.TIMERS, timer_key(timer.due_ns, timer.kind, timer.queue))
        change.after(self._find_first)

    def _lower(self, due_ns: int) -> None:
        self._from_ns = min(self._from_ns, due_ns)
        if self._deadline_ns is None or due_ns < self._deadline_ns:
            self._deadline_ns = due_ns

    def _find_first(self) -> None:
        """Find the first timer. Earlier keys are not scanned again."""
        first = next(self._timers(None), None)
        if not self._has_skipped and self._store.has_unreadable(Family.TIMERS):
            self._has_skipped = True
            self.rearm = Rearm(self._store)
        if first is None:
            self._deadline_ns = None
        else:
            self._deadline_ns = self._from_ns = first.due_ns

    def _timers(self, end: bytes | None) -> Iterator[Timer]:
        """Yield the timers from the first one on."""
        for key, row in self._store.scan(Family.TIMERS, timer_bound(self._from_ns), end):
            try:
                yield Timer(*decode_timer_key(key))
            except CorruptionError as error:
                self._suspects.note(Family.TIMERS, key, row, str(error))
                if self.rearm is None:
                    self.rearm = Rearm(self._store)


class Rearm:
    """Sets the timers of delayed messages, expiries and deduplication ids again, a page per change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._families = [(Family.DELAYED, DELAYED), (Family.MESSAGE_EXPIRY, EXPIRY), (Family.DEDUP_EXPIRY, DEDUP)]
        self._after = b""

    def step(self, timers: Timers, change: Change) -> None:
        """Process a page."""
        family, kind = self._families[0]
        page = list(islice(self._store.scan(family, self._after), REARM_PAGE))
        for key, _ in page:
            try:
                queue, at = take_lp(key, 0)
                due_ns = int.from_bytes(key[at : at + 8], "big")
                timers.set(change, due_ns + -due_ns % (DEDUP_NS if kind == DEDUP else ROUND_NS), kind, queue.decode())
            except (CorruptionError, UnicodeDecodeError):
                # The regular reader of the row notes it for the quarantine.
                continue
        is_done = len(page) < REARM_PAGE
        change.after(lambda: self._advance(timers, b"" if is_done else page[-1][0] + b"\0", is_done))

    def _advance(self, timers: Timers, after: bytes, is_done: bool) -> None:
        self._after = after
        if is_done:
            del self._families[0]
        if not self._families:
            timers.rearm = None
