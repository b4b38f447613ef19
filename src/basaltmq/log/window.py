"""The part of a segment that is in memory while it is read from front to back.

It is read in chunks that begin with a frame. While one is worked on, the kernel is told which bytes come next, so that
a disk is busy meanwhile; a thread of our own gains nothing over that, because it would have to be given the
interpreter's lock in time. Memory is bounded by CHUNK_BYTES and the largest frame.
"""

from __future__ import annotations

from typing import Final

from basaltmq.log.lane import Lane
from basaltmq.log.segment import Segment

CHUNK_BYTES: Final = 2 << 20
"""Read at once: the call costs nothing beside it, and it is still in the processor's cache when it is checked."""

AHEAD_BYTES: Final = 16 << 20
"""Asked of the disk beyond what was read: some 10 ms of a fast disk, which working on a chunk takes a tenth of."""


class Window:
    """A part of one segment, moved forward by `cover`."""

    __slots__ = ("_advised", "_chunk_bytes", "_lane", "base", "raw", "segment")

    def __init__(self, lane: Lane, segment: Segment, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._lane = lane
        self.segment = segment
        self._chunk_bytes = chunk_bytes
        self._advised = 0
        self.base = 0
        """The byte of the segment that `raw` begins with."""
        self.raw = b""

    def cover(self, at: int, size_bytes: int) -> None:
        """Have `size_bytes` from `at` on, or as many as the segment has."""
        if at >= self.base and at + size_bytes <= self.base + len(self.raw):
            return
        self.base = at
        self.raw = b""
        left = self.segment.size_bytes - at
        if left > 0:
            self.raw = self._lane.read(self.segment.start + at, min(left, max(size_bytes, self._chunk_bytes)))
            self._advise(at + len(self.raw))

    def _advise(self, at: int) -> None:
        """Have the bytes from `at` on brought into the page cache, half of AHEAD_BYTES at a time."""
        if at + AHEAD_BYTES // 2 > self._advised and at < self.segment.size_bytes:
            begin = max(at, self._advised)
            self._advised = at + AHEAD_BYTES
            self._lane.will_need(self.segment, begin, self._advised - begin)
