"""Decides which records of a frame a compaction keeps."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import NEVER, StoredRecord
from basaltmq.streams.adapter import hash64
from basaltmq.streams.engines.retention import CompactionPass, age_time_ms, is_tombstone
from basaltmq.streams.engines.segment.index.rows import Entry
from basaltmq.streams.engines.segment.latest_keys import LatestKeys
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.shards import ShardConfig

if TYPE_CHECKING:
    from basaltmq.streams.engines.segment.engine import SegmentEngine

KEY_MAPS_MAX: Final = 64
"""Frames whose key maps are cached during a step."""


class CompactionFilter:
    """Decides which records of a frame a compaction keeps."""

    def __init__(
        self,
        engine: SegmentEngine,
        state: SegmentShard,
        config: ShardConfig,
        progress: CompactionPass | None,
        now_ms: int,
        noted: LatestKeys | None = None,
    ) -> None:
        """Without `progress`, only deleted and expired records go. `noted` holds the keys if there is no key index."""
        self._engine = engine
        self._state = state
        self._config = config
        self._progress = progress
        self._now_ms = now_ms
        self._noted = noted
        self._maps: OrderedDict[int, dict[bytes, int]] = OrderedDict()

    def live(self, entry: Entry, batch: ColumnBatch) -> int:
        """Return how many records of a frame are neither deleted nor below the log start offset."""
        start = self._state.start_offset
        deleted = self._deleted(entry)
        return sum(offset >= start and offset not in deleted for offset in offsets_of(entry, batch))

    def kept(self, entry: Entry, batch: ColumnBatch) -> list[StoredRecord]:
        deleted = self._deleted(entry)
        start = self._state.start_offset
        latest = {} if self._progress is None else self._latest(entry, batch)
        kept = []
        for record in batch.records(entry.base_offset):
            if record.offset < start or record.offset in deleted:
                continue
            if record.expire_at_ms != NEVER and record.expire_at_ms <= self._now_ms:
                continue
            key = record.key
            if key is not None and self._progress is not None:
                if latest.get(key, -1) > record.offset or self._is_superseded(entry, key):
                    continue
                time_ms = age_time_ms(record.timestamp_ms, entry.store_time_ms)
                if is_tombstone(record.value) and self._progress.is_tombstone_due(self._config, time_ms, self._now_ms):
                    continue
            kept.append(record)
        return kept

    def _is_superseded(self, entry: Entry, key: bytes) -> bool:
        """Whether a later frame below the pass's bound has a record with this key."""
        if not self._config.index_keys:
            assert self._noted is not None, "without a key index, the keys are collected first"
            return self._noted.latest(key) > entry.last_offset
        index = self._engine.index
        number = self._state.number
        for last_offset in index.holders(b"K", number, hash64(key), entry.last_offset + 1):
            if self._progress is None or last_offset >= self._progress.bound:
                return False
            known = self._maps.get(last_offset)
            if known is None:
                later = index.entry(number, last_offset)
                batch = None if later is None else self._engine.visible_records(self._state, later)
                if later is None or batch is None:
                    continue
                known = self._latest(later, batch)
            if key in known:
                return True
        return False

    def latest_visible(self, entry: Entry) -> dict[bytes, int]:
        """Return the latest live offset of each key in a frame; empty if its transaction was aborted."""
        batch = self._engine.visible_records(self._state, entry)
        return {} if batch is None else self._latest(entry, batch)

    def _latest(self, entry: Entry, batch: ColumnBatch) -> dict[bytes, int]:
        """Return the latest live offset of each key in a frame."""
        known = self._maps.get(entry.last_offset)
        if known is None:
            deleted = self._deleted(entry)
            known = {
                key: offset
                for key, offset in zip(batch.keys(), offsets_of(entry, batch), strict=True)
                if key is not None and offset not in deleted
            }
            self._maps[entry.last_offset] = known
            if len(self._maps) > KEY_MAPS_MAX:
                self._maps.popitem(last=False)
        return known

    def _deleted(self, entry: Entry) -> set[int]:
        if not self._state.deleted:
            return set()
        return set(self._engine.index.deleted(self._state.number, entry.base_offset, entry.last_offset))


def offsets_of(entry: Entry, batch: ColumnBatch) -> list[int]:
    deltas = batch.deltas()
    return [entry.base_offset + delta for delta in (range(batch.count) if deltas is None else deltas)]
