"""The memory engine: shards as lists, indexed by offset, tag, key and time. A restart loses the records.

After a restart a shard still exists, empty, and continues with unused offsets. Every OFFSETS_RESERVED offsets the
engine raises `next_offset_min` in the shard row, and the next run starts there. So a group with an older committed
offset gets an out-of-range error with the available range, instead of other records under an old offset. The row is
written but not synced. It survives a process crash. After a power loss, offsets of the last reservation may be reused.

Two limits bound the memory: each shard's retention, and `size_bytes_max` for all shards. A write that would exceed the
latter first applies the shard's retention. If that is not enough, StoreOverfullError rejects the whole write. Only
retention drops records.

A shard has two parallel lists, offsets and entries, searched by bisection. Deleting a few records splices the lists.
Deleting many rebuilds the range between the first and the last of them. Retention and compaction do a bounded part per
step. Compaction scans the records in order and finds the latest record per key in the key index.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from basaltmq.durability import Durability
from basaltmq.errors import ShardNotFoundError, StoreClosedError, StoreOverfullError
from basaltmq.log.batches.record import NEVER, Record, StoredRecord, record_size_bytes
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
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
    is_expired,
    no_offsets_left,
    plain_records,
    stamped,
)
from basaltmq.streams.engines.base import EngineBase
from basaltmq.streams.engines.retention import (
    RECORDS_PER_STEP,
    CompactionPass,
    Extent,
    Rounds,
    age_time_ms,
    is_tombstone,
    start_offset_after,
)
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import OFFSET_MAX, Engine, ShardMeta, Shards, check_durability
from basaltmq.streams.watermark import done

SIZE_BYTES_MAX: Final = 256 << 20
"""Default limit for all records of the engine."""

ENTRY_OVERHEAD_BYTES: Final = 320
"""Overhead of a record without key and tags; tracemalloc measured 303 bytes."""

INDEXED_OVERHEAD_BYTES: Final = 240
"""Overhead of a unique key or tag; measured 237 bytes for a key, 157 bytes for a tag."""

OFFSETS_RESERVED: Final = 65_536
"""Offsets reserved per write of the shard row."""

SPLICE_MAX: Final = 32
"""Up to this many deletes splice the lists one by one; more rebuild a range."""


class _Entry(NamedTuple):
    record: StoredRecord
    stored_ms: int
    size_bytes: int


class _Shard:
    """The records of one shard. Guarded by its lock."""

    def __init__(self, meta: ShardMeta) -> None:
        self.lock = threading.RLock()
        self.config = meta.config
        self.start_offset = max(meta.start_offset, meta.next_offset_min)
        self.next_offset = self.start_offset
        self.reserved_to = self.start_offset
        self.offsets: list[int] = []
        self.entries: list[_Entry] = []
        self.by_key: dict[bytes, list[int]] = {}
        self.by_tag: dict[bytes, list[int]] = {}
        self.times_ms: list[int] = []
        self.time_offsets: list[int] = []
        self.expiring: list[tuple[int, int]] = []
        self.size_bytes = 0
        self.is_deleted = False
        self.compaction = CompactionPass()

    def append(self, record: StoredRecord, stored_ms: int) -> None:
        size_bytes = _cost_bytes(record)
        self.offsets.append(record.offset)
        self.entries.append(_Entry(record, stored_ms, size_bytes))
        self.size_bytes += size_bytes
        if record.key is not None and self.config.index_keys:
            self.by_key.setdefault(record.key, []).append(record.offset)
        if self.config.index_tags:
            for tag in set(record.tags):
                self.by_tag.setdefault(tag, []).append(record.offset)
        if self.config.index_times and (not self.times_ms or record.timestamp_ms > self.times_ms[-1]):
            self.times_ms.append(record.timestamp_ms)
            self.time_offsets.append(record.offset)
        if record.expire_at_ms != NEVER:
            heapq.heappush(self.expiring, (record.expire_at_ms, record.offset))

    def find(self, offset: int) -> _Entry | None:
        at = bisect_left(self.offsets, offset)
        if at < len(self.offsets) and self.offsets[at] == offset:
            return self.entries[at]
        return None

    def remove(self, going: Collection[int]) -> int:
        """Delete records by offset. Return how many existed."""
        found = sorted(offset for offset in set(going) if self.find(offset) is not None)
        if len(found) <= SPLICE_MAX:
            for offset in found:
                at = bisect_left(self.offsets, offset)
                self._unindex(self.entries[at : at + 1])
                del self.offsets[at], self.entries[at]
        else:
            # Rebuild only the range between the first and the last deleted record.
            begin, end = bisect_left(self.offsets, found[0]), bisect_right(self.offsets, found[-1])
            gone = set(found)
            part = self.entries[begin:end]
            self._unindex([entry for entry in part if entry.record.offset in gone])
            left = [entry for entry in part if entry.record.offset not in gone]
            self.entries[begin:end] = left
            self.offsets[begin:end] = [entry.record.offset for entry in left]
        return len(found)

    def remove_before(self, offset: int) -> int:
        count = bisect_left(self.offsets, offset)
        self._unindex(self.entries[:count])
        del self.offsets[:count], self.entries[:count]
        self.start_offset = max(self.start_offset, offset)
        return count

    def scan(self, offset: int) -> Iterator[_Entry]:
        entries = self.entries
        for at in range(bisect_left(self.offsets, offset), len(entries)):
            yield entries[at]

    def candidates(self, offset: int, tag: bytes | None, key: bytes | None) -> Iterator[_Entry]:
        """Yield the records from an offset on: all, or those that an index selects."""
        if tag is not None and self.config.index_tags:
            index = self.by_tag.get(tag, [])
        elif key is not None and self.config.index_keys:
            index = self.by_key.get(key, [])
        else:
            yield from self.scan(offset)
            return
        for at in range(bisect_left(index, offset), len(index)):
            yield self.entries[bisect_left(self.offsets, index[at])]

    def first_at_time(self, timestamp_ms: int, now_ms: int) -> int | None:
        """Return the smallest offset of a live record at or after this time."""
        begin = self.start_offset
        if self.config.index_times:
            at = bisect_left(self.times_ms, timestamp_ms)
            if at == len(self.times_ms):
                return None
            # All records before the first one that reached this time are older. That record may be deleted.
            begin = max(begin, self.time_offsets[at])
        for entry in self.scan(begin):
            if entry.record.timestamp_ms >= timestamp_ms and not is_expired(entry.record, now_ms):
                return entry.record.offset
        return None

    def _unindex(self, entries: list[_Entry]) -> None:
        """Remove records from the indexes, grouped by key and tag."""
        keyed: dict[bytes, list[int]] = {}
        tagged: dict[bytes, list[int]] = {}
        for record, _, size_bytes in entries:
            self.size_bytes -= size_bytes
            if record.key is not None and self.config.index_keys:
                keyed.setdefault(record.key, []).append(record.offset)
            if self.config.index_tags:
                for tag in set(record.tags):
                    tagged.setdefault(tag, []).append(record.offset)
        for index, going in ((self.by_key, keyed), (self.by_tag, tagged)):
            for name, offsets in going.items():
                _drop(index, name, offsets)


def _drop(index: dict[bytes, list[int]], name: bytes, going: list[int]) -> None:
    """Remove ascending offsets from a list that contains all of them."""
    offsets = index[name]
    if len(offsets) == len(going):
        del index[name]
        return
    begin, end = bisect_left(offsets, going[0]), bisect_right(offsets, going[-1])
    gone = set(going)
    offsets[begin:end] = [offset for offset in offsets[begin:end] if offset not in gone]


class MemoryEngine(EngineBase):
    """A `StorageAdapter` with records in memory. Only its shard rows are in the store."""

    engine = Engine.MEMORY

    def __init__(
        self,
        store: Store,
        shards: Shards,
        offsets: Offsets,
        clock_ms: Clock,
        leaders: Leaders | None = None,
        *,
        size_bytes_max: int = SIZE_BYTES_MAX,
    ) -> None:
        super().__init__(store, shards, offsets, clock_ms, leaders)
        self._size_bytes_max = size_bytes_max
        self._size_bytes = 0
        self._lock = threading.Lock()
        self._states: dict[int, _Shard] = {}
        self._rounds = Rounds(shards, Engine.MEMORY)
        self._closed = False

    def plan_delete(self, batch: Batch, shard: int) -> None:
        state = self._of(shard)
        with state.lock:
            state.is_deleted = True
            self._shards.plan_delete(batch, shard, derived=False)

    def revive(self, shard: int) -> None:
        state = self._of(shard)
        with state.lock:
            state.is_deleted = False

    def forget(self, *shards: int) -> None:
        for shard in shards:
            self._shards.forget(shard)
            with self._lock:
                state = self._states.pop(shard, None)
            if state is not None:
                with state.lock:
                    self._count(-state.size_bytes)
                    state.size_bytes = 0

    def reconfigured(self, shard: int) -> None:
        meta = self._own(shard)
        state = self._of(shard)
        with state.lock:
            state.config = meta.config

    def shard_info(self, shard: int) -> ShardInfo:
        meta = self._own(shard)
        state = self._of(shard)
        with state.lock:
            end = state.next_offset
            return ShardInfo(meta, state.start_offset, end, end, len(state.offsets), state.size_bytes)

    def batch_write(self, shard: int, records: Records, durability: Durability | None = None) -> Append:
        self._require_leader(shard)
        meta = self._own(shard)
        level = self._level(meta, durability)
        check_durability(Engine.MEMORY, level)
        plain = plain_records(records)
        check_batch(plain, meta.config.record_bytes_max)
        size_bytes = sum(_cost_bytes(record) for record in plain)
        now_ms = self._clock_ms()
        plain = stamped(plain, now_ms)
        state = self._of(shard)
        with state.lock:
            base = state.next_offset
            self._admit(state, shard, size_bytes, base + len(plain), now_ms)
            for offset, record in enumerate(plain, base):
                state.append(_stored(record, offset), now_ms)
            state.next_offset = base + len(plain)
            return Append(shard, base, state.next_offset - 1, level)

    def append_at(self, shard: int, records: Sequence[StoredRecord], next_offset: int) -> Append:
        self._require_leader(shard)
        meta = self._own(shard)
        if records:
            check_batch(records, meta.config.record_bytes_max)
        size_bytes = sum(_cost_bytes(record) for record in records)
        now_ms = self._clock_ms()
        state = self._of(shard)
        with state.lock:
            check_placed(records, state.next_offset, next_offset)
            base = state.next_offset
            self._admit(state, shard, size_bytes, next_offset, now_ms)
            for record in records:
                state.append(record, now_ms)
            state.next_offset = next_offset
            return Append(shard, base, next_offset - 1, Durability.MEMORY)

    def wait(self, append: Append) -> None:
        """Do nothing: `memory` is the highest level of this engine."""

    def confirmed(self, append: Append) -> asyncio.Future[None]:
        return done()

    def _read(
        self, shard: int, offset: int, budget: Budget, *, tag: bytes | None = None, key: bytes | None = None
    ) -> RecordsRead:
        self._own(shard)
        state = self._of(shard)
        with state.lock:
            check_offset(shard, offset, state.start_offset, state.next_offset)
            now_ms = self._clock_ms()
            records: list[StoredRecord] = []
            next_offset = max(offset, state.next_offset)
            for entry in state.candidates(offset, tag, key):
                record = entry.record
                if not budget.examine():
                    next_offset = record.offset
                    break
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
            return RecordsRead(records, next_offset, state.start_offset, state.next_offset)

    def delete_by_key(self, shard: int, key: bytes) -> int:
        self._require_leader(shard)
        self._own(shard)
        state = self._of(shard)
        with state.lock:
            if state.config.index_keys:
                going = list(state.by_key.get(key, []))
            else:
                going = [entry.record.offset for entry in state.entries if entry.record.key == key]
            return self._remove(state, going)

    def delete_by_offset(self, shard: int, offsets: Sequence[int]) -> int:
        self._require_leader(shard)
        self._own(shard)
        state = self._of(shard)
        with state.lock:
            return self._remove(state, offsets)

    def delete_records_before(self, shard: int, offset: int) -> int:
        self._require_leader(shard)
        self._own(shard)
        state = self._of(shard)
        with state.lock:
            self._remove_before(state, min(offset, state.next_offset))
            return state.start_offset

    def get_offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: IfAllOlder) -> int:
        self._own(shard)
        state = self._of(shard)
        with state.lock:
            found = state.first_at_time(timestamp_ms, self._clock_ms())
            if found is not None:
                return found
            return state.start_offset if otherwise is IfAllOlder.EARLIEST else state.next_offset

    def retain(self, now_ms: int) -> int:
        gone = 0
        with self._lock:
            loaded = list(self._states.values())
        for state in loaded:
            with state.lock:
                gone += self._expire(state, now_ms)
        return gone + self._rounds.clean(lambda meta, limit: self._clean(meta, now_ms, limit))

    def _clean(self, meta: ShardMeta, now_ms: int, limit: int) -> tuple[int, int]:
        state = self._of(meta.number)
        with state.lock:
            removed = self._retain_shard(state, now_ms, RECORDS_PER_STEP)
            examined, compacted = self._compact(state, now_ms, limit)
        return removed + examined, removed + compacted

    def close(self) -> None:
        """Return unused reserved offsets, so that a clean restart leaves no gap."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            states = dict(self._states)
            self._states.clear()
        batch = Batch()
        with self._shards.exclusive():
            for number, each in states.items():
                if each.reserved_to != each.next_offset and not each.is_deleted:
                    meta = msgspec.structs.replace(
                        self._shards.get(number), start_offset=each.next_offset, next_offset_min=each.next_offset
                    )
                    self._shards.plan_update(batch, meta)
                    self._shards.forget(number)
            if len(batch):
                self._store.write(batch)

    def _of(self, shard: int) -> _Shard:
        with self._lock:
            if self._closed:
                raise StoreClosedError("the memory engine is closed")
            state = self._states.get(shard)
            if state is None:
                state = self._states[shard] = _Shard(self._own(shard))
            return state

    def _admit(self, state: _Shard, shard: int, size_bytes: int, next_offset: int, now_ms: int) -> None:
        """Run every check that can reject a write, before any change."""
        if state.is_deleted:
            raise ShardNotFoundError(f"shard {shard} is being deleted")
        self._reserve(state, shard, next_offset)
        if self._size_bytes + size_bytes > self._size_bytes_max:
            self._expire(state, now_ms)
            self._retain_shard(state, now_ms)
        with self._lock:
            if self._size_bytes + size_bytes > self._size_bytes_max:
                raise StoreOverfullError(
                    f"the memory engine holds {self._size_bytes} bytes and cannot take {size_bytes} more; the limit is "
                    f"{self._size_bytes_max}: set a retention for its topics, delete records, or use a durable engine"
                )
            self._size_bytes += size_bytes

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self._size_bytes += size_bytes

    def _reserve(self, state: _Shard, shard: int, next_offset: int) -> None:
        if next_offset > OFFSET_MAX:
            raise no_offsets_left(shard)
        if next_offset > state.reserved_to:
            reserved_to = next_offset + OFFSETS_RESERVED
            self._shards.update(shard, next_offset_min=reserved_to)
            state.reserved_to = reserved_to

    def _remove(self, state: _Shard, going: Collection[int]) -> int:
        before = state.size_bytes
        gone = state.remove(going)
        self._count(state.size_bytes - before)
        return gone

    def _remove_before(self, state: _Shard, offset: int) -> int:
        before = state.size_bytes
        gone = state.remove_before(offset)
        self._count(state.size_bytes - before)
        return gone

    def _expire(self, state: _Shard, now_ms: int) -> int:
        going: list[int] = []
        while state.expiring and state.expiring[0][0] <= now_ms and len(going) < RECORDS_PER_STEP:
            going.append(heapq.heappop(state.expiring)[1])
        return self._remove(state, going)

    def _retain_shard(self, state: _Shard, now_ms: int, limit: int | None = None) -> int:
        """Apply retention to a shard, up to `limit` records. Return how many it removed."""
        oldest = (
            Extent(
                entry.record.offset + 1, 1, entry.size_bytes, age_time_ms(entry.record.timestamp_ms, entry.stored_ms)
            )
            for entry in islice(state.scan(state.start_offset), limit)
        )
        start = start_offset_after(
            state.config, state.start_offset, len(state.offsets), state.size_bytes, oldest, now_ms
        )
        return self._remove_before(state, start)

    def _compact(self, state: _Shard, now_ms: int, limit: int) -> tuple[int, int]:
        """Do a part of a pass in offset order. Return (records examined, records deleted)."""
        progress = state.compaction
        if not state.config.compact:
            return 0, 0
        if not progress.is_running:
            if not progress.is_due(state.next_offset, len(state.offsets), now_ms):
                return 0, 0
            progress.begin(state.start_offset, state.next_offset)
        going: list[int] = []
        examined = 0
        progress.is_running = False
        for entry in state.scan(progress.at):
            record = entry.record
            if record.offset >= progress.bound:
                break
            if examined >= max(limit, 1):
                progress.is_running = True
                progress.at = record.offset
                break
            examined += 1
            if record.key is None:
                continue
            if state.by_key[record.key][-1] != record.offset:
                going.append(record.offset)
            elif is_tombstone(record.value):
                time_ms = age_time_ms(record.timestamp_ms, entry.stored_ms)
                if progress.is_tombstone_due(state.config, time_ms, now_ms):
                    going.append(record.offset)
        if not progress.is_running:
            progress.end()
        return examined, self._remove(state, going)


def _cost_bytes(record: Record) -> int:
    """Estimate the memory of a record. An upper bound: it assumes that key and tags are unique."""
    indexed = len(record.tags) + (record.key is not None)
    return record_size_bytes(record) + ENTRY_OVERHEAD_BYTES + INDEXED_OVERHEAD_BYTES * indexed


def _stored(record: Record, offset: int) -> StoredRecord:
    return StoredRecord(
        value=record.value,
        key=record.key,
        headers=record.headers,
        tags=record.tags,
        timestamp_ms=record.timestamp_ms,
        expire_at_ms=record.expire_at_ms,
        offset=offset,
    )
