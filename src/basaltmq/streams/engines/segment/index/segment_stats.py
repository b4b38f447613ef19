"""The index rows of segments: what the frames of each add up to, and how much of it is garbage.

    'S' lane | segment start -> see `index_rows`

All of them are in memory: there are as many as files. A change is written with the change that caused it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.streams.engines.segment.index.rows import SegmentStats

FAMILY: Final = Family.STREAM_INDEX
_NOWHERE: Final = (-1, -1)


class SegmentSums:
    """The sums of all segments of all lanes. Guarded by the index's lock."""

    def __init__(self, store: Reader) -> None:
        rows = store.scan(FAMILY, *keys.prefix_range(b"S"))
        self._stats = {keys.decode_log_segment_key(key): SegmentStats(raw) for key, raw in rows}
        self._changed: set[tuple[int, int]] = set()
        self.last_at = _NOWHERE
        self.last = SegmentStats()
        """The sums changed last, so that a run of frames finds them at once."""

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
        """A frame is in the segment, so much of it garbage."""
        stats = self.of(lane, segment)
        stats.add(size_bytes, time_min_ms, time_max_ms, stored_ms)
        stats.garbage_bytes += garbage_bytes

    def of(self, lane: int, segment: int) -> SegmentStats:
        """The sums of a segment, to be changed."""
        at = (lane, segment)
        stats = self._stats.get(at)
        if stats is None:
            stats = self._stats[at] = SegmentStats()
        self._changed.add(at)
        self.last_at = at
        self.last = stats
        return stats

    def merge(self, lane: int, segment: int, stats: SegmentStats) -> None:
        """Frames are in the segment that add up to this."""
        self.of(lane, segment).merge(stats)

    def waste(self, lane: int, segment: int, size_bytes: int) -> None:
        """Bytes of a segment have become garbage; nothing if it is gone."""
        at = (lane, segment)
        stats = self._stats.get(at)
        if stats is not None:
            stats.garbage_bytes += size_bytes
            self._changed.add(at)

    def exceed(self, lane: int, sizes: Mapping[int, int]) -> bool:
        """Is there a segment with more bytes in its frames than its file has?"""
        return any(
            stats.size_bytes > sizes.get(segment, 0) for (of, segment), stats in self._stats.items() if of == lane
        )

    def forget_from(self, batch: Batch, lane: int, start: int) -> None:
        """The segments that begin at `start` or later are to be summed up anew; their rows go."""
        for of, segment in [at for at in self._stats if at[0] == lane and at[1] >= start]:
            self.forget(of, segment)
            batch.delete(FAMILY, keys.log_segment_key(of, segment))

    def forget(self, lane: int, segment: int) -> None:
        self.last_at = _NOWHERE
        self._stats.pop((lane, segment), None)
        self._changed.discard((lane, segment))

    def clear(self) -> None:
        self.last_at = _NOWHERE
        self._stats.clear()
        self._changed.clear()

    def put_changed(self, batch: Batch) -> None:
        """Add the rows that changed since `written`."""
        for at in self._changed:
            batch.put(FAMILY, keys.log_segment_key(*at), self._stats[at].encode())

    def written(self) -> None:
        self.last_at = _NOWHERE
        self._changed.clear()
