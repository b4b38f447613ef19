"""The consume-queue index of the segment engine (SPEC D2..D4): where each frame of each shard lies.

One family, `stream_index`, written without the WAL. A kind byte comes first:

    'C' lane                        -> position u64: frames below it are in the index
    'P' lane, 'U' lane | position, 'X' lane -> what the log may still lose (see `index_unsynced`)
    'S' lane | segment start        -> bytes, frames, garbage bytes, least and largest record time and store time
    'N' shard                       -> counts (see `segment_state`)
    'O' shard | last offset         -> position, base offset, size, records, largest time, store time, tag mask,
                                       first expiry, flags
    'T' shard | time | last offset  -> empty; only where the largest time so far grows: frames before it are older
    'K' shard | hash64(key) | last offset, 'G' shard | hash64(tag) | last offset -> empty: frames to look into
    'D' shard | offset              -> position of the DELETES frame that says so, its share of that frame's bytes
    'E' expire at | shard | last offset -> empty: the first live record of the frame that expires, does so then
    'Q', 'M' shard | producer id | last offset -> frames of transactions and what ended them (see `index_outcomes`)

Because all rows are in one family, what RocksDB has on disk after a crash is a prefix of what was written, and 'C' in
it is exact: every change is written in one batch with the position up to which the log is applied. From there on the
log is applied again. So every row is a function of the log's frames and the shard rows, and each operation below leaves
the rows it would have found had it seen only what is left: deleted and rebuilt, the index is the same key for key (P6),
'P', 'U' and 'X' apart. The index may reach disk before the log does. After a power loss it then knows frames that are
not there, cut off or turned to zeros; so what lies between 'P' and 'C' is read at start, and where it is not whole, the
index is taken back to before that (`segment_recovery`).

Appends are gathered: entries of many frames become one batch, and readers look at the gathered ones too (`entries`).
Everything else (deletes, trims, copies made by cleaning) is rare: the caller writes the gathered ones (`flush`), then
notes the frame, then the change writes itself, so that the checkpoint never stands for a change that is not there.

A frame that is no live copy of records is garbage from the moment it is superseded. A DELETES frame is garbage to the
extent that its offsets have no row any more, or one that points to a later frame. TRIM and DROP are garbage at once:
they announce a start offset that moved and a shard that went, which the shard rows say. Those rows are durable before
the index follows, and a marker beside them remembers until the index is on disk that it has to (`trim`, `drop`).

Budget per frame without keys and tags: 2 us to gather, 4 us to write; each key or tag adds 4 us.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from struct import Struct as Layout
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.lane import Lane
from basaltmq.store.api import ManagedStore
from basaltmq.store.batch import Batch
from basaltmq.store.keys import queues as keys
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
    SegmentStats,
    Words,
    delete_words_of,
    first_expiry,
    put_entries,
    set_expiry,
)
from basaltmq.streams.engines.segment.index.segment_stats import SegmentSums
from basaltmq.streams.engines.segment.index.times import FAMILY, insert_time, trim_times
from basaltmq.streams.engines.segment.index.unsynced import Unsynced, undo
from basaltmq.streams.engines.segment.state import TIME_NONE, SegmentShard
from basaltmq.streams.shards import ShardConfig

GATHERED_ROWS_MAX: Final = 4096
"""Rows gathered before they are written: enough to make a batch cheap, a few hundred KB, some 10 ms of work."""

_POSITION: Final = Layout(">Q")
_DELETED: Final = Layout(">QI")

SegmentOf = Callable[[int], int]
"""Where the segment that holds a position begins; -1 if it is gone."""

Load = Callable[[Entry], ColumnBatch | None]
"""Reads the records of an indexed frame; None for one that holds none."""


class StreamIndex:
    """The index of all lanes of one engine. `lock` guards what is gathered; hold it from an append to its `add`."""

    def __init__(self, store: ManagedStore, gathered_rows_max: int = GATHERED_ROWS_MAX) -> None:
        self._store = store
        self.rows_max = gathered_rows_max
        self.lock = threading.RLock()
        self._begin()
        self._checkpoints: dict[int, int] = {}
        self._sums = SegmentSums(store)
        last = next(store.scan(FAMILY, *keys.prefix_range(b"N"), reverse=True), None)
        self._shard_max = 0 if last is None else keys.decode_stream_tail_key(last[0])
        """No shard above it has rows: the first write to a shard need not look."""
        for key, raw in store.scan(FAMILY, *keys.prefix_range(b"C")):
            self._checkpoints[keys.decode_log_checkpoint_key(key)] = _POSITION.unpack(raw)[0]
        self.unsynced = Unsynced(store)
        self.outcomes = Outcomes(store, self.flush, self.entries)

    def _begin(self) -> None:
        """Nothing is gathered."""
        self._entries: dict[int, list[Entry]] = {}
        self._touched: dict[int, SegmentShard] = {}
        self._batch = Batch()
        self._keys: list[bytes] = []
        self._values: list[bytes] = []
        """Rows that come by the hundred, as columns."""
        self.rows = 0
        """Rows gathered; from `rows_max` on they are to be written before the next append."""

    def checkpoint(self, lane: int) -> int | None:
        """The position up to which a lane is in the index."""
        return self._checkpoints.get(lane)

    def wipe(self) -> None:
        """Begin from nothing."""
        with self.lock:
            batch = Batch()
            batch.delete_range(FAMILY, b"", b"\xff")
            self._store.write(batch, wal=False)
            self._begin()
            self._checkpoints = {}
            self._sums.clear()
            self.unsynced.clear()

    def make_room(self) -> None:
        """Write what is gathered if that is enough. Before an append, so that no append fails after it was made."""
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
        """A frame, of whatever kind, was appended to a segment. Under `lock`."""
        self._sums.add(lane, segment, size_bytes, time_min_ms, time_max_ms, stored_ms, garbage)
        self._checkpoints[lane] = position + size_bytes

    def append(
        self, lane: int, segment: int, shard: SegmentShard, entry: Entry, time_min_ms: int, words: Words
    ) -> None:
        """`note` and `add` of a frame of records that was appended to a segment. Under `lock`."""
        _, _, position, size_bytes, _, time_max_ms, stored_ms, _, _, _ = entry
        sums = self._sums
        stats = sums.last if sums.last_at == (lane, segment) else sums.of(lane, segment)
        stats.add(size_bytes, time_min_ms, time_max_ms, stored_ms)
        self._checkpoints[lane] = position + size_bytes
        self.add(shard, entry, words, shard.config)

    def add(self, shard: SegmentShard, entry: Entry, words: Words, config: ShardConfig) -> None:
        """Gather a frame that follows on the shard's last. Under `lock`, after `note`."""
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
        if words.flags:
            rows += words.put(self._batch, number, last_offset)
            if words.flags & OF_TRANSACTIONS:
                self.outcomes.noted()
        if expire_ms:
            self._batch.put(FAMILY, keys.stream_expiry_key(expire_ms, number, last_offset), b"")
        self.rows += rows

    def absorb(self, lane: int, segment: int, position: int, rows: PlainRows) -> None:
        """Plain frames that follow on their shards' last, up to `position`, as rows: for a replay, which reads none of
        them before the next `flush`. Under `lock`.
        """
        row_keys, row_values, stats = rows.rows()
        self._sums.merge(lane, segment, stats)
        self._checkpoints[lane] = position
        self._keys += row_keys
        self._values += row_values
        self._touched.update(rows.shards)
        self._shard_max = max(self._shard_max, *rows.shards)
        self.rows += len(row_keys)

    def flush(self) -> None:
        """Write what is gathered as one batch."""
        with self.lock:
            if not self._touched:
                return
            # On failure what is gathered stays, and is put together again.
            batch = Batch()
            batch.ops = list(self._batch.ops)
            row_keys, row_values = list(self._keys), list(self._values)
            put_entries(row_keys, row_values, self._entries)
            batch.put_many(FAMILY, row_keys, row_values)
            tails = list(map(SegmentShard.encode, self._touched.values()))
            batch.put_many(FAMILY, list(map(keys.stream_tail_key, self._touched)), tails)
            self._write(batch)
            # Readers look at the gathered entries first and at the store second, so the store has them by now.
            self._begin()
            self.outcomes.is_gathered = False

    def shard_row(self, number: int) -> bytes | None:
        if number > self._shard_max:
            return None
        with self.lock:
            shard = self._touched.get(number)
            if shard is not None:
                return shard.encode()
            return self._store.get(FAMILY, keys.stream_tail_key(number))

    def entries(self, shard: int, offset: int) -> Iterator[Entry]:
        """The frames of a shard from the one that holds `offset` (or the first after it) on, in order."""
        gathered = self._entries.get(shard)
        limit = None
        if gathered:
            limit = gathered[0].last_offset
            if offset >= gathered[0].base_offset:
                yield from gathered[bisect_left(gathered, (offset,)) :]
                return
        end = keys.prefix_range(keys.frame_key(shard, 0)[:9])[1] if limit is None else keys.frame_key(shard, limit)
        for key, raw in self._store.scan(FAMILY, keys.frame_key(shard, offset), end):
            yield Entry.decode(_POSITION.unpack_from(key, 9)[0], raw)
        if gathered:
            yield from list(gathered)

    def entry(self, shard: int, last_offset: int) -> Entry | None:
        """The frame with this last offset."""
        found = next(self.entries(shard, last_offset), None)
        return found if found is not None and found.last_offset == last_offset else None

    def holders(self, kind: bytes, shard: int, hashed: int, offset: int) -> Iterator[int]:
        """Last offsets, from `offset` on, of frames that have a key (`K`) or tag (`G`) of this hash."""
        self._written()
        first = keys.stream_index_key(kind, shard, hashed, offset)
        _, end = keys.prefix_range(first[:17])
        for key, _ in self._store.scan(FAMILY, first, end):
            yield keys.decode_stream_index_key(key)[3]

    def first_at_time(self, shard: int, timestamp_ms: int) -> int | None:
        """The last offset of the first frame that has a record of this time or later."""
        self._written()
        first = keys.stream_time_key(shard, timestamp_ms, 0)
        row = next(self._store.scan(FAMILY, first, keys.prefix_range(first[:9])[1]), None)
        return None if row is None else keys.decode_stream_time_key(row[0])[2]

    def deleted(self, shard: int, first: int, last: int) -> list[int]:
        """Offsets in [first, last] deleted one by one."""
        start, end = keys.deleted_record_key(shard, first), keys.deleted_record_key(shard, last + 1)
        return [keys.decode_deleted_record_key(key)[1] for key, _ in self._store.scan(FAMILY, start, end)]

    def stats(self, lane: int, segment: int) -> SegmentStats | None:
        """None for a segment that has no frames, or whose deletion had begun."""
        return self._sums.get(lane, segment)

    def exceeds(self, lane: int, log: Lane) -> bool:
        """Does the index know of bytes in segments that the log does not have?"""
        return self._sums.exceed(lane, {segment.start: segment.size_bytes for segment in log.segments()})

    def take_back(self, batch: Batch, shard: SegmentShard, position: int) -> None:
        """A shard's frames from a position on are lost."""
        undo(self._store, batch, shard, position)
        self._put_tail(batch, shard)

    def return_to(self, lane: int, position: int, batch: Batch, segment: int, stats: SegmentStats) -> None:
        """The log ends at a position before the checkpoint; `batch` takes back what lay behind it. Under `lock`.

        `stats`: what is left in the segment that holds the position.
        """
        self._sums.forget_from(batch, lane, segment)
        self._sums.merge(lane, segment, stats)
        self._checkpoints[lane] = position
        self._write(batch)

    def due(self, now_ms: int) -> Iterator[tuple[int, int]]:
        """(shard, last offset) of frames with a record that has expired."""
        self._written()
        for key, _ in self._store.scan(FAMILY, b"E", keys.stream_expiry_bound(now_ms + 1)):
            _, shard, last_offset = keys.decode_stream_expiry_key(key)
            yield shard, last_offset

    def entry_before(self, shard: int, base_offset: int) -> Entry | None:
        """The frame before the one that begins at `base_offset`."""
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
        """A DELETES frame says that records are gone; how many were not before. Under `lock`."""
        assert not self._entries, "flush before the change is noted"
        batch = Batch()
        fresh: list[int] = []
        share = size_bytes // len(offsets)
        row = _DELETED.pack(position, share)
        self._sums.waste(shard.lane, segment_of(position), size_bytes - share * len(offsets))
        for offset in offsets:
            if offset < shard.start_offset:
                self._sums.waste(shard.lane, segment_of(position), share)
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
        """Rows of deleted records in [first, last] go, but for those of records a frame still holds."""
        if not shard.deleted or last < first:
            return
        start, end = keys.deleted_record_key(shard.number, first), keys.deleted_record_key(shard.number, last + 1)
        for key, row in self._store.scan(FAMILY, start, end):
            if keys.decode_deleted_record_key(key)[1] not in held:
                batch.delete(FAMILY, key)
                shard.deleted -= 1
                self._garbage_of(shard.lane, row, segment_of)

    def _garbage_of(self, lane: int, deleted_row: bytes, segment_of: SegmentOf) -> None:
        position, share = _DELETED.unpack(deleted_row)
        self._sums.waste(lane, segment_of(position), share)

    def deletes_of(self, shard: int, offsets: Sequence[int], position: int) -> list[int]:
        """Those of a DELETES frame's offsets whose rows point to it."""
        found = []
        for offset in offsets:
            row = self._store.get(FAMILY, keys.deleted_record_key(shard, offset))
            if row is not None and _DELETED.unpack(row)[0] == position:
                found.append(offset)
        return found

    def _set_expiries(self, batch: Batch, shard: SegmentShard, fresh: list[int], load: Load) -> None:
        """The frames that lose a record may have another first to expire."""
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
        below: Callable[[Entry, int], int],
    ) -> int:
        """Frames wholly below `start` leave the index; how many records went. Under `lock`, the start being durable.

        `below` says how many records of a frame lie below an offset.
        """
        assert not self._entries, "flush before the change is noted"
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
        delete_words_of(self._store, batch, number, unreadable)
        self._undelete(batch, shard, 0, start - 1, (), segment_of)
        shard.start_offset = max(shard.start_offset, start)
        shard.skipped = 0 if first_kept is None else below(first_kept, start)
        if first_kept is not None and first_kept.expire_min_ms and first_kept.base_offset < start:
            gone = self.deleted(number, start, first_kept.last_offset) if shard.deleted else ()
            set_expiry(batch, number, first_kept, shard.start_offset, gone, load(first_kept))
        if config.index_times:
            trim_times(self._store, batch, shard, start, self.entries(number, start))
        self._put_tail(batch, shard)
        self._write(batch, is_append=False)
        return before - shard.kept

    def drop(self, number: int, lane: int, segment_of: SegmentOf) -> None:
        """Nothing of a shard stays. Under `lock`, its row being durably gone."""
        assert not self._entries, "flush before the change is noted"
        batch = Batch()
        for entry in self.entries(number, 0):
            self._sums.waste(lane, segment_of(entry.position), entry.size_bytes)
            if entry.expire_min_ms:
                batch.delete(FAMILY, keys.stream_expiry_key(entry.expire_min_ms, number, entry.last_offset))
        for _, row in self._store.scan(FAMILY, *keys.prefix_range(keys.deleted_record_key(number, 0)[:9])):
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
        """A copy of a frame was appended; it counts from here on. Under `lock`."""
        assert not self._entries, "flush before the change is noted"
        batch = Batch()
        old = self.entry(shard.number, entry.last_offset)
        if old is not None:
            self._sums.waste(shard.lane, segment_of(old.position), old.size_bytes)
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
        """A frame was appended that holds what is left of those it covers, which go. Under `lock`."""
        assert not self._entries, "flush before the change is noted"
        number = shard.number
        batch = Batch()
        gone_times: set[bytes] = set()
        unreadable: set[int] = set()
        for old in list(self._covered(number, entry)):
            gone_times.add(keys.stream_time_key(number, old.timestamp_max_ms, old.last_offset))
            self._remove(batch, shard, old, config, load, segment_of, unreadable)
        delete_words_of(self._store, batch, number, unreadable)
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
        """The segment goes. Before its file does, so that a file without a row is one that was to go."""
        with self.lock:
            self._sums.forget(lane, segment)
            batch = Batch()
            batch.delete(FAMILY, keys.log_segment_key(lane, segment))
            self._store.write(batch, wal=False)

    def harden(self) -> None:
        """Bring the index to disk, so that the log before its checkpoint is not needed to rebuild it."""
        self.settle()
        self._store.flush(FAMILY)

    def settle(self) -> None:
        """Write everything there is to write, the checkpoint included."""
        with self.lock:
            self.flush()
            self._write(Batch())

    def count(self, lane: int, segment: int, stats: SegmentStats) -> None:
        """Add frames to their segment's sums that the index, but for them, is up to date with."""
        with self.lock:
            self._sums.merge(lane, segment, stats)

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
        """A frame's own row and those by its keys and tags; rows by time are the caller's."""
        batch.delete(FAMILY, keys.frame_key(shard.number, entry.last_offset))
        self.outcomes.delete(batch, shard.number, entry)
        if entry.expire_min_ms:
            batch.delete(FAMILY, keys.stream_expiry_key(entry.expire_min_ms, shard.number, entry.last_offset))
        if entry.flags & (HAS_KEYS | HAS_TAGS):
            try:
                words = Words(load(entry), config)
            except BasaltError:
                unreadable.add(entry.last_offset)
            else:
                words.delete(batch, shard.number, entry.last_offset)
        if entry.flags & IS_REWRITTEN:
            shard.rewritten -= 1
        shard.frames -= 1
        shard.records -= entry.records
        shard.size_bytes -= entry.size_bytes
        self._sums.waste(shard.lane, segment_of(entry.position), entry.size_bytes)

    def _insert(
        self,
        batch: Batch,
        shard: SegmentShard,
        entry: Entry,
        batch_of_records: ColumnBatch | None,
        config: ShardConfig,
        gone_times: Collection[bytes],
    ) -> None:
        """A frame anywhere in the shard's run."""
        number = shard.number
        words = Words(batch_of_records, config)
        deleted = self.deleted(number, entry.base_offset, entry.last_offset) if shard.deleted else ()
        expire_ms = first_expiry(batch_of_records, entry.base_offset, shard.start_offset, deleted)
        flags = words.flags | (entry.flags & INHERITED)
        mask = entry.tag_mask if flags & OF_TRANSACTIONS else words.tag_mask
        entry = entry._replace(expire_min_ms=expire_ms, tag_mask=mask, flags=flags)
        self.outcomes.put(batch, number, entry)
        if flags & IS_REWRITTEN:
            shard.rewritten += 1
        if expire_ms:
            batch.put(FAMILY, keys.stream_expiry_key(expire_ms, number, entry.last_offset), b"")
        batch.put(FAMILY, keys.frame_key(number, entry.last_offset), entry.encode())
        words.put(batch, number, entry.last_offset)
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
        """Write a change with the checkpoint and the segments it concerns."""
        self._sums.put_changed(batch)
        for lane, position in self._checkpoints.items():
            batch.put(FAMILY, keys.log_checkpoint_key(lane), _POSITION.pack(position))
        self.unsynced.put(batch, self._checkpoints, self._touched, is_append=is_append)
        if len(batch):
            self._store.write(batch, wal=False)
        self._sums.written()
        self.unsynced.written()

    def _written(self) -> None:
        """Look-ups by key, tag and time go to the store only."""
        if self.rows:
            self.flush()
