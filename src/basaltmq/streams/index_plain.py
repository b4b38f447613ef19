"""Index rows of plain frames, made many at a time: what a rebuild spends most of its time on.

A plain frame holds records without keys, tags, headers, expiries and holes, and follows on its shard's last one. Its
rows are the frame's own and, where the largest time of the shard grows, one by time; `Replay.take` makes them, the same
bytes that `StreamIndex.add` and `flush` make of it (P6).
"""

from __future__ import annotations

from basaltmq.store.batch import Operation
from basaltmq.streams.index_rows import SegmentStats
from basaltmq.streams.segment_state import SegmentShard


class PlainRows:
    """Rows to be written, the shards that changed, and what is to be summed up by segment."""

    __slots__ = ("ops", "shards", "size_bytes", "stored_ms", "times_max_ms", "times_min_ms")

    def __init__(self) -> None:
        self.ops: list[Operation] = []
        self.shards: dict[int, SegmentShard] = {}
        self.size_bytes = 0
        # Gathered here and summed up once: that takes a third of the time of doing so by frame.
        self.times_min_ms: list[int] = []
        self.times_max_ms: list[int] = []
        self.stored_ms: list[int] = []

    def stats(self) -> SegmentStats:
        """What the frames add up to."""
        stats = SegmentStats()
        stats.size_bytes = self.size_bytes
        stats.frames = len(self.stored_ms)
        stats.time_min_ms = min(self.times_min_ms)
        stats.time_max_ms = max(self.times_max_ms)
        stats.stored_min_ms = min(self.stored_ms)
        stats.stored_max_ms = max(self.stored_ms)
        return stats
