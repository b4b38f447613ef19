"""Buffer for an incomplete frame.

The pieces are joined once, when the frame is complete. Joining on every read would copy a slow 256 KiB frame many
times. Small pieces are merged as they arrive, so a sender of single bytes does not cost one object per byte. The buffer
holds at most one incomplete frame and the data that arrived with its end.
"""

from __future__ import annotations

from typing import Final

PIECE_BYTES_MIN: Final = 4_096
"""Two adjacent pieces together exceed this size, so the overhead per object is small."""


class FrameBuffer:
    """The incomplete frame of one connection."""

    __slots__ = ("_missing_bytes", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._missing_bytes = 0

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def keep(self, piece: bytes, missing_bytes: int) -> None:
        """Store the start of a frame. `missing_bytes` more bytes are needed before parsing can continue."""
        if piece:
            self._pieces = [piece]
            self._missing_bytes = missing_bytes

    def with_next(self, data: bytes) -> bytes | None:
        """Return the buffered bytes with `data` appended. Return None, and buffer `data`, while bytes are missing."""
        pieces = self._pieces
        if not pieces:
            return data
        self._missing_bytes -= len(data)
        if len(pieces[-1]) + len(data) <= PIECE_BYTES_MIN:
            pieces[-1] += data
        else:
            pieces.append(data)
        if self._missing_bytes > 0:
            return None
        self._pieces = []
        return b"".join(pieces)

    def clear(self) -> None:
        self._pieces = []
