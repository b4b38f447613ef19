"""A backing queue that is fair between the fairness keys of its messages (SPEC C10).

One `PagingQueue` per fairness key that has something ready, and a scheduler (fairness.py) that says whose turn it is. A
key that runs empty is forgotten, so memory follows the keys that have messages, not those there ever were. With one
key it costs one comparison per message.

Which keys have messages on disk is found when the queue is first read after it was loaded: one pass that jumps from
key to key. The weight of a key is that of the message that came last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT
from basaltmq.queues.quarantine import Suspects
from basaltmq.queues.ready import on_disk
from basaltmq.queues.ready.backing import Entry, Info, Leased
from basaltmq.queues.ready.base import Proxy
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.ready.fair_scheduler import FairScheduler
from basaltmq.queues.ready.paging_queue import PagingQueue
from basaltmq.queues.ready.plain import Plain
from basaltmq.queues.ready.row_changes import cancel_rows, delete_rows, put_rows
from basaltmq.queues.ready.rows import prefix_of, read_entries, weight_of
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import lp, message_prefix, prefix_range, take_lp
from basaltmq.store.ranges import Piece, Range, Row, read_ranges

_PLACE_BYTES: Final = 24
"""Enqueue time and id: what a message's key has behind its sub-queue."""

_STRIDE: Final = 8
"""Rows of one sub-queue that are stepped over before it is cheaper to seek to the next one."""

MANY_KEYS: Final = 4096
"""Keys from which on they are served in runs: with so many a turn is far away for everyone, and what a turn costs (a
read from disk, if memory has no room for all of them) is shared by the messages of a run."""

FEW_KEYS_SHARE: Final = 8
"""Once in runs, keys are served so until an eighth of `MANY_KEYS` is left: those behind them are on disk as before."""

RUN: Final = 8
"""Messages of a run, times the weight; shares are as exact as before, over spans that are longer by this factor."""

AHEAD_KEYS: Final = 1024
"""Sub-queues read for at once, when they are on disk. Their rows are neighbours there if their turns are, and a pass
with one iterator costs a fifth of a scan for each."""

AHEAD_BYTES: Final = 4 << 20
"""What such a pass reads at most, where the budget has room for it; what a queue may read ahead, where it has not."""

SUB_QUEUES_MAX: Final = 1 << 18
"""Sub-queues that have messages: about 0.6 KiB of memory each, messages apart, so 160 MiB for a queue at most."""

_FLOOR_SUBS_MAX: Final = 64
"""Sub-queues asked for their first message to know the queue's; with more it is not worth the while."""


def sub_queues_on_disk(
    store: Store, queue: str, suspects: Suspects, floor: bytes = b"", *, spilled: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Sub-queues that have a row at or above the place `floor`, each with one of them; with `spilled` those of
    transient messages too, which may be named a second time.

    The usual sub-queue is looked at from the floor on: below it there may be millions of tombstones. A row whose key
    names no sub-queue is noted and left out.
    """
    yield from _sub_queues_of(store, suspects, Family.MESSAGES, queue, floor)
    if spilled:
        yield from _sub_queues_of(store, suspects, Family.TRANSIENT, queue, floor)


def _sub_queues_of(
    store: Store, suspects: Suspects, family: Family, queue: str, floor: bytes
) -> Iterator[tuple[str, bytes]]:
    prefix, end = prefix_range(message_prefix(queue))
    assert end is not None, "a length-prefixed name is never all 0xff"
    head = len(prefix)
    # The prefix alone is no message: the count of transient ones is there.
    start = prefix + b"\0"
    if not floor:
        yield from _sub_queues(store, suspects, family, head, start, end, floor)
        return
    usual = prefix_of(queue, FAIRNESS_KEY_DEFAULT)
    behind = _above(usual)
    yield from _sub_queues(store, suspects, family, head, start, usual, floor)
    yield from _sub_queues(store, suspects, family, head, usual + floor, behind, floor)
    yield from _sub_queues(store, suspects, family, head, behind, end, floor)


def _sub_queues(
    store: Store, suspects: Suspects, family: Family, head: int, start: bytes, end: bytes, floor: bytes
) -> Iterator[tuple[str, bytes]]:
    while True:
        current = b""
        stepped = 0
        found = False
        for key, row in store.scan(family, start, end):
            if current and key.startswith(current):
                if not found and key[-_PLACE_BYTES:-16] >= floor:
                    found = True
                    yield current[head + 2 :].decode(), row
                stepped += 1
                if stepped > _STRIDE:
                    break
                continue
            try:
                sub = _sub_of(key, head)
            except (CorruptionError, UnicodeDecodeError):
                suspects.note(family, key, row, f"its key of {len(key)} bytes names no sub-queue")
                continue
            current, stepped = key[:-_PLACE_BYTES], 0
            found = key[-_PLACE_BYTES:-16] >= floor
            if found:
                yield sub, row
        else:
            return
        # Past the rows below the floor first, if that is all that was seen of it.
        start = _above(current) if found or start == current + floor else current + floor


def _sub_of(key: bytes, head: int) -> str:
    """The sub-queue in a key of a queue whose keys have it at `head`."""
    sub, at = take_lp(key, head)
    if at + _PLACE_BYTES != len(key):
        raise CorruptionError(f"the key of a message has {len(key)} bytes, not {at + _PLACE_BYTES}")
    return sub.decode()


def _above(prefix: bytes) -> bytes:
    following = prefix_range(prefix)[1]
    assert following is not None, "a length-prefixed name is never all 0xff"
    return following


class FairQueue(Proxy):
    """Messages of several fairness keys, taken by weighted turns."""

    __slots__ = (
        "_blocked",
        "_budget",
        "_discover",
        "_floor",
        "_head",
        "_leased",
        "_limits",
        "_order",
        "_queue",
        "_run",
        "_scheduler",
        "_spilled",
        "_store",
        "_subs",
        "_suspects",
    )

    def __init__(
        self,
        store: Store,
        queue: str,
        budget: MemoryBudget,
        limits: PagingLimits,
        leased: Leased,
        suspects: Suspects,
        discover: Callable[[], Iterable[tuple[str, bytes]]] | None = None,
        floor: bytes = b"",
        *,
        spilled: bool = False,
    ) -> None:
        """`discover` tells the sub-queues on disk when first asked; None if there are none. Nothing is below
        `floor`. `spilled`: transient messages are on disk."""
        self._floor = floor
        self._spilled = spilled
        self._store = store
        self._queue = queue
        self._head = len(lp(queue)) + 2
        self._budget = budget
        self._limits = limits
        self._leased = leased
        self._suspects = suspects
        self._subs: dict[str, PagingQueue] = {}
        self._order: list[bytes] | None = None
        """Sub-queues as their keys are ordered, gone ones among them; None if there are others, or nobody asked."""
        self._scheduler = FairScheduler()
        self._run = 1
        self._blocked: set[str] = set()
        self._discover = discover

    def publish(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        put_rows(change, entries)
        change.after(lambda: self.append(entries, sub))

    def publish_delivered(self, change: Change, entries: Sequence[Entry]) -> None:
        put_rows(change, entries)

    def discard(self, change: Change, entries: Sequence[Entry]) -> None:
        cancel_rows(change, entries)

    def append(self, entries: Sequence[Entry], sub: str | None = None) -> None:
        groups = self._by_sub(entries) if sub is None or not entries else [(sub, entries)]
        self._choose_run()
        for name, group in groups:
            weight = 1 if isinstance(group, Plain) else weight_of(group[-1].row)
            self._sub(name).append(group)
            self._scheduler.ready(name, weight)
            if name in self._blocked:
                self._scheduler.block(name)

    def put_back(self, entries: Sequence[Entry]) -> None:
        for sub, group in self._by_sub(entries):
            self._sub(sub).put_back(group)
            self._scheduler.ready(sub)
            if sub in self._blocked:
                self._scheduler.block(sub)

    def requeue(self, change: Change, entries: Sequence[Entry]) -> None:
        change.after(lambda: self.put_back(entries))

    def _by_sub(self, entries: Sequence[Entry]) -> Iterable[tuple[str, Sequence[Entry]]]:
        if not entries:
            return []
        prefix = entries[0].key[:-_PLACE_BYTES]
        if not [e for e in entries if not e.key.startswith(prefix)]:
            return [(prefix[self._head :].decode(), entries)]
        ordered = sorted(entries, key=attrgetter("key"))
        return [
            (prefix[self._head :].decode(), list(group))
            for prefix, group in groupby(ordered, lambda e: e.key[:-_PLACE_BYTES])
        ]

    def _sub(self, sub: str) -> PagingQueue:
        found = self._subs.get(sub)
        if found is None:
            # Before the sub-queues on disk are known, this one may have messages there.
            found = self._subs[sub] = self._make(sub, known_empty=self._discover is None)
        return found

    def _make(self, sub: str, *, known_empty: bool) -> PagingQueue:
        self._order = None
        prefix = prefix_of(self._queue, sub)
        return PagingQueue(
            self._store,
            prefix,
            self._budget,
            self._limits,
            self._leased,
            self._suspects,
            known_empty=known_empty,
            head=prefix + self._floor,
            spilled=self._spilled,
        )

    def _known(self) -> None:
        """Learn which sub-queues are on disk. If reading fails, it is tried again with the next call."""
        if self._discover is None:
            return
        found = [(sub, weight_of(row)) for sub, row in self._discover()]
        self._discover = None
        for sub, weight in found:
            self.add_sub(sub, weight)

    def add_sub(self, sub: str, weight: int) -> None:
        """A sub-queue is on disk."""
        if sub not in self._subs:
            self._subs[sub] = self._make(sub, known_empty=False)
            self._choose_run()
            self._scheduler.ready(sub, weight)

    def fetch(self, count: int) -> list[Entry]:
        self._known()
        if len(self._subs) == 1 and not self._blocked:
            sub, only = next(iter(self._subs.items()))
            taken = only.fetch(count)
            if len(taken) < count:
                self._lose(sub)
            return taken
        taken = []
        subs = self._subs
        charged = 0
        prepare = self._read_ahead if self._choose_run() > 1 else None

        def fetch(sub: str, most: int) -> tuple[int, bool]:
            nonlocal charged
            count, cost_bytes, more = subs[sub].take_turn(most, taken)
            charged += cost_bytes
            if not more:
                del subs[sub]
            return count, more

        self._scheduler.deliver(count, fetch, prepare)
        self._budget.charge(-charged)
        return taken

    def fetch_plain(self, count: int) -> Plain | None:
        self._known()
        if len(self._subs) != 1 or self._blocked:
            return None
        sub, only = next(iter(self._subs.items()))
        taken = only.fetch_plain(count)
        if taken is not None and len(taken) < count:
            self._lose(sub)
        return taken

    def _choose_run(self) -> int:
        """Serve many keys in runs."""
        count = len(self._subs)
        run = RUN if count > MANY_KEYS else 1 if count <= MANY_KEYS // FEW_KEYS_SHARE else self._run
        if run != self._run:
            self._run = run
            self._scheduler.set_quantum(run)
        return run

    def _read_ahead(self, turns: list[tuple[str, int]]) -> None:
        """Read for many sub-queues whose turns are next, if one of those that have theirs is on disk."""
        subs = self._subs
        paged = [turn for turn in turns if subs[turn[0]].cursor is not None]
        due = {sub: place for sub, most in paged if (place := subs[sub].to_read(most)) is not None}
        if not due:
            return
        places = dict(due)
        for sub, most in self._scheduler.upcoming(AHEAD_KEYS):
            if sub not in places and (place := subs[sub].to_read(most)) is not None:
                places[sub] = place
        # What a pass has no room for is read when it is its turn. For some of it, it is.
        while places:
            places = {sub: due[sub] for sub in self._read_for(places) if sub in due}

    def _read_for(self, places: dict[str, Range]) -> list[str]:
        """Read from disk for sub-queues in one pass; those that were left out for want of room."""
        wanted = sorted((place, sub) for sub, place in places.items())
        bytes_max = min(AHEAD_BYTES, max(1, self._limits.read_ahead_bytes, self._budget.room_bytes()))
        found = read_ranges(self._store, Family.MESSAGES, [place for place, _ in wanted], bytes_max)
        read = self._read([sub for _, sub in wanted], found)
        charged = 0
        for ((_, _, rows_max), sub), rows, entries in zip(wanted, found, read, strict=False):
            if rows is not None:
                cursor = None if len(rows) < rows_max else rows[-1][0] + b"\0"
                charged += self._subs[sub].take_in(entries, cursor)
        self._budget.charge(charged)
        return [sub for _, sub in wanted[len(found) :]]

    def _read(self, subs: list[str], found: list[list[Row] | None]) -> list[list[Entry]]:
        """By sub-queue, the messages of rows that are not leased; rows that cannot be read are noted and left out."""
        rows = [row for each in found if each for row in each]
        held = set(self._leased.held_among([key for key, _ in rows]))
        try:
            entries: list[Entry] | None = read_entries(rows)
        except CorruptionError:
            entries = None
        read: list[list[Entry]] = []
        at = 0
        for sub, each in zip(subs, found, strict=False):
            begin, at = at, at + len(each or ())
            key_bytes = self._head + len(sub.encode()) + _PLACE_BYTES
            if each is None:
                read.append([])
            elif entries is None or [key for key, _ in each if len(key) != key_bytes]:
                piece = Piece([], [], [])
                piece.add(each)
                prefix = prefix_of(self._queue, sub)
                read.append([*on_disk.read(self._store, prefix, piece, self._leased, self._suspects)])
            elif held:
                read.append([entries[n] for n in range(begin, at) if n not in held])
            else:
                read.append(entries[begin:at])
        return read

    def _lose(self, sub: str) -> None:
        del self._subs[sub]
        self._scheduler.idle(sub)

    def fetchwhile(self, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None) -> list[Entry]:
        self._known()
        taken: list[Entry] = []
        for name in list(self._subs) if sub is None else [sub]:
            if len(taken) == count_max:
                break
            queue = self._subs.get(name)
            if queue is not None:
                taken += queue.fetchwhile(holds, count_max - len(taken))
                if queue.is_empty():
                    self._lose(name)
        return taken

    def remove(self, change: Change, entries: Sequence[Entry]) -> None:
        delete_rows(change, entries)
        change.after(lambda: self._forget(entries))

    def _forget(self, entries: Sequence[Entry]) -> None:
        for sub, group in self._by_sub(entries):
            queue = self._subs.get(sub)
            if queue is not None:
                queue.forget(group)

    def purge(self) -> None:
        # There may be a hundred thousand of them, and everybody waits: they are let go as they are.
        self._budget.charge(-sum([queue.resident_bytes() for queue in self._subs.values()]))
        self._subs.clear()
        self._scheduler.clear()
        self._discover = None

    def block(self, sub: str) -> None:
        self._blocked.add(sub)
        self._scheduler.block(sub)

    def unblock(self, sub: str) -> None:
        if sub in self._blocked:
            self._blocked.discard(sub)
            if sub in self._subs:
                self._scheduler.ready(sub)

    def shrink(self) -> None:
        for queue in self._subs.values():
            queue.shrink()

    def head(self) -> Entry | None:
        self._known()
        for sub, queue in list(self._subs.items()):
            found = queue.head()
            if found is not None:
                return found
            self._lose(sub)
        return None

    def is_empty(self) -> bool:
        return self.head() is None

    def floor(self) -> bytes | None:
        if self._discover is not None or len(self._subs) > _FLOOR_SUBS_MAX:
            return b""
        return min((low for queue in self._subs.values() if (low := queue.floor()) is not None), default=None)

    def forget_returned(self) -> None:
        for queue in self._subs.values():
            queue.forget_returned()

    def resident_len(self) -> int:
        return sum(queue.resident_len() for queue in self._subs.values())

    def is_duplicate(self, key: bytes) -> bool:
        self._known()
        queue = self._subs.get(key[self._head : -_PLACE_BYTES].decode())
        return queue is not None and queue.is_duplicate(key)

    def browse(self, after: bytes, count: int) -> list[Entry]:
        self._known()
        if self._order is None:
            self._order = sorted(map(lp, self._subs))
        # The last one below the place is the one it is in, if that is still there.
        at = max(0, bisect_left(self._order, after[self._head - 2 :]) - 1) if after else 0
        found: list[Entry] = []
        while at < len(self._order) and len(found) < count:
            queue = self._subs.get(self._order[at][2:].decode())
            if queue is not None:
                found += queue.browse(after, count - len(found))
            at += 1
        return found

    def sub_queues(self) -> list[tuple[str, PagingQueue, int, int]]:
        """Sub-queues that have messages, each with its weight and its deficit."""
        self._known()
        scheduler = self._scheduler
        return [(sub, queue, scheduler.weight(sub) or 1, scheduler.deficit(sub)) for sub, queue in self._subs.items()]

    def has_room_for(self, entries: Sequence[Entry]) -> bool:
        self._known()
        if len(self._subs) + len(entries) <= SUB_QUEUES_MAX:
            return True
        unknown = {sub for sub, _ in self._by_sub(entries)} - self._subs.keys()
        return len(self._subs) + len(unknown) <= SUB_QUEUES_MAX or not unknown

    def info(self) -> Info:
        infos = [queue.info() for queue in self._subs.values()]
        return Info(
            sum(i.resident for i in infos),
            sum(i.resident_bytes for i in infos),
            self._discover is not None or any(i.paged for i in infos),
            any(i.spilled for i in infos),
            len(infos),
        )
