"""The consume-queue index of the segment engine: the position of each frame of each shard (SPEC D2..D4).

One family, `stream_index`, written without the WAL. A kind byte comes first:

    'C' lane                        -> position u64: the checkpoint; frames below it are in the index
    'P' lane, 'U' lane | position, 'X' lane -> what the log may still lose (see `Unsynced`)
    'S' lane | segment start        -> bytes, frames, garbage bytes, least and largest record time and store time
    'N' shard                       -> counts (see `SegmentShard`)
    'O' shard | last offset         -> the `Entry` of a frame
    'T' shard | time | last offset  -> empty; only for frames that raise the largest time: earlier frames are older
    'K' shard | hash64(key) | last offset, 'G' shard | hash64(tag) | last offset -> empty: candidate frames
    'D' shard | offset              -> position of the DELETES frame, and the offset's share of that frame's bytes
    'E' expire at | shard | last offset -> empty: when the first live record of the frame expires
    'Q', 'M' shard | producer id | last offset -> frames of transactions and their markers (see `Outcomes`)

All rows are in one family, so after a crash RocksDB has a prefix of the writes. Every change is one batch with the
checkpoint 'C', so 'C' is exact and replay continues there. Every row is a function of the log's frames and the shard
rows, so a rebuilt index is equal key for key (P6), except 'P', 'U' and 'X'. After a power loss the index may contain
frames that the log has lost. Recovery reads the log between 'P' and 'C' and rolls the index back (`recovery`).

Appends are buffered: one batch writes the entries of many frames, and readers also see the buffer (`entries`). For
rare changes (deletes, trims, copies) the caller writes the buffer (`flush`), notes the frame, and then the change
writes itself. So the checkpoint never covers a change that is not written.

A frame becomes garbage when it is superseded. A DELETES frame is garbage to the extent that its offsets have no row or
a later row. TRIM and DROP frames are garbage at once: the shard rows contain the new start offset or the deletion, and
are durable before the index changes. A marker row records that the index must still follow them (`trim`, `drop`).
Cost per frame without keys and tags: 2 us to buffer, 4 us to write. Each key or tag adds 4 us.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from struct import Struct as Layout
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.lane import Lane
from basaltmq.store.api import ManagedStore
from basaltmq.store.batch import Batch
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as keys
from basaltmq.streams.engines.rocksdb.engine import clear
from basaltmq.streams.engines.segment.index.outcomes import Outcomes
from basaltmq.streams.engines.segment.index.plain import PlainRows
from basaltmq.streams.engines.segment.index.rows import (
    HAS_KEYS,
    HAS_TAGS,
    INHERITED,
    IS_REWRITTEN,
    OF_TRANSACTIONS,
    Entry,
    IndexTerms,
    SegmentStats,
    delete_terms_of,
    first_expiry,
    put_entries,
    records_below,
    set_expiry,
)
from basaltmq.streams.engines.segment.index.segment_stats import SegmentStatsTable
from basaltmq.streams.engines.segment.index.times import FAMILY, insert_time, trim_times
from basaltmq.streams.engines.segment.index.unsynced import Unsynced, undo
from basaltmq.streams.engines.segment.state import TIME_NONE, SegmentShard
from basaltmq.streams.shards import ShardConfig

BUFFERED_ROWS_MAX: Final = 4096
"""Maximum buffered rows: a few hundred KB, which one batch writes in about 10 ms."""

_POSITION: Final = Layout(">Q")
_DELETED: Final = Layout(">QI")

SegmentOf = Callable[[int], int]
"""Returns the start of the segment with a position, or -1 if it is deleted."""

Load = Callable[[Entry], ColumnBatch | None]
"""Reads the records of an indexed frame; None for a frame without records."""


class StreamIndex:
    """The index of all lanes of an engine. `lock` guards the buffer; hold it from an append to its `add`."""

    def __init__(self, store: ManagedStore, buffered_rows_max: int = BUFFERED_ROWS_MAX) -> None:
        self._store = store
        self.rows_max = buffered_rows_max
        self.lock = threading.RLock()
        self._begin()
        self._checkpoints: dict[int, int] = {}
        self._stats_table = SegmentStatsTable(store)
        last = next(store.scan(FAMILY, *key_parts.prefix_range(b"N"), reverse=True), None)
        self._shard_max = 0 if last is None else keys.decode_stream_tail_key(last[0])
        """Highest shard with rows. The first write to a higher shard needs no lookup."""
        for key, raw in store.scan(FAMILY, *key_parts.prefix_range(b"C")):
            self._checkpoints[keys.decode_log_checkpoint_key(key)] = _POSITION.unpack(raw)[0]
        self.unsynced = Unsynced(store)
        self.outcomes = Outcomes(store, self.flush, self.entries)

    def _begin(self) -> None:
        """Reset the buffer."""
        self._entries: dict[int, list[Entry]] = {}
        self._touched: dict[int, SegmentShard] = {}
        self._batch = Batch()
        self._keys: list[bytes] = []
        self._values: list[bytes] = []
        """Buffered rows with bulk encoding, as columns."""
        self.rows = 0
        """Number of buffered rows. At `rows_max` they must be written before the next append."""

    def checkpoint(self, lane: int) -> int | None:
        """Return the position up to which a lane is indexed."""
        return self._checkpoints.get(lane)

    def wipe(self) -> None:
        """Delete the whole index."""
        with self.lock:
            batch = Batch()
            batch.delete_range(FAMILY, b"", b"\xff")
            self._store.write(batch, wal=False)
            self._begin()
            self._checkpoints = {}
            self._stats_table.clear()
            self.unsynced.clear()

    def make_room(self) -> None:
        """Flush a full buffer. Call before an append, so that no append fails after its frame is in the log."""
        if self.rows >= self.rows_max:
            self.flush()

    def note(
        self,
        lane: int,
        segment: int,
        position: int,
        size_bytes: int,
        time_min_ms: int,
        time_max_ms: int,
        stored_ms: int,
        garbage: int,
    ) -> None:
        """Count a frame of any kind that was appended to a segment. The caller holds `lock`."""
        self._stats_table.add(lane, segment, size_bytes, time_min_ms, time_max_ms, stored_ms, garbage)
        self._checkpoints[lane] = position + size_bytes

    def append(
        self, lane: int, segment: int, shard: SegmentShard, entry: Entry, time_min_ms: int, terms: IndexTerms
    ) -> None:
        """Do `note` and `add` for a frame of records. The caller holds `lock`."""
        _, _, position, size_bytes, _, time_max_ms, stored_ms, _, _, _ = entry
        sums = self._stats_table
        stats = sums.last if sums.last_at == (lane, segment) else sums.of(lane, segment)
        stats.add(size_bytes, time_min_ms, time_max_ms, stored_ms)
        self._checkpoints[lane] = position + size_bytes
        self.add(shard, entry, terms, shard.config)

    def add(self, shard: SegmentShard, entry: Entry, terms: IndexTerms, config: ShardConfig) -> None:
        """Buffer a frame that follows the shard's last one. The caller holds `lock` and has called `note`."""
        number = shard.number
        last_offset, _, _, size_bytes, records, time_max_ms, _, _, expire_ms, _ = entry
        entries = self._entries.get(number)
        if entries is None:
            if number > self._shard_max:
                self._shard_max = number
            self._entries[number] = [entry]
            self._touched[number] = shard
        else:
            entries.append(entry)
        shard.indexed_next = last_offset + 1
        shard.frames += 1
        shard.records += records
        shard.size_bytes += size_bytes
        rows = 1
        if time_max_ms > shard.timestamp_max_ms and config.index_times:
            shard.timestamp_max_ms = time_max_ms
            self._keys.append(keys.stream_time_key(number, time_max_ms, last_offset))
            self._values.append(b"")
            rows = 2
        if terms.flags:
            rows += terms.put(self._batch, number, last_offset)
            if terms.flags & OF_TRANSACTIONS:
                self.outcomes.noted()
        if expire_ms:
            self._batch.put(FAMILY, keys.stream_expiry_key(expire_ms, number, last_offset), b"")
        self.rows += rows

    def absorb(self, lane: int, segment: int, position: int, rows: PlainRows) -> None:
        """Buffer the rows of plain frames up to `position` that follow their shards' last ones.

        The caller holds `lock`. Only for replay, which does not read them before the next `flush`.
        """
        row_keys, row_values, stats = rows.rows()
        self._stats_table.merge(lane, segment, stats)
        self._checkpoints[lane] = position
        self._keys += row_keys
        self._values += row_values
        self._touched.update(rows.shards)
        self._shard_max = max(self._shard_max, *rows.shards)
        self.rows += len(row_keys)

    def flush(self) -> None:
        """Write the buffer as one batch."""
        with self.lock:
            if not self._touched:
                return
            # On failure the buffer stays, and the next flush builds the batch again.
            batch = Batch()
            batch.ops = list(self._batch.ops)
            row_keys, row_values = list(self._keys), list(self._values)
            put_entries(row_keys, row_values, self._entries)
            batch.put_many(FAMILY, row_keys, row_values)
            tails = list(map(SegmentShard.encode, self._touched.values()))
            batch.put_many(FAMILY, list(map(keys.stream_tail_key, self._touched)), tails)
            self._write(batch)
            # Readers read the buffer first and the store second, so clear the buffer after the write.
            self._begin()
            self.outcomes.is_buffered = False

    def shard_row(self, number: int) -> bytes | None:
        if number > self._shard_max:
            return None
        with self.lock:
            shard = self._touched.get(number)
            if shard is not None:
                return shard.encode()
            return self._store.get(FAMILY, keys.stream_tail_key(number))

    def entries(self, shard: int, offset: int) -> Iterator[Entry]:
        """Yield the frames of a shard in order, from the one with `offset` or the first after it."""
        buffered = self._entries.get(shard)
        limit = None
        if buffered:
            limit = buffered[0].last_offset
            if offset >= buffered[0].base_offset:
                yield from buffered[bisect_left(buffered, (offset,)) :]
                return
        end = key_parts.prefix_range(keys.frame_key(shard, 0)[:9])[1] if limit is None else keys.frame_key(shard, limit)
        for key, raw in self._store.scan(FAMILY, keys.frame_key(shard, offset), end):
            yield Entry.decode(_POSITION.unpack_from(key, 9)[0], raw)
        if buffered:
            yield from list(buffered)

    def entry(self, shard: int, last_offset: int) -> Entry | None:
        """Return the frame with this last offset, or None."""
        found = next(self.entries(shard, last_offset), None)
        return found if found is not None and found.last_offset == last_offset else None

    def holders(self, kind: bytes, shard: int, hashed: int, offset: int) -> Iterator[int]:
        """Yield last offsets, from `offset` on, of frames with a key (`K`) or tag (`G`) of this hash."""
        self._written()
        first = keys.stream_index_key(kind, shard, hashed, offset)
        _, end = key_parts.prefix_range(first[:17])
        for key, _ in self._store.scan(FAMILY, first, end):
            yield keys.decode_stream_index_key(key)[3]

    def first_at_time(self, shard: int, timestamp_ms: int) -> int | None:
        """Return the last offset of the first frame with a record at or after this time, or None."""
        self._written()
        first = keys.stream_time_key(shard, timestamp_ms, 0)
        row = next(self._store.scan(FAMILY, first, key_parts.prefix_range(first[:9])[1]), None)
        return None if row is None else keys.decode_stream_time_key(row[0])[2]

    def deleted(self, shard: int, first: int, last: int) -> list[int]:
        """Return the individually deleted offsets in [first, last]."""
        start, end = keys.deleted_record_key(shard, first), keys.deleted_record_key(shard, last + 1)
        return [keys.decode_deleted_record_key(key)[1] for key, _ in self._store.scan(FAMILY, start, end)]

    def stats(self, lane: int, segment: int) -> SegmentStats | None:
        """Return a segment's stats; None if it has no frames or its deletion had started."""
        return self._stats_table.get(lane, segment)

    def exceeds(self, lane: int, log: Lane) -> bool:
        """Whether the index counts more bytes in a segment than the log has."""
        return self._stats_table.exceed(lane, {segment.start: segment.size_bytes for segment in log.segments()})

    def roll_back(self, batch: Batch, shard: SegmentShard, position: int) -> None:
        """Add to `batch` the removal of a shard's frames from a position on, which are lost."""
        undo(self._store, batch, shard, position)
        self._put_tail(batch, shard)

    def roll_back_lane(self, lane: int, position: int, batch: Batch, segment: int, stats: SegmentStats) -> None:
        """Roll a lane back to a position before the checkpoint. The caller holds `lock`.

        `batch` removes the later rows. `stats` are those of the remaining part of the segment with that position.
        """
        self._stats_table.forget_from(batch, lane, segment)
        self._stats_table.merge(lane, segment, stats)
        self._checkpoints[lane] = position
        self._write(batch)

    def due(self, now_ms: int) -> Iterator[tuple[int, int]]:
        """Yield (shard, last offset) of frames with an expired record."""
        self._written()
        for key, _ in self._store.scan(FAMILY, b"E", keys.stream_expiry_bound(now_ms + 1)):
            _, shard, last_offset = keys.decode_stream_expiry_key(key)
            yield shard, last_offset

    def entry_before(self, shard: int, base_offset: int) -> Entry | None:
        """Return the frame before the one that starts at `base_offset`, or None."""
        self._written()
        start = keys.frame_key(shard, 0)
        row = next(self._store.scan(FAMILY, start, keys.frame_key(shard, base_offset), reverse=True), None)
        return None if row is None else Entry.decode(keys.decode_frame_key(row[0])[1], row[1])

    def delete(
        self,
        shard: SegmentShard,
        offsets: Sequence[int],
        position: int,
        size_bytes: int,
        load: Load,
        segment_of: SegmentOf,
    ) -> int:
        """Apply a DELETES frame. Return how many records were newly deleted. The caller holds `lock`."""
        assert not self._entries, "flush before noting the change"
        batch = Batch()
        fresh: list[int] = []
        share = size_bytes // len(offsets)
        row = _DELETED.pack(position, share)
        self._stats_table.add_garbage(shard.lane, segment_of(position), size_bytes - share * len(offsets))
        for offset in offsets:
            if offset < shard.start_offset:
                self._stats_table.add_garbage(shard.lane, segment_of(position), share)
                continue
            key = keys.deleted_record_key(shard.number, offset)
            old = self._store.get(FAMILY, key)
            if old is None:
                fresh.append(offset)
            else:
                self._garbage_of(shard.lane, old, segment_of)
            batch.put(FAMILY, key, row)
        shard.deleted += len(fresh)
        self._set_expiries(batch, shard, fresh, load)
        self._put_tail(batch, shard)
        self._write(batch, is_append=False)
        return len(fresh)

    def _undelete(
        self, batch: Batch, shard: SegmentShard, first: int, last: int, held: Collection[int], segment_of: SegmentOf
    ) -> None:
        """Remove the rows of deleted records in [first, last], except those in `held`."""
        if not shard.deleted or last < first:
            return
        start, end = (
            keys.deleted_record_key(shard.number, first),
            keys.deleted_record_key(shard.number, last + 1),
        )
        for key, row in self._store.scan(FAMILY, start, end):
            if keys.decode_deleted_record_key(key)[1] not in held:
                batch.delete(FAMILY, key)
                shard.deleted -= 1
                self._garbage_of(shard.lane, row, segment_of)

    def _garbage_of(self, lane: int, deleted_row: bytes, segment_of: SegmentOf) -> None:
        position, share = _DELETED.unpack(deleted_row)
        self._stats_table.add_garbage(lane, segment_of(position), share)

    def deletes_of(self, shard: int, offsets: Sequence[int], position: int) -> list[int]:
        """Return those of a DELETES frame's offsets whose rows point to it."""
        found = []
        for offset in offsets:
            row = self._store.get(FAMILY, keys.deleted_record_key(shard, offset))
            if row is not None and _DELETED.unpack(row)[0] == position:
                found.append(offset)
        return found

    def _set_expiries(self, batch: Batch, shard: SegmentShard, fresh: list[int], load: Load) -> None:
        """Update the first expiry of frames with newly deleted records."""
        done = -1
        for offset in fresh:
            if offset <= done:
                continue
            entry = next(self.entries(shard.number, offset), None)
            if entry is None:
                return
            done = entry.last_offset
            if entry.expire_min_ms:
                deleted = {*self.deleted(shard.number, entry.base_offset, entry.last_offset), *fresh}
                set_expiry(batch, shard.number, entry, shard.start_offset, deleted, load(entry))

    def trim(
        self,
        shard: SegmentShard,
        start: int,
        config: ShardConfig,
        load: Load,
        segment_of: SegmentOf,
    ) -> int:
        """Remove frames completely below `start`, which is durable. Return how many records that removes.

        The caller holds `lock`.
        """
        assert not self._entries, "flush before noting the change"
        number = shard.number
        batch = Batch()
        before = shard.kept
        first_kept: Entry | None = None
        unreadable: set[int] = set()
        for entry in self.entries(number, 0):
            if entry.last_offset >= start:
                first_kept = entry
                break
            self._remove(batch, shard, entry, config, load, segment_of, unreadable)
        delete_terms_of(self._store, batch, number, unreadable)
        self._undelete(batch, shard, 0, start - 1, (), segment_of)
        shard.start_offset = max(shard.start_offset, start)
        shard.skipped = 0 if first_kept is None else records_below(first_kept, start, load)
        if first_kept is not None and first_kept.expire_min_ms and first_kept.base_offset < start:
            gone = self.deleted(number, start, first_kept.last_offset) if shard.deleted else ()
            set_expiry(batch, number, first_kept, shard.start_offset, gone, load(first_kept))
        if config.index_times:
            trim_times(self._store, batch, shard, start, self.entries(number, start))
        self._put_tail(batch, shard)
        self._write(batch, is_append=False)
        return before - shard.kept

    def drop(self, number: int, lane: int, segment_of: SegmentOf) -> None:
        """Remove all rows of a durably deleted shard. The caller holds `lock`."""
        assert not self._entries, "flush before noting the change"
        batch = Batch()
        for entry in self.entries(number, 0):
            self._stats_table.add_garbage(lane, segment_of(entry.position), entry.size_bytes)
            if entry.expire_min_ms:
                batch.delete(FAMILY, keys.stream_expiry_key(entry.expire_min_ms, number, entry.last_offset))
        for _, row in self._store.scan(FAMILY, *key_parts.prefix_range(keys.deleted_record_key(number, 0)[:9])):
            self._garbage_of(lane, row, segment_of)
        for kind in (b"O", b"T", b"K", b"G", b"D", b"Q", b"M"):
            clear(self._store, batch, FAMILY, kind + _POSITION.pack(number))
        batch.delete(FAMILY, keys.stream_tail_key(number))
        self._write(batch, is_append=False)

    def move(
        self,
        shard: SegmentShard,
        entry: Entry,
        batch_of_records: ColumnBatch | None,
        config: ShardConfig,
        segment_of: SegmentOf,
    ) -> None:
        """Point the index to an appended copy of a frame. The caller holds `lock`."""
        assert not self._entries, "flush before noting the change"
        batch = Batch()
        old = self.entry(shard.number, entry.last_offset)
        if old is not None:
            self._stats_table.add_garbage(shard.lane, segment_of(old.position), old.size_bytes)
            moved = old._replace(position=entry.position, size_bytes=entry.size_bytes)
            batch.put(FAMILY, keys.frame_key(shard.number, entry.last_offset), moved.encode())
        else:
            self._insert(batch, shard, entry, batch_of_records, config, frozenset())
            self._put_tail(batch, shard)
        self._write(batch, is_append=False)

    def replace(
        self,
        shard: SegmentShard,
        entry: Entry,
        batch_of_records: ColumnBatch | None,
        config: ShardConfig,
        load: Load,
        segment_of: SegmentOf,
    ) -> None:
        """Replace the frames that `entry` covers with that appended frame. The caller holds `lock`."""
        assert not self._entries, "flush before noting the change"
        number = shard.number
        batch = Batch()
        gone_times: set[bytes] = set()
        unreadable: set[int] = set()
        for old in list(self._covered(number, entry)):
            gone_times.add(keys.stream_time_key(number, old.timestamp_max_ms, old.last_offset))
            self._remove(batch, shard, old, config, load, segment_of, unreadable)
        delete_terms_of(self._store, batch, number, unreadable)
        deltas = None if batch_of_records is None else batch_of_records.deltas()
        count = 0 if batch_of_records is None else batch_of_records.count
        held = {entry.base_offset + delta for delta in (deltas if deltas is not None else range(count))}
        self._undelete(batch, shard, entry.base_offset, entry.last_offset, held, segment_of)
        for key in gone_times:
            batch.delete(FAMILY, key)
        self._insert(batch, shard, entry, batch_of_records, config, gone_times)
        if entry.base_offset < shard.start_offset:
            shard.skipped = sum(offset < shard.start_offset for offset in held)
        self._put_tail(batch, shard)
        self._write(batch, is_append=False)

    def forget_segment(self, lane: int, segment: int) -> None:
        """Delete a segment's stats before its file, so that a file without a row is one to delete."""
        with self.lock:
            self._stats_table.forget(lane, segment)
            batch = Batch()
            batch.delete(FAMILY, keys.log_segment_key(lane, segment))
            self._store.write(batch, wal=False)

    def flush_to_disk(self, ends: Mapping[int, int] | None = None) -> None:
        """Flush the index to disk, so that it can be restored without the log before its checkpoint. See `settle`."""
        self.settle(ends)
        self._store.flush(FAMILY)

    def settle(self, ends: Mapping[int, int] | None = None) -> None:
        """Write the buffer and the checkpoints. `ends`: by lane, the end of a gap behind the last frame."""
        with self.lock:
            self._checkpoints.update(ends or {})
            self.flush()
            self._write(Batch())

    def count(self, lane: int, segment: int, stats: SegmentStats) -> None:
        """Add frames that the index already contains to their segment's stats."""
        with self.lock:
            self._stats_table.merge(lane, segment, stats)

    def _covered(self, number: int, entry: Entry) -> Iterator[Entry]:
        for old in self.entries(number, entry.base_offset):
            if old.last_offset > entry.last_offset:
                return
            yield old

    def _remove(
        self,
        batch: Batch,
        shard: SegmentShard,
        entry: Entry,
        config: ShardConfig,
        load: Load,
        segment_of: SegmentOf,
        unreadable: set[int],
    ) -> None:
        """Remove a frame's row and its key and tag rows. The caller removes time rows."""
        batch.delete(FAMILY, keys.frame_key(shard.number, entry.last_offset))
        self.outcomes.delete(batch, shard.number, entry)
        if entry.expire_min_ms:
            batch.delete(FAMILY, keys.stream_expiry_key(entry.expire_min_ms, shard.number, entry.last_offset))
        if entry.flags & (HAS_KEYS | HAS_TAGS):
            try:
                terms = IndexTerms(load(entry), config)
            except BasaltError:
                unreadable.add(entry.last_offset)
            else:
                terms.delete(batch, shard.number, entry.last_offset)
        if entry.flags & IS_REWRITTEN:
            shard.rewritten -= 1
        shard.frames -= 1
        shard.records -= entry.records
        shard.size_bytes -= entry.size_bytes
        self._stats_table.add_garbage(shard.lane, segment_of(entry.position), entry.size_bytes)

    def _insert(
        self,
        batch: Batch,
        shard: SegmentShard,
        entry: Entry,
        batch_of_records: ColumnBatch | None,
        config: ShardConfig,
        gone_times: Collection[bytes],
    ) -> None:
        """Insert a frame at any position in the shard."""
        number = shard.number
        terms = IndexTerms(batch_of_records, config)
        deleted = self.deleted(number, entry.base_offset, entry.last_offset) if shard.deleted else ()
        expire_ms = first_expiry(batch_of_records, entry.base_offset, shard.start_offset, deleted)
        flags = terms.flags | (entry.flags & INHERITED)
        mask = entry.tag_mask if flags & OF_TRANSACTIONS else terms.tag_mask
        entry = entry._replace(expire_min_ms=expire_ms, tag_mask=mask, flags=flags)
        self.outcomes.put(batch, number, entry)
        if flags & IS_REWRITTEN:
            shard.rewritten += 1
        if expire_ms:
            batch.put(FAMILY, keys.stream_expiry_key(expire_ms, number, entry.last_offset), b"")
        batch.put(FAMILY, keys.frame_key(number, entry.last_offset), entry.encode())
        terms.put(batch, number, entry.last_offset)
        shard.frames += 1
        shard.records += entry.records
        shard.size_bytes += entry.size_bytes
        shard.indexed_next = max(shard.indexed_next, entry.last_offset + 1)
        if config.index_times:
            insert_time(self._store, batch, shard, entry, gone_times)

    def _put_tail(self, batch: Batch, shard: SegmentShard) -> None:
        key = keys.stream_tail_key(shard.number)
        self._shard_max = max(self._shard_max, shard.number)
        if shard.frames == 0 and shard.deleted == 0:
            shard.skipped = 0
            shard.timestamp_max_ms = TIME_NONE
            batch.delete(FAMILY, key)
        else:
            batch.put(FAMILY, key, shard.encode())

    def _write(self, batch: Batch, *, is_append: bool = True) -> None:
        """Write a change with the checkpoints and the changed segment stats."""
        self._stats_table.put_changed(batch)
        for lane, position in self._checkpoints.items():
            batch.put(FAMILY, keys.log_checkpoint_key(lane), _POSITION.pack(position))
        self.unsynced.put(batch, self._checkpoints, self._touched, is_append=is_append)
        if len(batch):
            self._store.write(batch, wal=False)
        self._stats_table.written()
        self.unsynced.written()

    def _written(self) -> None:
        """Flush the buffer, because lookups by key, tag and time read only the store."""
        if self.rows:
            self.flush()
