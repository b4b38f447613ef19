"""Returns the space of deleted rows to the disk.

Deleting rows frees no space until RocksDB compacts, and a store without new messages may never compact by itself.
`reclaim` flushes, which also deletes obsolete WAL files, and compacts the largest families first. That also deletes
blob files without live values. `Reclaimer` repeats this at a bounded rate: only after a write since the last run, and
after a pause as long as that run.

On an almost full disk neither may start: a failed flush poisons the store, and a failed compaction stops all later ones
until the store is reopened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from basaltmq.store.families import MIB, Family

SMALL_PART: Final = 100
"""A family smaller than one SMALL_PART-th of the total is not compacted."""

REST_S_MIN: Final = 1.0
"""Minimum pause between two runs on one store, in seconds."""

FREE_BYTES_MIN: Final = 4 * MIB
"""Free space that a flush must leave and a compaction needs: its output starts with one file."""


class Reclaimable(Protocol):
    """The store operations that `reclaim` uses."""

    def properties(self, family: Family | None = None) -> dict[str, int]: ...

    def flush(self, family: Family | None = None, *, wait: bool = True) -> None: ...

    def compact(self, family: Family | None = None) -> None: ...

    def writes(self) -> int: ...


class LogSpace(Protocol):
    """Data next to a store that counts toward its size: the log of the streams."""

    def log_bytes(self) -> int: ...

    def reclaim(self, is_enough: Callable[[], bool]) -> None: ...


def reclaim(
    store: Reclaimable,
    is_enough: Callable[[], bool],
    *,
    log: LogSpace | None = None,
    free_bytes: Callable[[], int] | None = None,
) -> None:
    """Free the space of deleted rows and records until `is_enough`. Slow: call it in a thread.

    `free_bytes` returns the free space of the disk; pass it when the disk is nearly full.
    """

    def has_room(needed_bytes: int) -> bool:
        return free_bytes is None or free_bytes() >= needed_bytes + FREE_BYTES_MIN

    if log is not None and has_room(0):
        log.reclaim(is_enough)
    if not has_room(store.properties().get("memtable-bytes", 0)):
        return
    store.flush()
    sizes = {family: _held_bytes(store.properties(family)) for family in Family}
    total = sum(sizes.values()) + (0 if log is None else log.log_bytes())
    for family in sorted(sizes, key=lambda each: -sizes[each]):
        if is_enough() or sizes[family] * SMALL_PART < total or not has_room(0):
            return
        store.compact(family)


class Reclaimer:
    """Repeats `reclaim` at a bounded rate."""

    def __init__(
        self, store: Reclaimable, log: LogSpace | None = None, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._log = log
        self._clock_s = clock_s
        self._due_s = 0.0
        self._writes = -1

    def step(self, is_enough: Callable[[], bool], free_bytes: Callable[[], int]) -> bool:
        """Run `reclaim` if it is due and there was a write since the last run. Return whether it ran."""
        begun_s = self._clock_s()
        if begun_s < self._due_s or self._store.writes() == self._writes:
            return False
        # Writes during this run count for the next one. Cleaning the log writes once too.
        self._writes = self._store.writes()
        try:
            reclaim(self._store, is_enough, log=self._log, free_bytes=free_bytes)
        finally:
            ended_s = self._clock_s()
            self._due_s = ended_s + max(REST_S_MIN, ended_s - begun_s)
        return True


def _held_bytes(properties: dict[str, int]) -> int:
    return sum(properties.get(name, 0) for name in ("sst-bytes", "blob-bytes", "memtable-bytes"))
