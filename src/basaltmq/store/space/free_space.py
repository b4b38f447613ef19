"""Free space of a disk: when producers are held, and when they go on.

Producers are held below `free_min_bytes`, and until the free space is a twentieth above it, so that the state does not
flicker. After a write met a full disk (`met_full`) the reserve is released, and producers are held until there is room
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
"""How far from its limit a value is clear of it."""

ROOM_MIN_BYTES: Final = 16 * MIB
"""Free space after a full disk, whatever the limit: below it the next flush of a memory table meets the same error."""

NEAR: Final = 4
"""A disk that writes 1 GB/s takes 1.5 s from four times the default limit to the limit."""

_log: Final = logging.getLogger(__name__)


def free_bytes(path: Path) -> int:
    """Space left on the disk of a path, for this user."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def disk_bytes(path: Path) -> int:
    """The size of the file system of a path."""
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


class FreeSpace:
    """Watches the disk of one directory. Any thread may call it."""

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
        """Free space is within NEAR times the limit: look more often."""
        self._path = path
        self._free_min_bytes = free_min_bytes
        self._reserve = reserve
        self._free = free
        self._was_full = False

    def look(self) -> str | None:
        """Why producers are held; None if they are not. OSError if the disk cannot be asked."""
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
        return f"low on disk: {free} bytes are free at {self._path}, at least {least} are wanted"

    def has_room(self) -> bool:
        """Would `look` let producers go on? Changes nothing."""
        return self._free(self._path) >= self._wanted_bytes(self._free_min_bytes())

    def met_full(self) -> None:
        """A write failed because the disk is full: release the reserve, and hold producers until there is room."""
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
        """Allocate the reserve, if that leaves enough."""
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
            # Somebody else was faster. What was held stays held.
            self.is_low = self._was_full
            _log.warning("cannot allocate the reserve %s: %s", reserve.path, error)
