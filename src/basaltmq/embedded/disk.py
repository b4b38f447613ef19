"""Disk limits of an embedded store. Producers are refused below them, consumers never.

Producers call `admit` before every write. It checks the disk at most every LOOK_INTERVAL_S seconds, so that a fast
producer stops before a write fails. After a write to a full disk, the store must be reopened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from basaltmq.errors import BasaltError, DiskFullError, InvalidConfigError
from basaltmq.store.families import MIB
from basaltmq.store.rocks import RocksStore
from basaltmq.store.space.free_space import FreeSpace, free_bytes
from basaltmq.store.space.reclaim import LogSpace, Reclaimer
from basaltmq.store.space.size import SizeGuard

LOOK_INTERVAL_S: Final = 0.02
"""A program that writes 1 GB/s writes 20 MB in this time, less than the default limit keeps free."""

UNDERFULL: Final = 0.9
"""Share of its size limit to which a store must shrink before producers may continue."""


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """How much of the disk a store may use."""

    free_min_bytes: int = 64 * MIB
    """Free disk space in bytes below which producers get DiskFullError; 0 means no limit."""
    size_max_bytes: int = 0
    """Size of store and log in bytes above which producers get StoreOverfullError until it shrinks; 0 means no
    limit."""

    def check(self) -> None:
        for name in ("free_min_bytes", "size_max_bytes"):
            if getattr(self, name) < 0:
                raise InvalidConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")


class DiskGuard:
    """Enforces the limits of one store. Thread-safe."""

    def __init__(
        self,
        path: Path,
        store: RocksStore,
        log: LogSpace,
        limits: DiskLimits,
        *,
        free: Callable[[Path], int] = free_bytes,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._free = free
        self._clock_s = clock_s
        self._space = FreeSpace(path, free_min_bytes=lambda: limits.free_min_bytes, free=free)
        self._reclaimer = Reclaimer(store, log)
        self._reason: str | None = None
        self._due_s = 0.0
        self._size: SizeGuard | None = None
        if limits.size_max_bytes:
            size_max = limits.size_max_bytes
            self._size = SizeGuard(store, overfull_bytes=size_max, underfull_bytes=int(size_max * UNDERFULL), log=log)

    def admit(self) -> None:
        """Raise DiskFullError or StoreOverfullError if a producer must not write."""
        now_s = self._clock_s()
        if now_s >= self._due_s:
            self._due_s = now_s + LOOK_INTERVAL_S
            self._look()
        if self._reason is not None:
            raise DiskFullError(f"{self._reason}; free disk space or consume messages, then retry")
        if self._size is not None:
            self._size.admit()

    def maintain(self) -> None:
        """Reclaim space while there is too little. Called by the retention thread between its steps."""
        self._look()
        if self._space.is_low:
            self._reclaimer.step(self._space.has_room, lambda: self._free(self._path))

    def close(self) -> None:
        if self._size is not None:
            self._size.close()

    def _look(self) -> None:
        try:
            self._reason = self._space.check()
            if self._size is not None:
                self._size.measure()
        except (OSError, BasaltError):
            # The write itself reports problems of the disk or the store.
            self._reason = None
