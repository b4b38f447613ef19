"""Monitors the free space of a disk and decides when publishers are blocked.

Publishers are blocked below `free_min_bytes`, until the free space is 5 % above it; the gap prevents flapping. After a
write failed on a full disk (`on_disk_full`) the reserve is released. Publishers then stay blocked until there is room
for the reserve again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from basaltmq.store.families import MIB
from basaltmq.store.space.reserve import Reserve

CLEAR: Final = 1.05
"""Factor by which a value must exceed its limit before the block ends."""

ROOM_MIN_BYTES: Final = 16 * MIB
"""Minimum free space after a full disk, regardless of the limit. With less, the next memtable flush fails too."""

NEAR: Final = 4
"""Multiple of the limit below which checks are more frequent. At 1 GB/s a disk takes 1.5 s from 4 times the default
limit to the limit."""

_log: Final = logging.getLogger(__name__)


def free_bytes(path: Path) -> int:
    """Return the free bytes on the file system of a path, for this user."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def disk_bytes(path: Path) -> int:
    """Return the size of the file system of a path."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


class FreeSpace:
    """Monitors the disk of one directory. Thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        free_min_bytes: Callable[[], int],
        reserve: Reserve | None = None,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.free_bytes = 0
        self.is_low = False
        self.is_near = False
        """Free space is below NEAR times the limit, so check more often."""
        self._path = path
        self._free_min_bytes = free_min_bytes
        self._reserve = reserve
        self._free = free
        self._was_full = False

    def check(self) -> str | None:
        """Return why publishers are blocked, None if they are not. Raises OSError if the disk cannot be queried."""
        free, least = self._free(self._path), self._free_min_bytes()
        self.free_bytes = free
        self.is_near = free < NEAR * least
        self.is_low = free < self._wanted_bytes(least)
        if not self.is_low:
            self._keep_reserve(free, least)
        if not self.is_low:
            self._was_full = False
            return None
        if self._was_full:
            return (
                f"low on disk: the disk of {self._path} was full, and {free} bytes are free; "
                f"publishing resumes at {self._wanted_bytes(least)} free bytes"
            )
        return f"low on disk: {free} bytes are free at {self._path}, the minimum is {least}"

    def has_room(self) -> bool:
        """Whether `check` would unblock publishers. Changes no state."""
        return self._free(self._path) >= self._wanted_bytes(self._free_min_bytes())

    def on_disk_full(self) -> None:
        """Handle a write that failed on a full disk: release the reserve, and block publishers until there is room."""
        self._was_full = self.is_low = True
        if self._reserve is not None and self._reserve.release():
            _log.warning(
                "the disk of %s is full: released the reserve of %d bytes", self._path, self._reserve.size_bytes
            )

    def _wanted_bytes(self, least: int) -> int:
        if not self.is_low:
            return least
        if not self._was_full:
            return int(least * CLEAR)
        missing = 0 if self._reserve is None else self._reserve.missing_bytes
        return int(max(least, ROOM_MIN_BYTES) * CLEAR) + missing

    def _keep_reserve(self, free: int, least: int) -> None:
        """Allocate the reserve if enough space remains."""
        reserve = self._reserve
        if reserve is None:
            return
        missing = reserve.missing_bytes
        if missing and free - missing < least * CLEAR:
            return
        try:
            if missing or not reserve.size_bytes:
                reserve.keep()
        except OSError as error:
            # Another process took the space. If publishers are blocked, they stay blocked.
            self.is_low = self._was_full
            _log.warning("cannot allocate the reserve %s: %s", reserve.path, error)
