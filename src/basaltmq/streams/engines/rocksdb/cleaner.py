"""Retention, expiry and compaction of the RocksDB engine, in bounded steps.

A step has one budget of records for three tasks: expired records (their rows are sorted by time over all shards), then
per shard the log start offset, then a compaction pass over the shard's keys. A pass scans the key rows in hash order.
Its progress is only in memory. After a restart the pass starts again, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from basaltmq.errors import ShardNotFoundError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.retention import (
    RECORDS_PER_STEP,
    CompactionPass,
    CompactionPasses,
    Extent,
    Rounds,
    age_time_ms,
    is_tombstone,
    start_offset_after,
)
from basaltmq.streams.engines.rocksdb.record_row import decode_row, row_times
from basaltmq.streams.shards import Engine, ShardMeta, Shards

if TYPE_CHECKING:
    from basaltmq.streams.engines.rocksdb.engine import RocksdbEngine, Tail

RECORDS: Final = Family.STREAM_RECORDS
INDEX: Final = Family.STREAM_RECORD_INDEX

_KEY_ROWS_PER_BATCH: Final = 1_000


class Cleaner:
    """Executes the retention policy."""

    def __init__(self, store: Store, shards: Shards, engine: RocksdbEngine) -> None:
        self._store = store
        self._engine = engine
        self._rounds = Rounds(shards, Engine.ROCKSDB)
        self._shards = shards
        self._passes = CompactionPasses()

    def forget(self, shard: int) -> None:
        self._passes.forget(shard)

    def step(self, now_ms: int) -> int:
        return self._expire(now_ms) + self._rounds.clean(lambda meta, limit: self._clean(meta, now_ms, limit))

    def _clean(self, meta: ShardMeta, now_ms: int, limit: int) -> tuple[int, int]:
        removed = self._retain(meta, now_ms)
        examined, compacted = self._compact(meta, now_ms, limit) if meta.config.compact else (0, 0)
        return removed + examined, removed + compacted

    def _expire(self, now_ms: int) -> int:
        due: dict[int, list[tuple[bytes, int]]] = {}
        rows = self._store.scan(INDEX, b"E", stream_keys.stream_expiry_bound(now_ms + 1))
        for key, _ in islice(rows, RECORDS_PER_STEP):
            _, shard, offset = stream_keys.decode_stream_expiry_key(key)
            due.setdefault(shard, []).append((key, offset))
        gone = 0
        for shard, entries in due.items():
            batch = Batch()
            for key, _ in entries:
                batch.delete(INDEX, key)
            try:
                tail = self._engine.tail_of(shard)
            except ShardNotFoundError:
                self._store.write(batch)
                continue
            with tail.lock:
                going = [stream_keys.stream_record_key(shard, offset) for _, offset in entries]
                gone += self._engine.remove(tail, self._shards.get(shard).config, going, batch)
        return gone

    def _retain(self, meta: ShardMeta, now_ms: int) -> int:
        tail = self._engine.tail_of(meta.number)
        gone = 0
        with tail.lock:
            tail.require()
            target = start_offset_after(
                meta.config, tail.start_offset, tail.records, tail.size_bytes, self._oldest(tail), now_ms
            )
            while tail.start_offset < target:
                gone += self._engine.remove_before(tail, meta.config, target)
        return gone

    def _oldest(self, tail: Tail) -> Iterator[Extent]:
        first = stream_keys.stream_record_key(tail.number, tail.start_offset)
        last = stream_keys.stream_record_key(tail.number, tail.high_watermark)
        if first >= last:
            return
        for key, row in islice(self._store.scan(RECORDS, first, last), RECORDS_PER_STEP):
            stored_ms, timestamp_ms, _ = row_times(row)
            offset = stream_keys.decode_stream_record_key(key)[1]
            yield Extent(offset + 1, 1, len(row), age_time_ms(timestamp_ms, stored_ms))

    def _compact(self, meta: ShardMeta, now_ms: int, limit: int) -> tuple[int, int]:
        """Do a part of a pass. Return (key rows examined, records deleted)."""
        progress = self._passes.of(meta.number)
        tail = self._engine.tail_of(meta.number)
        if not progress.is_running:
            if not progress.is_due(tail.high_watermark, tail.records, now_ms):
                return 0, 0
            progress.begin(0, tail.high_watermark)
        examined = gone = 0
        while progress.is_running and examined < max(limit, 1):
            with tail.lock:
                tail.require()
                rows = self._key_rows(meta.number, progress.at)
                examined += len(rows)
                gone += self._remove_superseded(meta, tail, progress, rows, now_ms)
        return examined, gone

    def _key_rows(self, shard: int, hash_from: int) -> list[tuple[int, int, bool]]:
        """Return (hash, offset, is tombstone) of the next complete hashes. Empty at the end of a pass."""
        first = stream_keys.stream_index_key(b"K", shard, hash_from, 0)
        _, last = key_parts.prefix_range(first[:9])
        rows: list[tuple[int, int, bool]] = []
        for key, value in self._store.scan(INDEX, first, last):
            _, _, hashed, offset = stream_keys.decode_stream_index_key(key)
            if len(rows) >= _KEY_ROWS_PER_BATCH and hashed != rows[-1][0]:
                break
            rows.append((hashed, offset, bool(value)))
        return rows

    def _remove_superseded(
        self, meta: ShardMeta, tail: Tail, progress: CompactionPass, rows: list[tuple[int, int, bool]], now_ms: int
    ) -> int:
        by_hash: dict[int, list[tuple[int, bool]]] = {}
        for hashed, offset, is_marked in rows:
            if offset < progress.bound:
                by_hash.setdefault(hashed, []).append((offset, is_marked))
        going: list[bytes] = []
        for entries in by_hash.values():
            if len(entries) > 1 or entries[0][1]:
                going += self._superseded(meta, progress, [offset for offset, _ in entries], now_ms)
        gone = self._engine.remove(tail, meta.config, going) if going else 0
        if not rows or rows[-1][0] == (1 << 64) - 1:
            progress.end()
        else:
            progress.at = rows[-1][0] + 1
        return gone

    def _superseded(self, meta: ShardMeta, progress: CompactionPass, offsets: list[int], now_ms: int) -> list[bytes]:
        """Return the row keys to delete among records whose keys have the same hash."""
        row_keys = [stream_keys.stream_record_key(meta.number, offset) for offset in offsets]
        latest: dict[bytes, tuple[bytes, bytes]] = {}
        going: list[bytes] = []
        for row_key, row in zip(row_keys, self._store.get_many(RECORDS, row_keys), strict=True):
            if row is None:
                continue
            key = decode_row(row_key, row).key
            assert key is not None, "the key index contains only records with keys"
            if key in latest:
                going.append(latest[key][0])
            latest[key] = (row_key, row)
        for row_key, row in latest.values():
            record = decode_row(row_key, row)
            if is_tombstone(record.value):
                stored_ms, timestamp_ms, _ = row_times(row)
                if progress.is_tombstone_due(meta.config, age_time_ms(timestamp_ms, stored_ms), now_ms):
                    going.append(row_key)
        return going
