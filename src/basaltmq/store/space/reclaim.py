"""Giving the space of deleted rows back to the disk.

Deleting gives no space back until RocksDB has compacted, and a store that takes no more messages may never compact by
itself. `reclaim` flushes, which also deletes obsolete WAL files, and compacts the largest families first; blob files
without live values go with it. `Reclaimer` repeats that at a bounded rate: only after something was written since the
last time, and after a rest as long as the work took.

On a disk that is almost full neither may start: a flush that fails poisons the store, and a compaction that fails stops
all later ones until the store is opened again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from basaltmq.store.families import MIB, Family

SMALL_PART: Final = 100
"""A family that holds less than one part in so many is not worth a compaction."""

REST_S_MIN: Final = 1.0
"""Between two reclaims of one store, however short they were."""

FREE_BYTES_MIN: Final = 4 * MIB
"""Left free by a flush, and needed by a compaction: its output begins with one file."""


class Reclaimable(Protocol):
    """What is needed of a store."""

    def properties(self, family: Family | None = None) -> dict[str, int]: ...

    def flush(self, family: Family | None = None, *, wait: bool = True) -> None: ...

    def compact(self, family: Family | None = None) -> None: ...

    def writes(self) -> int: ...


class Beside(Protocol):
    """What is kept beside a store and counts with it: the log of the streams."""

    def log_bytes(self) -> int: ...

    def reclaim(self, is_enough: Callable[[], bool]) -> None: ...


def reclaim(
    store: Reclaimable,
    is_enough: Callable[[], bool],
    *,
    beside: Beside | None = None,
    free_bytes: Callable[[], int] | None = None,
) -> None:
    """Free what is held by deleted rows and records, until that is enough. Takes long: call it in a thread.

    `free_bytes`: of the disk, if it is nearly full.
    """

    def has_room(needed_bytes: int) -> bool:
        return free_bytes is None or free_bytes() >= needed_bytes + FREE_BYTES_MIN

    if beside is not None and has_room(0):
        beside.reclaim(is_enough)
    if not has_room(store.properties().get("memtable-bytes", 0)):
        return
    store.flush()
    sizes = {family: _held_bytes(store.properties(family)) for family in Family}
    total = sum(sizes.values()) + (0 if beside is None else beside.log_bytes())
    for family in sorted(sizes, key=lambda each: -sizes[each]):
        if is_enough() or sizes[family] * SMALL_PART < total or not has_room(0):
            return
        store.compact(family)


class Reclaimer:
    """Reclaims again and again, at a bounded rate."""

    def __init__(
        self, store: Reclaimable, beside: Beside | None = None, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._beside = beside
        self._clock_s = clock_s
        self._due_s = 0.0
        self._writes = -1

    def step(self, is_enough: Callable[[], bool], free_bytes: Callable[[], int]) -> bool:
        """Reclaim, if it is time and something was written since the last one; whether it did."""
        begun_s = self._clock_s()
        if begun_s < self._due_s or self._store.writes() == self._writes:
            return False
        # What is written meanwhile is for the next time. Cleaning the log writes too, once.
        self._writes = self._store.writes()
        try:
            reclaim(self._store, is_enough, beside=self._beside, free_bytes=free_bytes)
        finally:
            ended_s = self._clock_s()
            self._due_s = ended_s + max(REST_S_MIN, ended_s - begun_s)
        return True


def _held_bytes(properties: dict[str, int]) -> int:
    return sum(properties.get(name, 0) for name in ("sst-bytes", "blob-bytes", "memtable-bytes"))
