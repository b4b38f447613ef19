"""The segment engine: records in lanes of the commit log, located through an index (SPEC B5, D2..D4).

    write   shard lock ─ encode the frame ─ lane lock ─ one writev ─ buffer its index entry ─ Append
            at `synced` the sync writes the frames of all waiting writers to the lane's ring together
    read    index entries from the offset on ─ pread runs of frames ─ checksums ─ frames, not records

A frame is one batch of one shard. Every change of the index is also a frame in the log: records, deletes (DELETES), a
new log start offset (TRIM), a deleted shard (DROP), and copies by segment cleaning. The index is written without the
WAL. At start the engine replays the log from the index checkpoint on, and rebuilds a missing index from the whole log.
If a power loss removed unsynced frames, the index is rolled back (`recovery`). Data that cannot be derived (the shards
and their start offsets) is in the shard rows, with the WAL, and is durable before the index changes. A marker row
beside them records until the next checkpoint that the index must follow, in case the TRIM or DROP frame is lost.

Invariants: a frame is in the log before its entry is in the index; the checkpoint covers a frame only in the batch with
its entry; a segment is deleted only when the index on disk no longer needs it. Lock order: shard, markers, lane, index.
The levels `memory` and `written` are equal here. High watermarks follow the syncs of the lane.

Cost of a `batch_write` of 100 x 256 B as columns: 14 us for the writev, 1.6 us for the checksum, 5 us of Python
including the index entry, and 1 us to write the index row later. Plain records need 60 us more for encoding.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from basaltmq.durability import Durability
from basaltmq.errors import LimitExceededError, ShardNotFoundError
from basaltmq.log.batches.columnar import EXPIRIES, ColumnBatch
from basaltmq.log.batches.kafka import KafkaBatch, columns, incoming
from basaltmq.log.batches.record import NEVER, StoredRecord
from basaltmq.log.frame import (
    AWAITED,
    COLUMNAR,
    DROP,
    KAFKA,
    TRIM,
    Header,
    decode_header,
    encode_deletes,
    encode_frame,
    frame_bytes,
    records_of,
)
from basaltmq.log.lane import Lane
from basaltmq.log.lane_options import LaneOptions
from basaltmq.log.recovery import Damage, Loss, LostBytes, LostTail
from basaltmq.store.api import ManagedStore
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.adapter import (
    BATCH_BYTES_MAX,
    Append,
    Clock,
    Records,
    ShardInfo,
    check_batch,
    check_placed,
    hash64,
)
from basaltmq.streams.engines.segment.batches import DELTA_MAX, as_columns, offset_runs
from basaltmq.streams.engines.segment.ceilings import Ceilings
from basaltmq.streams.engines.segment.cleaner import SegmentCleaner
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.index.rows import (
    IS_AWAITED,
    IS_MARKER,
    NO_TERMS,
    OF_TRANSACTIONS,
    Entry,
    IndexTerms,
    first_expiry,
    kafka_terms,
)
from basaltmq.streams.engines.segment.lost_offsets import LostOffsets
from basaltmq.streams.engines.segment.producers_row import drop_lost_batches
from basaltmq.streams.engines.segment.read_result import offset_at
from basaltmq.streams.engines.segment.reader import LogLane, SegmentReader, wanted_records
from basaltmq.streams.engines.segment.recovery import lanes_present, recover
from basaltmq.streams.engines.segment.replay import Progress, note
from basaltmq.streams.engines.segment.row_prefetch import RowPrefetch
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.leaders import HERE, Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import Engine, Recent, ShardConfig, ShardMeta, Shards, ShardSpec
from basaltmq.streams.watermark import done

SHARDS_LOADED_MAX: Final = 16_384
"""Maximum cached shard states, about 1 KB each."""

LANES: Final = 1
"""Default number of lanes. Most disks perform best with one stream of syncs; use more lanes for more disks."""

OFFSETS_PER_DELETE: Final = 50_000
"""Maximum offsets per DELETES frame."""

TRIM_FRAMES: Final = 10_000
"""Frames removed from the index per batch."""

_COLUMNS_ONLY_VALUES: Final = 3
_SYNCED: Final = Durability.SYNCED


class SegmentEngine(SegmentReader):
    """A `StorageAdapter` over segment files."""

    engine = Engine.SEGMENT

    def __init__(
        self,
        store: ManagedStore,
        shards: Shards,
        offsets: Offsets,
        clock_ms: Clock,
        leaders: Leaders | None = None,
        *,
        path: Path,
        quarantine: Path | None = None,
        lanes: int = LANES,
        options: LaneOptions | None = None,
        random_u32: Callable[[], int] | None = None,
        progress: Progress | None = None,
        in_loop: bool = False,
    ) -> None:
        """Open the log under `path` and bring the index up to date. Unreadable bytes are moved to `quarantine`.

        `in_loop`: the event loop that writes may also sync, see `log/lane_sync.py`."""
        super().__init__(store, shards, offsets, clock_ms, leaders)
        self._in_loop = in_loop
        self._managed = store
        self._rows = RowPrefetch(store)
        self._states: Recent[SegmentShard] = Recent(self.load_state, SHARDS_LOADED_MAX)
        self.damages: list[Damage] = []
        self.losses: list[Loss | LostBytes | LostTail] = []
        self.faults: list[str] = []
        """One message for each damage to durable bytes and each loss."""
        self.quarantined: list[Path] = []
        self._markers: list[bytes] = []
        """Keys of marker rows: changes that the index on disk may still lack."""
        self._marker_lock = threading.RLock()
        self._closed = False
        self.index = StreamIndex(store)
        random_u32 = random_u32 or (lambda: secrets.randbits(32))
        self.lanes: list[LogLane] = []
        self._open_lanes(path, quarantine or path.parent / "quarantine", lanes, options, random_u32, progress)
        self._cleaner = SegmentCleaner(self, store, shards)

    def _open_lanes(
        self,
        path: Path,
        quarantine: Path,
        lanes: int,
        options: LaneOptions | None,
        random_u32: Callable[[], int],
        progress: Progress | None,
    ) -> None:
        self.ceilings = Ceilings(path.parent)
        opened = []
        for number in range(max(lanes, lanes_present(path), self.ceilings.ends.lanes())):
            lane = path / f"{number:04d}"
            end = self.ceilings.ends.lane(number)
            opened.append(Lane.open(lane, clock_ms=self._clock_ms, random_u32=random_u32, options=options, end=end))
        logs = recover(self, self._store, opened, quarantine, progress, LostOffsets(self, self._store, self._shards))
        self.ceilings.ends.start(log.synced_position for log in logs)
        # States loaded during recovery lack the open transactions, so load them again.
        self._states = Recent(self.load_state, SHARDS_LOADED_MAX)
        self.lanes = [LogLane(number, log, self.index.lock, in_loop=self._in_loop) for number, log in enumerate(logs)]
        self._finish()

    def place(self, spec: ShardSpec) -> ShardSpec:
        lane = hash64(spec.topic_id.bytes + spec.partition.to_bytes(4, "big")) % len(self.lanes)
        return msgspec.structs.replace(spec, lane=lane)

    def plan_delete(self, batch: Batch, shard: int) -> None:
        state = self._states.get(shard)
        with state.lock:
            state.is_deleted = True
            # Without an index row it has never had a frame.
            self._shards.plan_delete(batch, shard, derived=self.index.shard_row(shard) is not None)

    def revive(self, shard: int) -> None:
        state = self._states.get(shard)
        with state.lock:
            state.is_deleted = False

    def forget(self, *shards: int) -> None:
        for shard in shards:
            self._shards.forget(shard)
            self._states.forget(shard)
            self._cleaner.forget(shard)
        self._clear(self._shards.with_derived(shards))

    def shard_info(self, shard: int) -> ShardInfo:
        meta = self._own(shard)
        state = self._states.get(shard)
        with state.lock:
            return ShardInfo(
                meta, state.start_offset, state.stable_offset, state.next_offset, state.kept, state.size_bytes
            )

    def batch_write(self, shard: int, records: Records, durability: Durability | None = None) -> Append:
        if self._leaders.leader_of(shard) != HERE:
            self._require_leader(shard)
        state = self._states.get(shard)
        config = state.config
        level = config.durability if durability is None else durability
        now_ms = self._clock_ms()
        batch = as_columns(records, now_ms, config.record_bytes_max)
        terms = NO_TERMS if len(batch.extents) == _COLUMNS_ONLY_VALUES else IndexTerms(batch, config)
        with state.lock:
            if state.is_deleted:
                state.require()
            base = state.next_offset
            last = base + batch.count - 1
            if last >= state.ceiling:
                self.ceilings.raise_above(state, last)
            lane = self._append(state, batch, base, last, now_ms, terms, level is _SYNCED)
            state.next_offset = last + 1
            if level is not _SYNCED and not state.unsynced:
                # No earlier write is pending, so the records are visible at once and need no sync entry.
                state.high_watermark = last + 1
                return Append(shard, base, last, level)
            sequence = lane.watermarks.written(state, base, level)
        lane.watermarks.throttle()
        return Append(shard, base, last, level, sequence)

    def append_kafka(
        self, shard: int, raw: bytes, durability: Durability | None = None, records: ColumnBatch | None = None
    ) -> Append:
        """Append a Kafka batch unchanged, except for offsets and append time. A key index needs its `records`."""
        self._require_leader(shard)
        state = self._states.get(shard)
        config = state.config
        if len(raw) > max(BATCH_BYTES_MAX, config.record_bytes_max):
            raise LimitExceededError(f"a batch of {len(raw)} bytes exceeds the limit of {BATCH_BYTES_MAX}; send less")
        level = config.durability if durability is None else durability
        now_ms = self._clock_ms()
        batch = incoming(raw, now_ms, is_append_time=config.append_time)
        if records is None and config.index_keys and batch.count:
            records = columns(batch.body, config.record_bytes_max)
        terms = kafka_terms(raw, records if config.index_keys else None, config)
        with state.lock:
            state.require()
            base = state.next_offset
            last = base + batch.offsets - 1
            if last >= state.ceiling:
                self.ceilings.raise_above(state, last)
            lane = self._append(state, batch.placed(base), base, last, now_ms, terms, level is _SYNCED, KAFKA)
            if terms.flags & OF_TRANSACTIONS:
                state.follow(terms.tag_mask, base, bool(terms.flags & IS_MARKER))
            state.next_offset = last + 1
            sequence = lane.watermarks.written(state, base, level)
        lane.watermarks.throttle()
        return Append(shard, base, last, level, sequence, now_ms if config.append_time else -1)

    def append_at(self, shard: int, records: Sequence[StoredRecord], next_offset: int) -> Append:
        self._require_leader(shard)
        meta = self._own(shard)
        config = meta.config
        if records:
            check_batch(records, config.record_bytes_max)
        now_ms = self._clock_ms()
        state = self._states.get(shard)
        lane = self.lanes[state.lane]
        with state.lock:
            state.require()
            base = state.next_offset
            check_placed(records, base, next_offset)
            if base < next_offset and next_offset > state.ceiling:
                self.ceilings.raise_above(state, next_offset - 1)
            for run in offset_runs(base, records):
                begin = max(state.next_offset, run[-1].offset - DELTA_MAX)
                batch = ColumnBatch.from_records(run, now_ms, [record.offset - begin for record in run])
                self._append(state, batch, begin, run[-1].offset, now_ms, IndexTerms(batch, config))
                state.next_offset = run[-1].offset + 1
            if state.next_offset < next_offset:
                # No frame covers trailing offsets without records.
                self._shards.update(shard, next_offset_min=next_offset)
                state.next_offset = next_offset
                self._store.sync()
            sequence = lane.watermarks.written(state, base, Durability.SYNCED)
        lane.watermarks.throttle()
        return Append(shard, base, next_offset - 1, Durability.SYNCED, sequence)

    def _append(
        self,
        state: SegmentShard,
        batch: ColumnBatch | KafkaBatch,
        base: int,
        last: int,
        now_ms: int,
        terms: IndexTerms,
        waits: bool = False,
        kind: int = COLUMNAR,
    ) -> LogLane:
        """Append a frame of records to the log and the index. Return its lane. The caller holds the shard's lock.

        With `waits`, the frame is confirmed only after a sync, so the sync may write it.
        """
        lane = self.lanes[state.lane]
        log, index = lane.log, self.index
        count, body = batch.count, batch.body
        time_min_ms = batch.timestamp_min_ms
        time_max_ms = batch.timestamp_max_ms
        expire_ms = NEVER
        if EXPIRIES in batch.extents and isinstance(batch, ColumnBatch):
            expire_ms = first_expiry(batch, base)
        flags, frame_flags = terms.flags, 0
        if waits and state.config.durability is not _SYNCED:
            flags, frame_flags = flags | IS_AWAITED, AWAITED
        parts = encode_frame(
            log.seed,
            kind,
            state.number,
            base,
            count,
            last - base,
            time_min_ms,
            time_max_ms,
            now_ms,
            body,
            frame_flags,
        )
        size = frame_bytes(len(body))
        with lane.lock:
            if now_ms >= lane.index_write_due_ms or index.rows >= index.rows_max:
                lane.write_index_rows(index, now_ms)
            position = log.append(parts, size, now_ms, waits)
            segment = log.active_start
            # Equals Entry(...) without the overhead of the generated constructor.
            entry = tuple.__new__(
                Entry, (last, base, position, size, count, time_max_ms, now_ms, terms.tag_mask, expire_ms, flags)
            )
            index.append(lane.number, segment, state, entry, time_min_ms, terms)
            if position == segment and position:
                lane.sync_soon()
        return lane

    def wait(self, append: Append) -> None:
        if append.durability is Durability.SYNCED:
            self._lane_of(append.shard).watermarks.wait(append.sequence)

    def confirmed(self, append: Append) -> asyncio.Future[None]:
        if append.durability is Durability.SYNCED:
            return self._lane_of(append.shard).tick.durable()
        return done()

    def call_when_confirmed(self, append: Append, callback: Callable[[BaseException | None], None]) -> None:
        """As `confirmed` for a `synced` append, but with a callback (see `TickSync.call_when_durable`)."""
        self._lane_of(append.shard).tick.call_when_durable(callback)

    def delete_by_key(self, shard: int, key: bytes) -> int:
        self._require_leader(shard)
        config = self._own(shard).config
        state = self._states.get(shard)
        with state.lock:
            state.require()
            wanted = wanted_records(None, key)
            assert wanted is not None
            found: list[int] = []
            end = state.stable_offset
            entries = self._candidates(shard, state.start_offset, end, config, None, key)
            for entry, batch in self._frames(state, entries, end, None, records_of):
                if batch is not None:
                    marks = wanted.marks(batch)
                    found += [offset_at(batch, entry.base_offset, at) for at, mark in enumerate(marks) if mark]
            gone = self.delete_offsets(state, [at for at in found if state.start_offset <= at < end])
        self.lanes[state.lane].watermarks.wait_all()
        return gone

    def delete_by_offset(self, shard: int, offsets: Sequence[int]) -> int:
        self._require_leader(shard)
        self._own(shard)
        state = self._states.get(shard)
        with state.lock:
            state.require()
            wanted = [at for at in sorted(set(offsets)) if state.start_offset <= at < state.high_watermark]
            gone = self.delete_offsets(state, self._present(state, wanted))
        self.lanes[state.lane].watermarks.wait_all()
        return gone

    def _present(self, state: SegmentShard, wanted: list[int]) -> list[int]:
        """Return those of the ascending offsets for which a frame holds a record."""
        found: list[int] = []
        at = 0
        while at < len(wanted):
            entry = next(self.index.entries(state.number, wanted[at]), None)
            if entry is None:
                break
            here = [each for each in wanted[at:] if each <= entry.last_offset]
            inside = [each for each in here if each >= entry.base_offset]
            if not entry.is_dense and inside:
                batch = self.load(state, entry)
                deltas = () if batch is None else (batch.deltas() or range(batch.count))
                held = {entry.base_offset + delta for delta in deltas}
                inside = [each for each in inside if each in held]
            found += inside
            at += len(here)
        return found

    def delete_offsets(self, state: SegmentShard, offsets: list[int]) -> int:
        """Delete existing records with DELETES frames, written but not synced. The caller holds the shard's lock."""
        gone = 0
        while offsets:
            some = [each for each in offsets[:OFFSETS_PER_DELETE] if each - offsets[0] <= DELTA_MAX]
            offsets = offsets[len(some) :]
            gone += self.append_deletes(state, some, self._clock_ms())
        return gone

    def append_deletes(self, state: SegmentShard, offsets: list[int], stored_ms: int) -> int:
        """Append a DELETES frame. Return how many records were newly deleted. The caller holds the shard's lock."""
        lane = self.lanes[state.lane]
        parts = encode_deletes(lane.log.seed, state.number, offsets, stored_ms)
        header = decode_header(lane.log.seed, parts[0])
        with self.log_change(lane, parts, header, garbage=0) as position:
            return self.index.delete(
                state,
                offsets,
                position,
                header.size_bytes,
                lambda entry: self.load(state, entry),
                lane.log.segment_start,
            )

    def delete_records_before(self, shard: int, offset: int) -> int:
        self._require_leader(shard)
        config = self._own(shard).config
        state = self._states.get(shard)
        self._cleaner.settle_trimmed(state, min(offset, state.high_watermark))
        with state.lock:
            state.require()
            self.trim(state, config, min(offset, state.high_watermark))
            return state.start_offset

    def trim(self, state: SegmentShard, config: ShardConfig, start: int) -> int:
        """Raise the log start offset, durably. Return how many records that removes. Call under the shard's lock."""
        if start <= state.start_offset:
            return 0
        number = state.number
        lane = self.lanes[state.lane]
        now_ms = self._clock_ms()
        with self._marker_lock:
            with self._shards.exclusive():
                batch = Batch()
                self._shards.batch_update(batch, number, start_offset=start)
                batch.put(Family.SHARDS, stream_keys.trimmed_shard_key(number), b"")
                self._store.write(batch)
                self._shards.forget(number)
            self._store.sync()
            gone = self._announce_start(lane, state, config, start, now_ms)
            self._markers.append(stream_keys.trimmed_shard_key(number))
        return gone

    def _announce_start(self, lane: LogLane, state: SegmentShard, config: ShardConfig, start: int, now_ms: int) -> int:
        with lane.lock, self.index.lock:
            self.index.flush()
            gone = sum(self._follow_start(lane, state, config, step) for step in self._steps(state, start))
            parts = encode_frame(lane.log.seed, TRIM, state.number, start, 0, 0, 0, 0, now_ms, b"")
            with self.log_change(lane, parts, decode_header(lane.log.seed, parts[0])):
                gone += self._follow_start(lane, state, config, start)
        return gone

    def _follow_start(self, lane: LogLane, state: SegmentShard, config: ShardConfig, start: int) -> int:
        """Remove frames below a durable start offset from the index. The caller holds the index lock."""
        return self.index.trim(state, start, config, lambda entry: self.load(state, entry), lane.log.segment_start)

    def _steps(self, state: SegmentShard, start: int) -> list[int]:
        """Return intermediate offsets up to `start`, which bound the size of the index batches."""
        steps: list[int] = []
        for count, entry in enumerate(self.index.entries(state.number, 0), 1):
            if entry.last_offset >= start:
                break
            if count % TRIM_FRAMES == 0:
                steps.append(entry.last_offset + 1)
        return steps

    @contextmanager
    def log_change(self, lane: LogLane, parts: tuple[bytes, ...], header: Header, garbage: int = -1) -> Iterator[int]:
        """Append a frame other than a plain append and yield its position. The body applies its change to the index.

        `garbage` is as in `StreamIndex.note`; the default is the whole frame.
        """
        index = self.index
        size = header.size_bytes
        with lane.lock, index.lock:
            index.flush()
            position = lane.log.append(parts, size)
            note(index, lane.number, lane.log.active_start, position, header, size if garbage < 0 else garbage)
            yield position

    def retain(self, now_ms: int) -> int:
        self.ceilings.sync()
        return self._cleaner.step(now_ms)

    def reclaim(self, is_enough: Callable[[], bool]) -> None:
        """Do a bounded part of reclaiming the space of deleted records. Do not call it while `retain` runs."""
        self._cleaner.reclaim(is_enough)

    def checkpoint(self) -> None:
        """Sync the log and flush the index, so that the next start has nothing to replay."""
        with self._marker_lock:
            for lane in self.lanes:
                lane.log.sync()
            self.index.flush_to_disk()
            if self._markers:
                batch = Batch()
                for marker in self._markers:
                    batch.delete(Family.SHARDS, marker)
                self._store.write(batch)
                self._markers.clear()

    def reconfigured(self, shard: int) -> None:
        state = self._states.get(shard)
        with state.lock:
            state.config = self._own(shard).config

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Close failed lanes too, because their descriptors keep the space of deleted segments.
        with ExitStack() as logs, ExitStack() as watermarks:
            logs.push(self.ceilings.on_close)
            for lane in self.lanes:
                logs.callback(lane.log.close)
                watermarks.callback(lane.watermarks.close)
            for lane in self.lanes:
                lane.watermarks.wait_all()
            watermarks.close()
            self.checkpoint()

    def _clear(self, deleted: list[tuple[int, int]]) -> None:
        """Remove deleted shards, given with their lanes, from the index. Their frames become garbage."""
        with self._marker_lock:
            if deleted:
                self._store.sync()
            for shard, number in deleted:
                lane = self.lanes[number]
                parts = encode_frame(lane.log.seed, DROP, shard, 0, 0, 0, 0, 0, self._clock_ms(), b"")
                with self.log_change(lane, parts, decode_header(lane.log.seed, parts[0])):
                    self.index.drop(shard, lane.number, lane.log.segment_start)
                self._markers.append(stream_keys.deleted_shard_key(shard))

    def _finish(self) -> None:
        """Apply the changes to the index that marker rows left from the previous run."""
        self._clear(self._shards.deleted(Engine.SEGMENT))
        for key, _ in list(self._store.scan(Family.SHARDS, *key_parts.prefix_range(b"Y"))):
            with suppress(ShardNotFoundError):
                state = self._states.get(stream_keys.decode_trimmed_shard_key(key))
                lane_of = self.lanes[state.lane]
                with lane_of.lock, self.index.lock:
                    self.index.flush()
                    self._follow_start(lane_of, state, self.config_of(state.number), state.start_offset)
            self._markers.append(key)

    def _lane_of(self, shard: int) -> LogLane:
        return self.lanes[self._states.get(shard).lane]

    def sync(self) -> None:
        for lane in self.lanes:
            lane.watermarks.wait_all()
        self._sync_rows()

    def load_state(self, shard: int) -> SegmentShard:
        # Bypass the row cache, because the state itself is cached.
        raw = self._rows.get(shard)
        meta = self._own(shard) if raw is None else ShardMeta.decode(shard, raw)
        if meta.engine is not self.engine:
            meta = self._own(shard)
        state = SegmentShard(meta, self.index.shard_row(shard))
        if self.index.outcomes.is_used:
            state.undecided = self.index.outcomes.undecided(shard)
        if self.lanes:
            # During recovery the index is still behind the log.
            drop_lost_batches(self._store, shard, state.next_offset)
        return state
