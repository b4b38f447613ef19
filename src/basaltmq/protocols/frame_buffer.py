"""Buffers for incomplete frames and messages.

Parts are joined once, when the frame is complete. Joining on every read would copy a slow 256 KiB frame many times.
Small parts are joined as they arrive, so a sender of single bytes does not cost one object per byte.
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeVar

PART_BYTES_MIN: Final = 4_096
"""Two adjacent parts together exceed this size."""

Part = TypeVar("Part", bytes, "bytes | memoryview[int]")


def add_part(parts: list[Part] | deque[Part], part: Part) -> None:
    """Append a part, or join it to the last one."""
    if parts and len(parts[-1]) + len(part) <= PART_BYTES_MIN:
        parts[-1] = b"".join((parts[-1], part))
    else:
        parts.append(part)


class FrameBuffer:
    """The incomplete frame of a connection, and the data that arrived with its end."""

    __slots__ = ("_missing_bytes", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._missing_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def keep(self, part: bytes, missing_bytes: int) -> None:
        """Store the start of a frame. `missing_bytes` more bytes are needed before parsing continues."""
        if part:
            self._parts = [part]
            self._missing_bytes = missing_bytes

    def with_next(self, data: bytes) -> bytes | None:
        """Return the buffered bytes and `data`. If the frame is still incomplete, buffer `data` and return None."""
        parts = self._parts
        if not parts:
            return data
        self._missing_bytes -= len(data)
        if self._missing_bytes > 0:
            add_part(parts, data)
            return None
        self._parts = []
        return b"".join((*parts, data))

    def clear(self) -> None:
        self._parts = []
