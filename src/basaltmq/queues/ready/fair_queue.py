"""A backing queue that is fair between the fairness keys of its messages (SPEC C10).

It has one `PagingQueue` per fairness key with ready messages, and a `FairScheduler` that picks the next key. An empty
key is removed, so memory use depends on keys with messages only. A queue with one key pays one comparison per message.

The keys on disk are found on the first read after loading, in one pass that seeks from key to key. A key has the weight
of its latest message.
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
from basaltmq.queues.entries.backing import Entry, Info, Leased
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.entries.quarantine import Suspects
from basaltmq.queues.entries.rows import prefix_of, read_entries, weight_of
from basaltmq.queues.ready import on_disk
from basaltmq.queues.ready.base import BackingQueueBase
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.ready.fair_scheduler import FairScheduler
from basaltmq.queues.ready.paging_queue import PagingQueue
from basaltmq.queues.ready.row_changes import delete_rows, put_rows
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp, prefix_range, take_lp
from basaltmq.store.keys.queues import TIME_AND_ID_BYTES, message_prefix
from basaltmq.store.ranges import Piece, Range, Row, read_ranges

_STRIDE: Final = 8
"""Rows of one sub-queue read before seeking to the next sub-queue is cheaper."""

MANY_KEYS: Final = 4096
"""Keys above which each turn serves a run of messages. With so many keys each turn is far away anyway. A run shares the
cost of a turn: a disk read, if memory cannot hold all keys."""

FEW_KEYS_SHARE: Final = 8
"""Runs stop at `MANY_KEYS` divided by this. Until then the remaining keys are still on disk."""

RUN: Final = 8
"""Messages per run, times the weight. Shares stay exact, over spans that are longer by this factor."""

AHEAD_KEYS: Final = 1024
"""Sub-queues read in one pass when they are on disk. Sub-queues with adjacent turns have adjacent rows, and a pass with
one iterator costs a fifth of one scan each."""

AHEAD_BYTES: Final = 4 << 20
"""Most bytes read by such a pass, if the budget has room. Otherwise the limit is the queue's read-ahead."""

SUB_QUEUES_MAX: Final = 1 << 18
"""Non-empty sub-queues of a queue. Each takes about 0.6 KiB of memory without messages, so 160 MiB at most."""

_FLOOR_SUBS_MAX: Final = 64
"""Most sub-queues checked to find the queue's first message. Above that the floor is unknown."""


def sub_queues_on_disk(
    store: Store, queue: str, suspects: Suspects, floor: bytes = b"", *, spilled: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Yield each sub-queue that has a row enqueued at or after `floor`, with one such row.

    With `spilled`, include transient messages; a sub-queue may then appear twice. The default sub-queue is read from
    the floor on, because there may be millions of tombstones below it. A row whose key has no valid sub-queue is noted
    for the quarantine and skipped.
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
    # The bare prefix is the key of the transient counts, not of a message.
    start = prefix + b"\0"
    if not floor:
        yield from _sub_queues(store, suspects, family, head, start, end, floor)
        return
    usual = prefix_of(queue, FAIRNESS_KEY_DEFAULT)
    behind = on_disk.end_of(usual)
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
                if not found and key[-TIME_AND_ID_BYTES:-16] >= floor:
                    found = True
                    yield current[head + 2 :].decode(), row
                stepped += 1
                if stepped > _STRIDE:
                    break
                continue
            try:
                sub = _sub_of(key, head)
            except (CorruptionError, UnicodeDecodeError):
                suspects.note(family, key, row, f"the key of {len(key)} bytes has no valid sub-queue")
                continue
            current, stepped = key[:-TIME_AND_ID_BYTES], 0
            found = key[-TIME_AND_ID_BYTES:-16] >= floor
            if found:
                yield sub, row
        else:
            return
        # If only rows below the floor were seen, seek to the floor first.
        start = on_disk.end_of(current) if found or start == current + floor else current + floor


def _sub_of(key: bytes, head: int) -> str:
    """Return the sub-queue in a key. `head` is its offset."""
    sub, at = take_lp(key, head)
    if at + TIME_AND_ID_BYTES != len(key):
        raise CorruptionError(f"a message key has {len(key)} bytes, not {at + TIME_AND_ID_BYTES}")
    return sub.decode()


class FairQueue(BackingQueueBase):
    """Messages of several fairness keys, served in weighted turns."""

    __slots__ = (
        "_blocked",
        "_budget",
        "_discover",
        "_floor",
        "_leased",
        "_limits",
        "_name_at",
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
        """`discover` yields the sub-queues on disk, on first use; None if there are none. No message is below `floor`.
        `spilled`: transient messages are on disk."""
        self._floor = floor
        self._spilled = spilled
        self._store = store
        self._queue = queue
        self._name_at = len(lp(queue)) + 2
        self._budget = budget
        self._limits = limits
        self._leased = leased
        self._suspects = suspects
        self._subs: dict[str, PagingQueue] = {}
        self._order: list[bytes] | None = None
        """Names of the sub-queues in key order, which may include removed ones. None if it must be sorted again."""
        self._scheduler = FairScheduler()
        self._run = 1
        self._blocked: set[str] = set()
        self._discover = discover

    def publish(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        put_rows(change, entries)
        change.after(lambda: self.append(entries, sub))

    def append(self, entries: Sequence[Entry], sub: str | None = None, weight: int | None = None) -> None:
        groups = self._by_sub(entries) if sub is None or not entries else [(sub, entries)]
        self._choose_run()
        for name, group in groups:
            wanted = weight
            if wanted is None:
                wanted = 1 if isinstance(group, Plain) else weight_of(group[-1].row)
            self._sub_queue(name).append(group)
            self._scheduler.ready(name, wanted)
            if name in self._blocked:
                self._scheduler.block(name)

    def put_back(self, entries: Sequence[Entry]) -> None:
        for sub, group in self._by_sub(entries):
            self._sub_queue(sub).put_back(group)
            self._scheduler.ready(sub)
            if sub in self._blocked:
                self._scheduler.block(sub)

    def _by_sub(self, entries: Sequence[Entry]) -> Iterable[tuple[str, Sequence[Entry]]]:
        if not entries:
            return []
        prefix = entries[0].key[:-TIME_AND_ID_BYTES]
        if not [e for e in entries if not e.key.startswith(prefix)]:
            return [(prefix[self._name_at :].decode(), entries)]
        ordered = sorted(entries, key=attrgetter("key"))
        return [
            (prefix[self._name_at :].decode(), list(group))
            for prefix, group in groupby(ordered, lambda e: e.key[:-TIME_AND_ID_BYTES])
        ]

    def _sub_queue(self, sub: str) -> PagingQueue:
        found = self._subs.get(sub)
        if found is None:
            # Until discovery, this sub-queue may have messages on disk.
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

    def _ensure_discovered(self) -> None:
        """Find the sub-queues on disk. If reading fails, the next call tries again."""
        if self._discover is None:
            return
        found = [(sub, weight_of(row)) for sub, row in self._discover()]
        self._discover = None
        for sub, weight in found:
            self.add_sub(sub, weight)

    def add_sub(self, sub: str, weight: int) -> None:
        """Add a sub-queue that is on disk."""
        if sub not in self._subs:
            self._subs[sub] = self._make(sub, known_empty=False)
            self._choose_run()
            self._scheduler.ready(sub, weight)

    def fetch(self, count: int) -> list[Entry]:
        self._ensure_discovered()
        if len(self._subs) == 1 and not self._blocked:
            sub, only = next(iter(self._subs.items()))
            taken = only.fetch(count)
            if len(taken) < count:
                self._remove_sub_queue(sub)
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
        self._ensure_discovered()
        if len(self._subs) != 1 or self._blocked:
            return None
        sub, only = next(iter(self._subs.items()))
        taken = only.fetch_plain(count)
        if taken is not None and len(taken) < count:
            self._remove_sub_queue(sub)
        return taken

    def _choose_run(self) -> int:
        """Set the length of runs from the number of keys, and return it."""
        count = len(self._subs)
        run = RUN if count > MANY_KEYS else 1 if count <= MANY_KEYS // FEW_KEYS_SHARE else self._run
        if run != self._run:
            self._run = run
            self._scheduler.set_quantum(run)
        return run

    def _read_ahead(self, turns: list[tuple[str, int]]) -> None:
        """If a sub-queue of these turns must be read from disk, read the next turns of many sub-queues in one pass."""
        subs = self._subs
        paged = [turn for turn in turns if subs[turn[0]].cursor is not None]
        due = {sub: place for sub, most in paged if (place := subs[sub].to_read(most)) is not None}
        if not due:
            return
        places = dict(due)
        for sub, most in self._scheduler.upcoming(AHEAD_KEYS):
            if sub not in places and (place := subs[sub].to_read(most)) is not None:
                places[sub] = place
        # Sub-queues that did not fit are read with their turn. Repeat for those whose turn is now.
        while places:
            places = {sub: due[sub] for sub in self._read_for(places) if sub in due}

    def _read_for(self, places: dict[str, Range]) -> list[str]:
        """Read for sub-queues in one pass. Return those that were left out for lack of room."""
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
        """Return, per sub-queue, the messages that are not leased. Unreadable rows are noted for the quarantine and
        skipped."""
        rows = [row for each in found if each for row in each]
        held = set(self._leased.leased_among([key for key, _ in rows]))
        try:
            entries: list[Entry] | None = read_entries(rows)
        except CorruptionError:
            entries = None
        read: list[list[Entry]] = []
        at = 0
        for sub, each in zip(subs, found, strict=False):
            begin, at = at, at + len(each or ())
            key_bytes = self._name_at + len(sub.encode()) + TIME_AND_ID_BYTES
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

    def _remove_sub_queue(self, sub: str) -> None:
        del self._subs[sub]
        self._scheduler.idle(sub)

    def fetchwhile(self, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None) -> list[Entry]:
        self._ensure_discovered()
        taken: list[Entry] = []
        for name in list(self._subs) if sub is None else [sub]:
            if len(taken) == count_max:
                break
            queue = self._subs.get(name)
            if queue is not None:
                taken += queue.fetchwhile(holds, count_max - len(taken))
                if queue.is_empty():
                    self._remove_sub_queue(name)
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
        # There may be 100,000 sub-queues, so drop them without purging each.
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
        self._ensure_discovered()
        for sub, queue in list(self._subs.items()):
            found = queue.head()
            if found is not None:
                return found
            self._remove_sub_queue(sub)
        return None

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
        self._ensure_discovered()
        queue = self._subs.get(key[self._name_at : -TIME_AND_ID_BYTES].decode())
        return queue is not None and queue.is_duplicate(key)

    def browse(self, after: bytes, count: int) -> list[Entry]:
        self._ensure_discovered()
        if self._order is None:
            self._order = sorted(map(lp, self._subs))
        # The last sub-queue below the key contains it, if it still exists.
        at = max(0, bisect_left(self._order, after[self._name_at - 2 :]) - 1) if after else 0
        found: list[Entry] = []
        while at < len(self._order) and len(found) < count:
            queue = self._subs.get(self._order[at][2:].decode())
            if queue is not None:
                found += queue.browse(after, count - len(found))
            at += 1
        return found

    def pick(self, keys: Sequence[bytes], *, leave: bool) -> list[Entry]:
        self._ensure_discovered()
        found: list[Entry] = []
        for prefix, group in groupby(sorted(keys), lambda key: key[:-TIME_AND_ID_BYTES]):
            queue = self._subs.get(prefix[self._name_at :].decode())
            if queue is not None:
                found += queue.pick(list(group), leave=leave)
        return found

    def sub_queues(self) -> list[tuple[str, PagingQueue, int, int]]:
        """Return the non-empty sub-queues, each with its weight and deficit."""
        self._ensure_discovered()
        scheduler = self._scheduler
        return [(sub, queue, scheduler.weight(sub) or 1, scheduler.deficit(sub)) for sub, queue in self._subs.items()]

    def has_room_for(self, entries: Sequence[Entry]) -> bool:
        self._ensure_discovered()
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
