"""Segment statistics in the index: totals and garbage of each segment's frames.

    'S' lane | segment start -> see `rows`

All of them are in memory, one per segment file. A change is written in the batch of the change that caused it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.index.rows import SegmentStats

FAMILY: Final = Family.STREAM_INDEX
_NOWHERE: Final = (-1, -1)


class SegmentStatsTable:
    """The stats of all segments of all lanes. Guarded by the index's lock."""

    def __init__(self, store: Reader) -> None:
        rows = store.scan(FAMILY, *key_parts.prefix_range(b"S"))
        self._stats = {stream_keys.decode_log_segment_key(key): SegmentStats(raw) for key, raw in rows}
        self._changed: set[tuple[int, int]] = set()
        self.last_at = _NOWHERE
        self.last = SegmentStats()
        """The stats changed last, a shortcut for runs of frames."""

    def get(self, lane: int, segment: int) -> SegmentStats | None:
        return self._stats.get((lane, segment))

    def add(
        self,
        lane: int,
        segment: int,
        size_bytes: int,
        time_min_ms: int,
        time_max_ms: int,
        stored_ms: int,
        garbage_bytes: int,
    ) -> None:
        """Add a frame to the segment's stats, with its garbage bytes."""
        stats = self.of(lane, segment)
        stats.add(size_bytes, time_min_ms, time_max_ms, stored_ms)
        stats.garbage_bytes += garbage_bytes

    def of(self, lane: int, segment: int) -> SegmentStats:
        """Return the stats of a segment for a change."""
        at = (lane, segment)
        stats = self._stats.get(at)
        if stats is None:
            stats = self._stats[at] = SegmentStats()
        self._changed.add(at)
        self.last_at = at
        self.last = stats
        return stats

    def merge(self, lane: int, segment: int, stats: SegmentStats) -> None:
        """Add the stats of further frames to the segment. A segment without frames has no row."""
        if stats.frames:
            self.of(lane, segment).merge(stats)

    def add_garbage(self, lane: int, segment: int, size_bytes: int) -> None:
        """Count bytes of a segment as garbage. Does nothing if the segment is deleted."""
        at = (lane, segment)
        stats = self._stats.get(at)
        if stats is not None:
            stats.garbage_bytes += size_bytes
            self._changed.add(at)

    def exceed(self, lane: int, sizes: Mapping[int, int]) -> bool:
        """Whether a segment's frames have more bytes than its file."""
        return any(
            stats.size_bytes > sizes.get(segment, 0) for (of, segment), stats in self._stats.items() if of == lane
        )

    def forget_from(self, batch: Batch, lane: int, start: int) -> None:
        """Delete the stats of segments that start at `start` or later, to be computed again."""
        for of, segment in [at for at in self._stats if at[0] == lane and at[1] >= start]:
            self.forget(of, segment)
            batch.delete(FAMILY, stream_keys.log_segment_key(of, segment))

    def forget(self, lane: int, segment: int) -> None:
        self.last_at = _NOWHERE
        self._stats.pop((lane, segment), None)
        self._changed.discard((lane, segment))

    def clear(self) -> None:
        self.last_at = _NOWHERE
        self._stats.clear()
        self._changed.clear()

    def put_changed(self, batch: Batch) -> None:
        """Add to `batch` the rows that changed since `written`."""
        for at in self._changed:
            batch.put(FAMILY, stream_keys.log_segment_key(*at), self._stats[at].encode())

    def written(self) -> None:
        self.last_at = _NOWHERE
        self._changed.clear()
