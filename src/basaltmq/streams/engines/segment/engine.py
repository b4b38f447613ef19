"""The segment engine: records in lanes of the commit log, found through the index (SPEC B5, D2..D4).

    write   shard's lock ─ encode the frame ─ lane's lock ─ one writev ─ gather its index entry ─ Append
            at `synced` it is left to the sync, which gives the frames of all who wait to the lane's ring as one
    read    index entries from the offset on ─ pread runs of frames ─ checksums ─ frames, not records

A frame is one batch of one shard. Everything that changes what the index says is a frame in the log too: records,
deletes (DELETES), a start offset that moved (TRIM), a shard that went (DROP), copies made by cleaning. The index is
written without WAL and caught up from the log at start, from its checkpoint on; if it is missing it is built again
from the whole log, and where a power loss took unsynced frames back, so is the index (`segment_recovery`). What
cannot be derived (which shards there are, where they start) is in the shard rows, with the WAL, durable before the
index follows; a marker row beside them says until the next checkpoint that the index has to, should the TRIM or DROP
frame be lost.

Invariants: the frame is in the log before its entry is in the index; the checkpoint covers a frame only in the batch
that has its entry; a segment is deleted only when the index on disk no longer needs it. Lock order: shard, markers,
lane, index. Levels `memory` and `written` are the same here. High watermarks follow the lane's syncs.

Damage found at start is in `damages` and `losses`. A reader that meets a damaged frame can go on behind it.

Budget of a `batch_write` of 100 x 256 B as columns: 14 us for the writev, 1.6 us for the checksum, 5 us of Python with
the index's share, 1 us to write its index row later; plain records cost 60 us more to encode. Of what sixteen writers
wait for each other's sync, the disk has 0.4 to 0.5 ms (0.7 ms without the lane's ring); the rest is sixteen times 20 to
25 us and two threads that wake each other, unless the loop syncs by itself (`in_loop`). Tried and dropped: two groups
in turn, two syncs at a time, and preallocated space (the file system's journal is written all the same).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from basaltmq.durability import Durability
from basaltmq.errors import InvalidArgumentError, LimitExceededError, ShardNotFoundError
from basaltmq.log.batches.columnar import EXPIRIES, ColumnBatch
from basaltmq.log.batches.kafka import KafkaBatch, columns, incoming
from basaltmq.log.batches.record import NEVER, Record, StoredRecord
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
from basaltmq.log.lane import LaneOptions
from basaltmq.log.recovery import Damage, Loss, LostTail
from basaltmq.store.api import ManagedStore
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
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
from basaltmq.streams.engines.segment.cleaner import SegmentCleaner
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.index.rows import (
    IS_AWAITED,
    IS_MARKER,
    NO_WORDS,
    OF_TRANSACTIONS,
    Entry,
    Words,
    first_expiry,
    kafka_words,
)
from basaltmq.streams.engines.segment.producers_row import take_back
from basaltmq.streams.engines.segment.read import index_of, offset_at
from basaltmq.streams.engines.segment.reader import LogLane, SegmentReader, wanted_records
from basaltmq.streams.engines.segment.recovery import lanes_present, open_log, recover
from basaltmq.streams.engines.segment.replay import Progress, note
from basaltmq.streams.engines.segment.row_prefetch import RowsAhead
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.leaders import HERE, Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import OFFSET_MAX, Engine, Recent, ShardConfig, ShardMeta, Shards, ShardSpec
from basaltmq.streams.watermark import done

SHARDS_LOADED_MAX: Final = 16_384
"""States in memory, about 1 KB each."""

LANES: Final = 1
"""One stream of syncs per disk is what most disks do best; more lanes are for more disks."""

OFFSETS_PER_DELETE: Final = 50_000
"""Offsets in one DELETES frame."""

TRIM_FRAMES: Final = 10_000
"""Frames that leave the index in one batch."""

_COLUMNS_ONLY_VALUES: Final = 3
_SYNCED: Final = Durability.SYNCED


class SegmentEngine(SegmentReader):
    """A `StorageAdapter` on segment files."""

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
        shards_loaded_max: int = SHARDS_LOADED_MAX,
        in_loop: bool = False,
    ) -> None:
        """Open the log under `path` and bring the index up to it; what is unreadable goes to `quarantine`.

        `in_loop`: the loop that writes may sync by itself, see `lane_sync`."""
        super().__init__(store, shards, offsets, clock_ms, leaders)
        self._in_loop = in_loop
        self._managed = store
        self._shards_loaded_max = shards_loaded_max
        self._rows = RowsAhead(store)
        self._states: Recent[SegmentShard] = Recent(self.load_state, shards_loaded_max)
        self.damages: list[Damage] = []
        self.losses: list[Loss | LostTail] = []
        self.quarantined: list[Path] = []
        self._markers: list[bytes] = []
        """Rows that say what the index on disk may still lack."""
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
        logs = []
        for number in range(max(lanes, lanes_present(path))):
            lane = path / f"{number:04d}"
            logs.append(open_log(self, lane, clock_ms=self._clock_ms, random_u32=random_u32, options=options))
        recover(self, logs, quarantine, progress)
        # Those loaded while the index was brought up to date do not know what is undecided.
        self._states = Recent(self.load_state, self._shards_loaded_max)
        self.lanes = [LogLane(number, log, self.index.lock, in_loop=self._in_loop) for number, log in enumerate(logs)]
        self._finish()

    def place(self, spec: ShardSpec) -> ShardSpec:
        lane = hash64(spec.topic_id.bytes + spec.partition.to_bytes(4, "big")) % len(self.lanes)
        return msgspec.structs.replace(spec, lane=lane)

    def plan_delete(self, batch: Batch, shard: int) -> None:
        state = self._states.get(shard)
        with state.lock:
            state.is_deleted = True
            self._shards.plan_delete(batch, shard, derived=True)

    def revive(self, shard: int) -> None:
        state = self._states.get(shard)
        with state.lock:
            state.is_deleted = False

    def forget(self, shard: int) -> None:
        state = self._states.get(shard)
        self._shards.forget(shard)
        self._states.forget(shard)
        self._cleaner.forget(shard)
        self._clear(shard, self.lanes[state.lane])

    def shard_info(self, shard: int) -> ShardInfo:
        meta = self._own(shard)
        state = self._states.get(shard)
        with state.lock:
            return ShardInfo(
                meta, state.start_offset, state.stable_offset, state.next_offset, state.kept, state.size_bytes
            )

    def write(self, shard: int, record: Record, durability: Durability | None = None) -> Append:
        return self.batch_write(shard, (record,), durability)

    def batch_write(self, shard: int, records: Records, durability: Durability | None = None) -> Append:
        if self._leaders.leader_of(shard) != HERE:
            self._require_leader(shard)
        state = self._states.get(shard)
        config = state.config
        level = config.durability if durability is None else durability
        now_ms = self._clock_ms()
        batch = as_columns(records, now_ms, config.record_bytes_max)
        words = NO_WORDS if len(batch.extents) == _COLUMNS_ONLY_VALUES else Words(batch, config)
        with state.lock:
            if state.is_deleted:
                state.require()
            base = state.next_offset
            last = base + batch.count - 1
            if last >= OFFSET_MAX:
                raise InvalidArgumentError(f"shard {shard} has used up its offsets")
            lane = self._append(state, batch, base, last, now_ms, words, level is _SYNCED)
            state.next_offset = last + 1
            if level is not _SYNCED and not state.unsynced:
                # Nothing before it waits: visible at once, and no sync has to be told.
                state.high_watermark = last + 1
                return Append(shard, base, last, level)
            sequence = lane.watermarks.written(state, base, level)
        lane.watermarks.hold()
        return Append(shard, base, last, level, sequence)

    def append_kafka(self, shard: int, raw: bytes, durability: Durability | None = None) -> Append:
        """Append a Kafka record batch as it came, given its offsets; its time too where the shard says so.

        It is looked into only where the shard's keys are indexed.
        """
        self._require_leader(shard)
        state = self._states.get(shard)
        config = state.config
        if len(raw) > max(BATCH_BYTES_MAX, config.record_bytes_max):
            raise LimitExceededError(f"a batch of {len(raw)} bytes is over the limit of {BATCH_BYTES_MAX}; send less")
        level = config.durability if durability is None else durability
        now_ms = self._clock_ms()
        batch = incoming(raw, now_ms, is_append_time=config.append_time)
        has_keys = config.index_keys and batch.count
        words = kafka_words(raw, columns(batch.body, config.record_bytes_max) if has_keys else None, config)
        with state.lock:
            state.require()
            base = state.next_offset
            last = base + batch.offsets - 1
            if last >= OFFSET_MAX:
                raise InvalidArgumentError(f"shard {shard} has used up its offsets")
            lane = self._append(state, batch.placed(base), base, last, now_ms, words, level is _SYNCED, KAFKA)
            if words.flags & OF_TRANSACTIONS:
                state.follow(words.tag_mask, base, bool(words.flags & IS_MARKER))
            state.next_offset = last + 1
            sequence = lane.watermarks.written(state, base, level)
        lane.watermarks.hold()
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
            for run in offset_runs(base, records):
                begin = max(state.next_offset, run[-1].offset - DELTA_MAX)
                batch = ColumnBatch.from_records(run, now_ms, [record.offset - begin for record in run])
                self._append(state, batch, begin, run[-1].offset, now_ms, Words(batch, config))
                state.next_offset = run[-1].offset + 1
            if state.next_offset < next_offset:
                # Offsets without records at the end are in no frame.
                self._shards.update(shard, next_offset_min=next_offset)
                state.next_offset = next_offset
                self._store.sync()
            sequence = lane.watermarks.written(state, base, Durability.SYNCED)
        lane.watermarks.hold()
        return Append(shard, base, next_offset - 1, Durability.SYNCED, sequence)

    def _append(
        self,
        state: SegmentShard,
        batch: ColumnBatch | KafkaBatch,
        base: int,
        last: int,
        now_ms: int,
        words: Words,
        waits: bool = False,
        kind: int = COLUMNAR,
    ) -> LogLane:
        """A frame of records to the log and into the index; the lane it went to. Under the shard's lock.

        One that `waits` for a sync is promised to nobody before it, and may be written by it.
        """
        lane = self.lanes[state.lane]
        log = lane.log
        index = self.index
        count = batch.count
        body = batch.body
        time_min_ms = batch.timestamp_min_ms
        time_max_ms = batch.timestamp_max_ms
        expire_ms = NEVER
        if EXPIRIES in batch.extents and isinstance(batch, ColumnBatch):
            expire_ms = first_expiry(batch, base)
        flags, frame_flags = words.flags, 0
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
            if now_ms >= lane.portion_due_ms or index.rows >= index.rows_max:
                lane.write_portion(index, now_ms)
            position = log.append(parts, size, now_ms, waits)
            segment = log.active_start
            # As Entry(...) makes it, without the Python around.
            entry = tuple.__new__(
                Entry, (last, base, position, size, count, time_max_ms, now_ms, words.tag_mask, expire_ms, flags)
            )
            index.append(lane.number, segment, state, entry, time_min_ms, words)
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

    def tell_confirmed(self, append: Append, told: Callable[[BaseException | None], None]) -> None:
        """As `confirmed` of an append that asked for `synced`, by a call (see `TickSync.tell`)."""
        self._lane_of(append.shard).tick.tell(told)

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
        """Those of the offsets (ascending) that a frame holds a record for."""
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
        """Delete records that are there, as DELETES frames. Under the shard's lock; written, not synced."""
        gone = 0
        while offsets:
            some = [each for each in offsets[:OFFSETS_PER_DELETE] if each - offsets[0] <= DELTA_MAX]
            offsets = offsets[len(some) :]
            gone += self.append_deletes(state, some, self._clock_ms())
        return gone

    def append_deletes(self, state: SegmentShard, offsets: list[int], stored_ms: int) -> int:
        """One DELETES frame; how many records were not deleted before. Under the shard's lock."""
        lane = self.lanes[state.lane]
        parts = encode_deletes(lane.log.seed, state.number, offsets, stored_ms)
        header = decode_header(lane.log.seed, parts[0])
        with self.special(lane, parts, header, garbage=0) as position:
            return self.index.delete(
                state, offsets, position, header.size_bytes, lambda entry: self.load(state, entry), lane.segment_of
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
        """Move the start offset up; how many records went. Under the shard's lock; durable on return."""
        if start <= state.start_offset:
            return 0
        number = state.number
        lane = self.lanes[state.lane]
        now_ms = self._clock_ms()
        with self._marker_lock:
            with self._shards.exclusive():
                batch = Batch()
                self._shards.batch_update(batch, number, start_offset=start)
                batch.put(Family.SHARDS, keys.trimmed_shard_key(number), b"")
                self._store.write(batch)
                self._shards.forget(number)
            self._store.sync()
            gone = self._announce_start(lane, state, config, start, now_ms)
            self._markers.append(keys.trimmed_shard_key(number))
        return gone

    def _announce_start(self, lane: LogLane, state: SegmentShard, config: ShardConfig, start: int, now_ms: int) -> int:
        with lane.lock, self.index.lock:
            self.index.flush()
            gone = sum(self._follow_start(lane, state, config, step) for step in self._steps(state, start))
            parts = encode_frame(lane.log.seed, TRIM, state.number, start, 0, 0, 0, 0, now_ms, b"")
            with self.special(lane, parts, decode_header(lane.log.seed, parts[0])):
                gone += self._follow_start(lane, state, config, start)
        return gone

    def _follow_start(self, lane: LogLane, state: SegmentShard, config: ShardConfig, start: int) -> int:
        """Take what lies below a durable start offset out of the index. Under its lock."""
        return self.index.trim(
            state,
            start,
            config,
            lambda entry: self.load(state, entry),
            lane.segment_of,
            lambda entry, offset: self._below(state, entry, offset),
        )

    def _steps(self, state: SegmentShard, start: int) -> list[int]:
        """Offsets on the way to `start`, so that no batch of index rows grows without bound."""
        steps: list[int] = []
        for count, entry in enumerate(self.index.entries(state.number, 0), 1):
            if entry.last_offset >= start:
                break
            if count % TRIM_FRAMES == 0:
                steps.append(entry.last_offset + 1)
        return steps

    def _below(self, state: SegmentShard, entry: Entry, offset: int) -> int:
        """How many records of a frame lie below an offset."""
        if offset <= entry.base_offset or entry.records == 0:
            return 0
        if entry.is_dense:
            return min(entry.records, offset - entry.base_offset)
        batch = self.load(state, entry)
        return 0 if batch is None else index_of(batch, entry.base_offset, offset)

    @contextmanager
    def special(self, lane: LogLane, parts: tuple[bytes, ...], header: Header, garbage: int = -1) -> Iterator[int]:
        """Append a frame that is not a plain batch; the change of the index it stands for is made inside.

        Gives its position. `garbage` as in `StreamIndex.note`; by default the whole frame.
        """
        index = self.index
        size = header.size_bytes
        with lane.lock, index.lock:
            index.flush()
            position = lane.log.append(parts, size)
            note(index, lane.number, lane.log.active_start, position, header, size if garbage < 0 else garbage)
            yield position

    def retain(self, now_ms: int) -> int:
        return self._cleaner.step(now_ms)

    def reclaim(self, is_enough: Callable[[], bool]) -> None:
        """Free the space of deleted records: a bounded piece. Not while `retain` runs."""
        self._cleaner.reclaim(is_enough)

    def checkpoint(self) -> None:
        """Make the log durable and the index as far on disk as the log is: the next start has nothing to do."""
        with self._marker_lock:
            for lane in self.lanes:
                lane.log.sync()
            self.index.harden()
            if self._markers:
                batch = Batch()
                for marker in self._markers:
                    batch.delete(Family.SHARDS, marker)
                self._store.write(batch)
                self._markers.clear()

    def reconfigured(self, shard: int) -> None:
        """The config that writes go by is kept with the shard's state."""
        state = self._states.get(shard)
        with state.lock:
            state.config = self._own(shard).config

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A lane that failed is closed too: its descriptors keep the space of deleted segments.
        with ExitStack() as logs, ExitStack() as watermarks:
            for lane in self.lanes:
                logs.callback(lane.log.close)
                watermarks.callback(lane.watermarks.close)
            for lane in self.lanes:
                lane.watermarks.wait_all()
            watermarks.close()
            self.checkpoint()

    def _clear(self, shard: int, lane: LogLane) -> None:
        """Take a deleted shard out of the index; its frames are garbage."""
        with self._marker_lock:
            self._store.sync()
            parts = encode_frame(lane.log.seed, DROP, shard, 0, 0, 0, 0, 0, self._clock_ms(), b"")
            with self.special(lane, parts, decode_header(lane.log.seed, parts[0])):
                self.index.drop(shard, lane.number, lane.segment_of)
            self._markers.append(keys.deleted_shard_key(shard))

    def _finish(self) -> None:
        """Do to the index what shard rows asked for before the process ended."""
        for shard, lane in self._shards.deleted(Engine.SEGMENT):
            self._clear(shard, self.lanes[lane])
        for key, _ in list(self._store.scan(Family.SHARDS, *keys.prefix_range(b"Y"))):
            try:
                state = self._states.get(keys.decode_trimmed_shard_key(key))
            except ShardNotFoundError:
                pass
            else:
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
        # Past the cache of rows: what is loaded here is kept here.
        raw = self._rows.get(shard)
        meta = self._own(shard) if raw is None else ShardMeta.decode(shard, raw)
        if meta.engine is not self.engine:
            meta = self._own(shard)
        state = SegmentShard(meta, self.index.shard_row(shard))
        if self.index.outcomes.is_used:
            state.undecided = self.index.outcomes.undecided(shard)
        if self.lanes:
            # Before, the index is still behind the log.
            take_back(self._store, shard, state.next_offset)
        return state
