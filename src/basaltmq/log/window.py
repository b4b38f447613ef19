"""The part of a segment that is in memory during a sequential read.

The segment is read in chunks that start with a frame. `posix_fadvise` announces the following bytes, so that the disk
reads them while a chunk is processed. A thread gains nothing over that, because it would need the GIL in time. Memory
is bounded by CHUNK_BYTES and the largest frame.
"""

from __future__ import annotations

from typing import Final

from basaltmq.log.lane import Lane
from basaltmq.log.segment import Segment

CHUNK_BYTES: Final = 2 << 20
"""Bytes per read: large enough to hide the cost of the call, small enough to stay in the CPU cache until checked."""

AHEAD_BYTES: Final = 16 << 20
"""Bytes requested ahead: about 10 ms of a fast disk. Processing a chunk takes a tenth of that."""


class Window:
    """A part of one segment, moved forward by `cover`."""

    __slots__ = ("_advised", "_chunk_bytes", "_lane", "base", "raw", "segment")

    def __init__(self, lane: Lane, segment: Segment, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._lane = lane
        self.segment = segment
        self._chunk_bytes = chunk_bytes
        self._advised = 0
        self.base = 0
        """The offset in the segment at which `raw` starts."""
        self.raw = b""

    def cover(self, at: int, size_bytes: int) -> None:
        """Load `size_bytes` from `at`, or fewer at the end of the segment."""
        if at >= self.base and at + size_bytes <= self.base + len(self.raw):
            return
        self.base = at
        self.raw = b""
        left = self.segment.size_bytes - at
        if left > 0:
            self.raw = self._lane.read(self.segment.start + at, min(left, max(size_bytes, self._chunk_bytes)))
            self._advise(at + len(self.raw))

    def _advise(self, at: int) -> None:
        """Request the bytes from `at` for the page cache, half of AHEAD_BYTES at a time."""
        if at + AHEAD_BYTES // 2 > self._advised and at < self.segment.size_bytes:
            begin = max(at, self._advised)
            self._advised = at + AHEAD_BYTES
            self._lane.will_need(self.segment, begin, self._advised - begin)
