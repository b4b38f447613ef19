"""A backing queue with priorities: one `FairQueue` per priority, highest non-empty level first (SPEC E7).

A message's priority is part of its sub-queue's name (rows.sub_queue) and so of its key. A returned message goes back to
its level. Levels are created with their first message; there are at most 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import Entry, Info
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.entries.rows import split_sub_queue, weight_of
from basaltmq.queues.ready.base import BackingQueueBase
from basaltmq.queues.ready.fair_queue import FairQueue
from basaltmq.queues.ready.paging_queue import PagingQueue
from basaltmq.queues.ready.row_changes import put_rows
from basaltmq.store.keys.parts import lp
from basaltmq.store.keys.queues import TIME_AND_ID_BYTES


class PriorityQueue(BackingQueueBase):
    """Messages of several priorities, highest first."""

    __slots__ = ("_discover", "_levels", "_make", "_name_at")

    def __init__(
        self,
        queue: str,
        make: Callable[[], FairQueue],
        discover: Callable[[], Iterable[tuple[str, bytes]]] | None = None,
    ) -> None:
        """`make` creates an empty level. `discover` yields the sub-queues on disk, on first use."""
        self._name_at = len(lp(queue)) + 2
        self._make = make
        self._discover = discover
        self._levels: dict[int, FairQueue] = {}

    def publish(self, change: Change, entries: Sequence[Entry], sub: str | None = None) -> None:
        put_rows(change, entries)
        change.after(lambda: self.append(entries))

    def append(self, entries: Sequence[Entry], sub: str | None = None, weight: int | None = None) -> None:
        for priority, group in self._by_level(entries):
            self._level(priority).append(group)

    def put_back(self, entries: Sequence[Entry]) -> None:
        for priority, group in self._by_level(entries):
            self._level(priority).put_back(group)

    def _by_level(self, entries: Sequence[Entry]) -> list[tuple[int, list[Entry]]]:
        self._ensure_discovered()
        return [
            (priority, list(group))
            for priority, group in groupby(sorted(entries, key=self._priority), key=self._priority)
        ]

    def _priority(self, entry: Entry) -> int:
        return split_sub_queue(entry.key[self._name_at : -TIME_AND_ID_BYTES].decode())[0]

    def _level(self, priority: int) -> FairQueue:
        level = self._levels.get(priority)
        if level is None:
            self._levels[priority] = level = self._make()
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        return level

    def _ensure_discovered(self) -> None:
        """Find the sub-queues on disk. If reading fails, the next call tries again."""
        if self._discover is not None:
            found = [(sub, weight_of(row)) for sub, row in self._discover()]
            self._discover = None
            for sub, weight in found:
                self._level(split_sub_queue(sub)[0]).add_sub(sub, weight)

    def fetch(self, count: int) -> list[Entry]:
        self._ensure_discovered()
        taken: list[Entry] = []
        for level in self._levels.values():
            taken += level.fetch(count - len(taken))
            if len(taken) == count:
                break
        return taken

    def fetch_plain(self, count: int) -> Plain | None:
        # Deliveries of this queue must carry the mark that their key has a priority.
        return None

    def fetchwhile(self, holds: Callable[[Entry], bool], count_max: int, sub: str | None = None) -> list[Entry]:
        self._ensure_discovered()
        taken: list[Entry] = []
        for level in self._levels.values():
            if len(taken) == count_max:
                break
            taken += level.fetchwhile(holds, count_max - len(taken), sub)
        return taken

    def remove(self, change: Change, entries: Sequence[Entry]) -> None:
        for priority, group in self._by_level(entries):
            self._level(priority).remove(change, group)

    def purge(self) -> None:
        for level in self._levels.values():
            level.purge()
        self._discover = None

    def block(self, sub: str) -> None:
        self._level(split_sub_queue(sub)[0]).block(sub)

    def unblock(self, sub: str) -> None:
        self._level(split_sub_queue(sub)[0]).unblock(sub)

    def shrink(self) -> None:
        for level in self._levels.values():
            level.shrink()

    def head(self) -> Entry | None:
        self._ensure_discovered()
        return next((found for level in self._levels.values() if (found := level.head()) is not None), None)

    def floor(self) -> bytes | None:
        if self._discover is not None:
            return b""
        return min((low for level in self._levels.values() if (low := level.floor()) is not None), default=None)

    def forget_returned(self) -> None:
        for level in self._levels.values():
            level.forget_returned()

    def resident_len(self) -> int:
        return sum(level.resident_len() for level in self._levels.values())

    def is_duplicate(self, key: bytes) -> bool:
        self._ensure_discovered()
        return any(level.is_duplicate(key) for level in self._levels.values())

    def browse(self, after: bytes, count: int) -> list[Entry]:
        self._ensure_discovered()
        found = [entry for level in self._levels.values() for entry in level.browse(after, count)]
        return sorted(found, key=lambda e: e.key)[:count]

    def pick(self, keys: Sequence[bytes], *, leave: bool) -> list[Entry]:
        self._ensure_discovered()
        return [entry for level in self._levels.values() for entry in level.pick(keys, leave=leave)]

    def sub_queues(self) -> list[tuple[str, PagingQueue, int, int]]:
        """Return the non-empty sub-queues of all levels, each with its weight and deficit."""
        self._ensure_discovered()
        return [each for level in self._levels.values() for each in level.sub_queues()]

    def has_room_for(self, entries: Sequence[Entry]) -> bool:
        return all(self._level(priority).has_room_for(group) for priority, group in self._by_level(entries))

    def info(self) -> Info:
        self._ensure_discovered()
        infos = [level.info() for level in self._levels.values()]
        return Info(
            sum(i.resident for i in infos),
            sum(i.resident_bytes for i in infos),
            any(i.paged for i in infos),
            any(i.spilled for i in infos),
            sum(i.sub_queues for i in infos),
        )
