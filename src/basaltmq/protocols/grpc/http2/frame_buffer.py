"""Half a frame, in the pieces it came in.

They are put together once, when the frame is whole: a frame of 256 KiB that trickles in would otherwise be copied with
every read. Small pieces are put together as they come, so that a sender of single bytes does not cost an object for
each. What is kept is at most the frame that was begun, and what came with its end.
"""

from __future__ import annotations

from typing import Final

PIECE_BYTES_MIN: Final = 4_096
"""Two pieces side by side have more than this: what an object costs is little beside it."""


class Rest:
    """Of one connection."""

    __slots__ = ("_missing_bytes", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._missing_bytes = 0

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def keep(self, piece: bytes, missing_bytes: int) -> None:
        """The beginning of a frame; nothing can be done before so many bytes have come."""
        if piece:
            self._pieces = [piece]
            self._missing_bytes = missing_bytes

    def with_next(self, data: bytes) -> bytes | None:
        """What was kept and what came, if that is enough to go on; None if it is not, and it is kept too."""
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
