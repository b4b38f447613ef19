"""Index rows of plain frames, made many at a time: what a rebuild spends most of its time on.

A plain frame holds records without keys, tags, headers, expiries and holes, and follows on its shard's last one. Its
rows are the frame's own and, where the largest time of the shard grows, one by time; they are the same bytes that
`StreamIndex.add` and `flush` make of it (P6). Budget: 2 us per frame.
"""

from __future__ import annotations

from basaltmq.log.record import NEVER
from basaltmq.store import keys
from basaltmq.store.batch import PUT, Operation
from basaltmq.streams.index_rows import ENTRY, FAMILY, NO_FLAGS, NO_TAGS, SegmentStats
from basaltmq.streams.segment_state import SegmentShard


class PlainRows:
    """Rows to be written, the shards that changed, and what is to be summed up by segment."""

    __slots__ = ("ops", "shards", "sizes", "stored_ms", "times_max_ms", "times_min_ms")

    def __init__(self) -> None:
        self.ops: list[Operation] = []
        self.shards: dict[int, SegmentShard] = {}
        # Gathered here and summed up once: that takes a third of the time of doing so by frame.
        self.sizes: list[int] = []
        self.times_min_ms: list[int] = []
        self.times_max_ms: list[int] = []
        self.stored_ms: list[int] = []

    def add(
        self,
        shard: SegmentShard,
        position: int,
        size_bytes: int,
        base_offset: int,
        records: int,
        timestamp_max_ms: int,
        store_time_ms: int,
        by_time: bool,
    ) -> None:
        """A frame; the shard counts it."""
        number = shard.number
        following = base_offset + records
        last_offset = following - 1
        put = self.ops.append
        if timestamp_max_ms > shard.timestamp_max_ms and by_time:
            shard.timestamp_max_ms = timestamp_max_ms
            put((PUT, FAMILY, keys.stream_time_key(number, timestamp_max_ms, last_offset), b""))
        row = ENTRY.pack(
            position, base_offset, size_bytes, records, timestamp_max_ms, store_time_ms, NO_TAGS, NEVER, NO_FLAGS
        )
        put((PUT, FAMILY, keys.frame_key(number, last_offset), row))
        shard.indexed_next = shard.next_offset = shard.high_watermark = following
        shard.frames += 1
        shard.records += records
        shard.size_bytes += size_bytes
        self.shards[number] = shard

    def stats(self) -> SegmentStats:
        """What the frames add up to."""
        stats = SegmentStats()
        stats.size_bytes = sum(self.sizes)
        stats.frames = len(self.sizes)
        stats.time_min_ms = min(self.times_min_ms)
        stats.time_max_ms = max(self.times_max_ms)
        stats.stored_min_ms = min(self.stored_ms)
        stats.stored_max_ms = max(self.stored_ms)
        return stats
