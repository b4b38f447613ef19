"""The RocksDB engine: one row per record, in the common store.

The family `stream_records` holds the records. `stream_record_index` holds the rest, with a kind byte first:

    'N' shard                       -> the tail: next offset u64, records u64, bytes u64, largest timestamp ms i64
    'K' shard | hash64(key) | offset -> 01 if the value is null (a tombstone), else empty
    'G' shard | hash64(tag) | offset -> empty
    'T' shard | timestamp | offset   -> empty; only for records that raise the largest timestamp
    'E' expire at | shard | offset   -> empty

An append writes records, index rows and the tail in one batch with the WAL. So they are atomic, and the tail's counts
are exact. Deletes change the same rows in one batch too. Hashes only select candidates: readers compare keys and tags
on the record. A time row outlives its record, because it still shows that all earlier records are older. Expiry rows of
a deleted shard are removed when they come due; shard numbers are not reused.

Every write goes through the WAL, so `memory` equals `written` here. Recently used shards have a small cached state.

Cost: appending 256 B records in batches of 100 takes about 4 us of CPU per record, a third of it in the store's write.
With a key and a tag (a hash and a row each) it is 14 us. Reading a record takes 4 to 5 us.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from struct import Struct as Layout
from typing import Final

from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, ShardNotFoundError
from basaltmq.log.batches.record import NEVER, Record, StoredRecord, record_size_bytes
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.adapter import (
    Append,
    Budget,
    Clock,
    IfAllOlder,
    Records,
    RecordsRead,
    ShardInfo,
    check_batch,
    check_offset,
    check_placed,
    hash64,
    is_expired,
    no_offsets_left,
    plain_records,
    stamped,
)
from basaltmq.streams.engines.base import EngineBase
from basaltmq.streams.engines.retention import is_tombstone
from basaltmq.streams.engines.rocksdb.cleaner import Cleaner
from basaltmq.streams.engines.rocksdb.record_row import decode_row, encode_row
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import OFFSET_MAX, Engine, Recent, ShardConfig, ShardMeta, Shards
from basaltmq.streams.watermark import ShardOffsets, Watermarks, done

TAIL: Final = Layout(">QQQq")

TIME_NONE: Final = -(1 << 62)
"""Largest timestamp of a shard that never had a record."""

SHARDS_LOADED_MAX: Final = 16_384
"""Maximum cached shard states, about 1 KB each."""

REMOVED_PER_BATCH: Final = 5_000
"""Records deleted per batch, with their index rows."""

LOOKUP_BATCH: Final = 128
"""Records fetched per batch by an index lookup."""

TOMBSTONE: Final = b"\x01"

RECORDS: Final = Family.STREAM_RECORDS
INDEX: Final = Family.STREAM_RECORD_INDEX


class Tail(ShardOffsets):
    """The end of a shard as in its tail row, with its high watermark. Guarded by its lock."""

    __slots__ = ("is_deleted", "number", "records", "size_bytes", "start_offset", "timestamp_max_ms")

    def __init__(self, meta: ShardMeta, raw: bytes | None) -> None:
        next_offset, self.records, self.size_bytes, self.timestamp_max_ms = 0, 0, 0, TIME_NONE
        if raw is not None:
            if len(raw) != TAIL.size:
                raise CorruptionError(f"the tail of shard {meta.number} has {len(raw)} bytes, not {TAIL.size}")
            next_offset, self.records, self.size_bytes, self.timestamp_max_ms = TAIL.unpack(raw)
        super().__init__(max(next_offset, meta.next_offset_min, meta.start_offset))
        self.number = meta.number
        self.start_offset = meta.start_offset
        self.is_deleted = False

    def put(self, batch: Batch, next_offset: int, records: int, size_bytes: int, timestamp_max_ms: int) -> None:
        batch.put(
            INDEX,
            stream_keys.stream_tail_key(self.number),
            TAIL.pack(next_offset, records, size_bytes, timestamp_max_ms),
        )

    def require(self) -> None:
        if self.is_deleted:
            raise ShardNotFoundError(f"shard {self.number} is being deleted")


class RocksdbEngine(EngineBase):
    """A `StorageAdapter` over the common store."""

    engine = Engine.ROCKSDB

    def __init__(
        self,
        store: Store,
        shards: Shards,
        offsets: Offsets,
        clock_ms: Clock,
        leaders: Leaders | None = None,
        *,
        watermarks: Watermarks | None = None,
        shards_loaded_max: int = SHARDS_LOADED_MAX,
    ) -> None:
        """`watermarks` may be shared by all users that sync the store. Its owner then closes it."""
        super().__init__(store, shards, offsets, clock_ms, leaders)
        # Unsynced WAL records of a crashed process become visible here, so they must be durable first.
        store.sync()
        self._tails: Recent[Tail] = Recent(self._load, shards_loaded_max)
        self._owns_watermarks = watermarks is None
        self._watermarks = watermarks or Watermarks(store)
        self._cleaner = Cleaner(store, shards, self)
        self._closed = False

    def plan_delete(self, batch: Batch, shard: int) -> None:
        tail = self._tails.get(shard)
        with tail.lock:
            tail.is_deleted = True
            self._shards.plan_delete(batch, shard, derived=False)
            clear(self._store, batch, RECORDS, stream_keys.stream_record_key(shard, 0)[:8])
            for kind in (b"K", b"G", b"T"):
                clear(self._store, batch, INDEX, stream_keys.stream_index_key(kind, shard, 0, 0)[:9])
            batch.delete(INDEX, stream_keys.stream_tail_key(shard))

    def revive(self, shard: int) -> None:
        tail = self._tails.get(shard)
        with tail.lock:
            tail.is_deleted = False

    def forget(self, *shards: int) -> None:
        for shard in shards:
            self._shards.forget(shard)
            self._tails.forget(shard)
            self._cleaner.forget(shard)

    def reconfigured(self, shard: int) -> None:
        """Do nothing: the config is read from the shard's row at every use."""

    def shard_info(self, shard: int) -> ShardInfo:
        meta = self._own(shard)
        tail = self._tails.get(shard)
        with tail.lock:
            return ShardInfo(
                meta, tail.start_offset, tail.high_watermark, tail.next_offset, tail.records, tail.size_bytes
            )

    def batch_write(self, shard: int, records: Records, durability: Durability | None = None) -> Append:
        self._require_leader(shard)
        meta = self._own(shard)
        level = self._level(meta, durability)
        plain = plain_records(records)
        check_batch(plain, meta.config.record_bytes_max)
        now_ms = self._clock_ms()
        plain = stamped(plain, now_ms)
        tail = self._tails.get(shard)
        with tail.lock:
            base = tail.next_offset
            placed = enumerate(plain, base)
            sequence = self._append(tail, meta.config, placed, base + len(plain), now_ms, level)
        self._watermarks.throttle()
        return Append(shard, base, base + len(plain) - 1, level, sequence)

    def append_at(self, shard: int, records: Sequence[StoredRecord], next_offset: int) -> Append:
        self._require_leader(shard)
        meta = self._own(shard)
        if records:
            check_batch(records, meta.config.record_bytes_max)
        now_ms = self._clock_ms()
        tail = self._tails.get(shard)
        with tail.lock:
            base = tail.next_offset
            check_placed(records, base, next_offset)
            placed = ((record.offset, record) for record in records)
            sequence = self._append(tail, meta.config, placed, next_offset, now_ms, Durability.SYNCED)
        self._watermarks.throttle()
        return Append(shard, base, next_offset - 1, Durability.SYNCED, sequence)

    def _append(
        self,
        tail: Tail,
        config: ShardConfig,
        placed: Iterator[tuple[int, Record]],
        next_offset: int,
        now_ms: int,
        level: Durability,
    ) -> int:
        """Write records, index rows and the tail in one batch. The caller holds the tail's lock."""
        tail.require()
        if next_offset > OFFSET_MAX:
            raise no_offsets_left(tail.number)
        shard = tail.number
        batch = Batch()
        count = 0
        size_bytes = 0
        timestamp_max_ms = tail.timestamp_max_ms
        for offset, record in placed:
            row_key = stream_keys.stream_record_key(shard, offset)
            row = encode_row(row_key, record, now_ms)
            batch.put(RECORDS, row_key, row)
            count += 1
            size_bytes += len(row)
            for index_key, value in index_rows(shard, offset, record, config):
                batch.put(INDEX, index_key, value)
            if record.timestamp_ms > timestamp_max_ms:
                timestamp_max_ms = record.timestamp_ms
                if config.index_times:
                    batch.put(INDEX, stream_keys.stream_time_key(shard, timestamp_max_ms, offset), b"")
        records, size_bytes = tail.records + count, tail.size_bytes + size_bytes
        tail.put(batch, next_offset, records, size_bytes, timestamp_max_ms)
        self._store.write(batch)
        base = tail.next_offset
        tail.next_offset = next_offset
        tail.records = records
        tail.size_bytes = size_bytes
        tail.timestamp_max_ms = timestamp_max_ms
        return self._watermarks.written(tail, base, level)

    def wait(self, append: Append) -> None:
        if append.durability is Durability.SYNCED:
            self._watermarks.wait(append.sequence)

    def confirmed(self, append: Append) -> asyncio.Future[None]:
        if append.durability is Durability.SYNCED:
            return self._watermarks.confirmed(append.sequence)
        return done()

    def _read(
        self, shard: int, offset: int, budget: Budget, *, tag: bytes | None = None, key: bytes | None = None
    ) -> RecordsRead:
        meta = self._own(shard)
        tail = self._tails.get(shard)
        with tail.lock:
            start, end = tail.start_offset, tail.high_watermark
        check_offset(shard, offset, start, end)
        now_ms = self._clock_ms()
        next_offset = max(offset, end)
        records: list[StoredRecord] = []
        for row_key, row in self._rows(shard, offset, end, meta.config, tag, key):
            if not budget.examine():
                next_offset = stream_keys.decode_stream_record_key(row_key)[1]
                break
            record = decode_row(row_key, row)
            if (
                (tag is not None and tag not in record.tags)
                or (key is not None and key != record.key)
                or is_expired(record, now_ms)
            ):
                continue
            if not budget.take(record_size_bytes(record)):
                next_offset = record.offset
                break
            records.append(record)
        return RecordsRead(records, next_offset, start, end)

    def _rows(
        self, shard: int, offset: int, end: int, config: ShardConfig, tag: bytes | None, key: bytes | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Return candidate rows in [offset, end): all rows, or those that an index selects."""
        if offset >= end:
            return iter(())
        if tag is not None and config.index_tags:
            return self._indexed(b"G", shard, hash64(tag), offset, end)
        if key is not None and config.index_keys:
            return self._indexed(b"K", shard, hash64(key), offset, end)
        return self._store.scan(
            RECORDS, stream_keys.stream_record_key(shard, offset), stream_keys.stream_record_key(shard, end)
        )

    def _indexed(self, kind: bytes, shard: int, hashed: int, offset: int, end: int) -> Iterator[tuple[bytes, bytes]]:
        first = stream_keys.stream_index_key(kind, shard, hashed, offset)
        last = stream_keys.stream_index_key(kind, shard, hashed, end)
        wanted: list[bytes] = []
        for index_key, _ in self._store.scan(INDEX, first, last):
            wanted.append(stream_keys.stream_record_key(shard, stream_keys.decode_stream_index_key(index_key)[3]))
            if len(wanted) == LOOKUP_BATCH:
                yield from self._fetched(wanted)
                wanted = []
        yield from self._fetched(wanted)

    def _fetched(self, wanted: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for row_key, row in zip(wanted, self._store.get_many(RECORDS, wanted) if wanted else (), strict=True):
            # The record was deleted after the index row was read.
            if row is not None:
                yield row_key, row

    def delete_by_key(self, shard: int, key: bytes) -> int:
        self._require_leader(shard)
        config = self._own(shard).config
        tail = self._tails.get(shard)
        gone = 0
        with tail.lock:
            tail.require()
            going: list[bytes] = []
            rows = self._rows(shard, tail.start_offset, tail.high_watermark, config, None, key)
            for row_key, row in rows:
                if decode_row(row_key, row).key == key:
                    going.append(row_key)
            for begin in range(0, len(going), REMOVED_PER_BATCH):
                gone += self.remove(tail, config, going[begin : begin + REMOVED_PER_BATCH])
        self._watermarks.wait_all()
        return gone

    def delete_by_offset(self, shard: int, offsets: Sequence[int]) -> int:
        self._require_leader(shard)
        config = self._own(shard).config
        tail = self._tails.get(shard)
        gone = 0
        with tail.lock:
            tail.require()
            seen = [at for at in sorted(set(offsets)) if tail.start_offset <= at < tail.high_watermark]
            for begin in range(0, len(seen), REMOVED_PER_BATCH):
                chosen = seen[begin : begin + REMOVED_PER_BATCH]
                gone += self.remove(tail, config, [stream_keys.stream_record_key(shard, at) for at in chosen])
        self._watermarks.wait_all()
        return gone

    def delete_records_before(self, shard: int, offset: int) -> int:
        self._require_leader(shard)
        config = self._own(shard).config
        tail = self._tails.get(shard)
        with tail.lock:
            tail.require()
            target = min(offset, tail.high_watermark)
            while tail.start_offset < target:
                self.remove_before(tail, config, target)
            start = tail.start_offset
        self._watermarks.wait_all()
        return start

    def remove(self, tail: Tail, config: ShardConfig, row_keys: Sequence[bytes], also: Batch | None = None) -> int:
        """Delete records with their index rows in one batch, extending `also`. The caller holds the tail's lock."""
        batch = Batch() if also is None else also
        gone = 0
        size_bytes = 0
        for row_key, row in zip(row_keys, self._store.get_many(RECORDS, row_keys), strict=True):
            if row is not None:
                gone += 1
                size_bytes += len(row)
                self._plan_remove(batch, tail.number, config, row_key, row)
        self._shrink(tail, batch, gone, size_bytes)
        return gone

    def remove_before(self, tail: Tail, config: ShardConfig, target: int) -> int:
        """Raise the log start offset towards `target` by one batch. Return how many records it removed.

        The caller holds the tail's lock.
        """
        batch = Batch()
        gone = 0
        size_bytes = 0
        reached = target
        first = stream_keys.stream_record_key(tail.number, tail.start_offset)
        for row_key, row in self._store.scan(RECORDS, first, stream_keys.stream_record_key(tail.number, target)):
            if gone == REMOVED_PER_BATCH:
                reached = stream_keys.decode_stream_record_key(row_key)[1]
                break
            gone += 1
            size_bytes += len(row)
            self._plan_remove(batch, tail.number, config, row_key, row)
        with self._shards.exclusive():
            self._shards.batch_update(batch, tail.number, start_offset=reached)
            self._shrink(tail, batch, gone, size_bytes)
            self._shards.forget(tail.number)
        tail.start_offset = reached
        return gone

    def _plan_remove(self, batch: Batch, shard: int, config: ShardConfig, row_key: bytes, row: bytes) -> None:
        batch.delete(RECORDS, row_key)
        record = decode_row(row_key, row)
        for index_key, _ in index_rows(shard, record.offset, record, config):
            batch.delete(INDEX, index_key)

    def _shrink(self, tail: Tail, batch: Batch, gone: int, size_bytes: int) -> None:
        records, size_bytes = tail.records - gone, tail.size_bytes - size_bytes
        if gone:
            tail.put(batch, tail.next_offset, records, size_bytes, tail.timestamp_max_ms)
        if len(batch):
            self._store.write(batch)
        tail.records = records
        tail.size_bytes = size_bytes

    def get_offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: IfAllOlder) -> int:
        config = self._own(shard).config
        tail = self._tails.get(shard)
        with tail.lock:
            start, end, timestamp_max_ms = tail.start_offset, tail.high_watermark, tail.timestamp_max_ms
        if timestamp_ms <= timestamp_max_ms:
            found = self._first_at_time(shard, timestamp_ms, start, end, config)
            if found is not None:
                return found
        return start if otherwise is IfAllOlder.EARLIEST else end

    def _first_at_time(self, shard: int, timestamp_ms: int, start: int, end: int, config: ShardConfig) -> int | None:
        now_ms = self._clock_ms()
        if config.index_times:
            first = stream_keys.stream_time_key(shard, timestamp_ms, 0)
            _, last = key_parts.prefix_range(first[:9])
            row = next(self._store.scan(INDEX, first, last), None)
            if row is None:
                return None
            # All records before the first one that reached this time are older. That record may be deleted.
            start = max(start, stream_keys.decode_stream_time_key(row[0])[2])
        if start >= end:
            return None
        rows = self._store.scan(
            RECORDS, stream_keys.stream_record_key(shard, start), stream_keys.stream_record_key(shard, end)
        )
        for row_key, raw in rows:
            record = decode_row(row_key, raw)
            if record.timestamp_ms >= timestamp_ms and not is_expired(record, now_ms):
                return record.offset
        return None

    def retain(self, now_ms: int) -> int:
        return self._cleaner.step(now_ms)

    def tail_of(self, shard: int) -> Tail:
        return self._tails.get(shard)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watermarks.wait_all()
            if self._owns_watermarks:
                self._watermarks.close()

    def _sync_rows(self) -> None:
        self._watermarks.wait_all()

    def _load(self, shard: int) -> Tail:
        meta = self._own(shard)
        return Tail(meta, self._store.get(INDEX, stream_keys.stream_tail_key(shard)))


def index_rows(shard: int, offset: int, record: Record, config: ShardConfig) -> list[tuple[bytes, bytes]]:
    """Return the index rows of one record, except the time row."""
    rows: list[tuple[bytes, bytes]] = []
    if record.key is not None and config.index_keys:
        value = TOMBSTONE if is_tombstone(record.value) else b""
        rows.append((stream_keys.stream_index_key(b"K", shard, hash64(record.key), offset), value))
    if record.tags and config.index_tags:
        rows += [(stream_keys.stream_index_key(b"G", shard, hash64(tag), offset), b"") for tag in set(record.tags)]
    if record.expire_at_ms != NEVER:
        rows.append((stream_keys.stream_expiry_key(record.expire_at_ms, shard, offset), b""))
    return rows


POINT_DELETES_MAX: Final = 64
"""Up to this many rows are deleted one by one. A range tombstone slows reads until it is compacted away."""


def clear(store: Store, batch: Batch, family: Family, prefix: bytes) -> None:
    """Add to `batch` the deletion of every row with this prefix."""
    start, end = key_parts.prefix_range(prefix)
    assert end is not None, "every prefix has an end key"
    few: list[bytes] = []
    for key, _ in store.scan(family, start, end):
        few.append(key)
        if len(few) > POINT_DELETES_MAX:
            batch.delete_range(family, start, end)
            return
    for key in few:
        batch.delete(family, key)
