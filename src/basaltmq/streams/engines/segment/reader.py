"""The reading half of the segment engine: frames found through the index, read in runs, handed out whole.

    read   index entries from the offset on ─ pread runs of frames ─ checksums ─ frames, not records

Readers see what is decided: they end where the first transaction begins that is not, and pass over the frames of those
that were aborted, and over the markers. Only Kafka's own reads go on to the high watermark.

Readers take no lock of the writer's but the shard's, for a moment. A read that meets cleaning (its segment is gone)
looks into the index again, which points at the copy. A damaged frame is an error that names its shard and offsets.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise
from typing import Final, TypeVar

from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    DamagedFrameError,
    LimitExceededError,
    StoreStalledError,
    UnsupportedCodecError,
)
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.kafka import KafkaHeader
from basaltmq.log.batches.kafka_run import LARGE_BYTES
from basaltmq.log.batches.run import Cut
from basaltmq.log.frame import HEADER_BYTES, KAFKA, Header, check_body, decode_header, records_of
from basaltmq.log.lane import Lane
from basaltmq.log.lane_sync import LaneSync
from basaltmq.log.segment import SegmentGoneError
from basaltmq.store.api import Store
from basaltmq.streams.adapter import (
    BATCH_RECORDS_MAX,
    READ_BYTES,
    READ_RECORDS,
    Budget,
    Clock,
    Otherwise,
    check_offset,
    hash64,
)
from basaltmq.streams.batch_cursor import BatchCursor, Cursors
from basaltmq.streams.engines.base import EngineBase
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.index.rows import IN_TRANSACTION, Entry
from basaltmq.streams.engines.segment.kafka import Ahead, KafkaRead, producers_batches, read_batches
from basaltmq.streams.engines.segment.read import (
    READ_RUN_BYTES,
    Bookmarks,
    FramesRead,
    Place,
    Taker,
    Wanted,
    find_cutter,
    keep_freed_memory,
)
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.engines.segment.tick import TickSync
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import Recent, ShardConfig, Shards
from basaltmq.streams.watermark import Watermarks

T = TypeVar("T")
Opened = TypeVar("Opened")

_UNREADABLE: Final = (CorruptionError, LimitExceededError, UnsupportedCodecError)
"""Why the records of a frame cannot be read. Kafka clients get such a batch as it is; other readers pass over it."""

_log: Final = logging.getLogger(__name__)

NEIGHBOURS_SEEN: Final = 16
"""Frames a reader looks at in the index before it takes it that the shard's lie side by side: half of a run."""

RETRIES: Final = 16
"""A read that meets cleaning looks into the index again; each time one more segment must have gone."""


DAMAGE_LOGGED_MAX: Final = 1_000
"""Damaged frames remembered as logged, about 100 bytes each. Past it, frames are logged again."""


PORTION_MS: Final = 50
"""Index rows of so long are written together: the append that does it waits for 0.2 ms where there are a thousand a
second, and for 6 ms if they are left to the index's limit."""

PORTION_ROWS_MAX: Final = 512
"""More of them in that time are left to the limit: at such a rate small portions cost every append a twentieth."""


class LogLane:
    """A lane with what the engine keeps beside it."""

    __slots__ = ("lock", "log", "number", "portion_due_ms", "tick", "watermarks")

    def __init__(self, number: int, log: Lane, lock: threading.RLock, *, in_loop: bool = False) -> None:
        self.number = number
        self.log = log
        self.lock = lock
        """The index's: an append goes to both, and a lock more costs as much as its entry."""
        group = partial(LaneSync, log=log, tidy=log.tidy) if in_loop else None
        self.watermarks = Watermarks(log, log.secure, log.tidy, group)
        self.tick = TickSync(self.watermarks.group)
        self.portion_due_ms = 0

    def write_portion(self, index: StreamIndex, now_ms: int) -> None:
        """Write the index rows that were gathered, if few or at the limit. Before an append, under the lock."""
        # Frames that await a sync would be written to their segment first, whose sync takes longer than the ring's.
        if index.rows < index.rows_max:
            if self.watermarks.is_awaited:
                return
            if index.rows <= PORTION_ROWS_MAX:
                # A store that is behind gets another portion later; there is room.
                with contextlib.suppress(StoreStalledError):
                    index.flush()
        else:
            index.flush()
        self.portion_due_ms = now_ms + PORTION_MS

    def roll_if_old(self) -> None:
        """Roll a segment past its age. Under the lock: an append reads `active_start` after its position."""
        with self.lock:
            self.log.roll_if_old()

    def sync_soon(self) -> None:
        """Have complete segments made durable, whether anybody waits for it or not, so that at most a few are not."""
        threading.Thread(target=self._sync_quietly, name="basalt-seal", daemon=True).start()

    def _sync_quietly(self) -> None:
        # A failure has poisoned the lane, which the next append finds out.
        with contextlib.suppress(BasaltError):
            self.log.sync()

    def segment_of(self, position: int) -> int:
        """Where the segment that holds a position begins; -1 if it is gone."""
        try:
            return self.log.segment_at(position).start
        except SegmentGoneError:
            return -1


class SegmentReader(EngineBase):
    """Reads of shards in segment files. The engine that writes them, or a view of another process's, fills it in."""

    index: StreamIndex
    lanes: list[LogLane]
    _states: Recent[SegmentShard]

    def __init__(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders | None = None
    ) -> None:
        super().__init__(store, shards, offsets, clock_ms, leaders)
        self.bookmarks = Bookmarks()
        self._damage_logged: set[tuple[int, int]] = set()
        """(lane, position) of damaged frames that the log names. A consumer may retry one for ever."""
        self.cursors = Cursors()
        keep_freed_memory()

    def cut(self, raw: bytes) -> Cut | None:
        """How parts of what was read are given to the checksum without a copy, where there is a way to."""
        cutter = find_cutter()
        return None if cutter is None else cutter(raw)

    def log_bytes(self) -> int:
        """Bytes that the segments hold."""
        return sum(segment.size_bytes for lane in self.lanes for segment in lane.log.segments())

    def state_of(self, shard: int) -> SegmentShard:
        return self._states.get(shard)

    def config_of(self, shard: int) -> ShardConfig:
        return self._own(shard).config

    def read_by_offset(
        self, shard: int, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> FramesRead:
        return self._read(shard, offset, max_records, max_bytes)

    def read_by_tag(
        self, shard: int, tag: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> FramesRead:
        return self._read(shard, offset, max_records, max_bytes, tag=tag)

    def read_by_key(
        self, shard: int, key: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> FramesRead:
        return self._read(shard, offset, max_records, max_bytes, key=key)

    def read_kafka(
        self,
        shard: int,
        offset: int,
        max_bytes: int = READ_BYTES,
        *,
        is_decided: bool = False,
        ahead: Ahead | None = None,
    ) -> KafkaRead:
        """What there is up to the high watermark, as Kafka record batches; or up to the first that is not decided.

        `ahead`: what `take_ahead` found, which is used if it fits.
        """
        self._own(shard)
        return self._retried(lambda: read_batches(self, shard, offset, max_bytes, is_decided=is_decided, ahead=ahead))

    def producers_batches(self, shard: int, offset: int) -> list[KafkaHeader]:
        """Who appended what from `offset` on, of those who number their batches."""
        self._own(shard)
        return self._retried(lambda: producers_batches(self, shard, offset))

    def now_ms(self) -> int:
        return self._clock_ms()

    def _read(
        self,
        shard: int,
        offset: int,
        max_records: int,
        max_bytes: int,
        *,
        tag: bytes | None = None,
        key: bytes | None = None,
    ) -> FramesRead:
        return self._retried(lambda: self._read_once(shard, offset, Budget(max_records, max_bytes), tag, key))

    def _retried(self, read: Callable[[], T]) -> T:
        for attempt in range(RETRIES):
            try:
                return read()
            except SegmentGoneError:
                # Cleaning moved the frame after its entry was read; the index knows where to.
                if attempt == RETRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _read_once(self, shard: int, offset: int, budget: Budget, tag: bytes | None, key: bytes | None) -> FramesRead:
        meta = self._own(shard)
        state = self._states.get(shard)
        with state.lock:
            start, end, deleted = state.start_offset, state.stable_offset, state.deleted
        check_offset(shard, offset, start, end)
        if offset >= end:
            return FramesRead([], offset, start, end)
        taker = Taker(budget, self._clock_ms(), wanted_records(tag, key), find_cutter())
        next_offset = end
        if tag is None and key is None and not deleted and not state.rewritten:
            offset = self._walk(state, taker, offset, end)
            if offset >= end or taker.is_full or budget.records_left <= 0:
                return FramesRead(taker.parts, offset, start, end)
        try:
            entries = self._candidates(shard, offset, end, meta.config, tag, key)
            for entry, batch in self._opened(state, entries, offset, end, budget):
                if budget.scans_left <= 0 or budget.records_left <= 0:
                    next_offset = max(offset, entry.base_offset)
                    break
                budget.scans_left -= 1
                if batch is None:
                    continue
                gone = self.index.deleted(shard, entry.base_offset, entry.last_offset) if deleted else ()
                if not self._take(state, taker, entry, batch, offset, end, gone):
                    assert taker.stopped_at is not None
                    next_offset = taker.stopped_at
                    break
        except DamagedFrameError as error:
            # What comes before the damage is given; the next read begins with it, and says so.
            if not taker.parts:
                raise
            next_offset = error.base_offset
        return FramesRead(taker.parts, next_offset, start, end)

    def _walk(self, state: SegmentShard, taker: Taker, offset: int, end: int) -> int:
        """Take plain frames as long as there are any, neighbours without asking the index; the offset reached."""
        log = self.lanes[state.lane].log
        place = self.bookmarks.take(state.number, offset)
        if place is not None:
            offset = self._walk_from(place, log, state, taker, end)
        while offset < end and taker.reached is None:
            entries = self.index.entries(state.number, offset)
            first = next(entries, None)
            if first is None or first.base_offset > offset:
                break
            if first.base_offset < offset:
                # The last read ended inside a frame.
                _, batch = next(self._opened(state, iter([first]), offset, end, None))
                if batch is not None and not self._take(state, taker, first, batch, offset, end, ()):
                    assert taker.stopped_at is not None
                    return taker.stopped_at
                offset = first.last_offset + 1
                continue
            ahead = [first, *islice(entries, taker.frames_wanted(first, NEIGHBOURS_SEEN) - 1)]
            if len(ahead) < 2:
                break
            if all(after.position == each.position + each.size_bytes for each, after in pairwise(ahead)):
                place = Place(offset, first.position, first.size_bytes, first.records)
                reached = self._walk_from(place, log, state, taker, end)
            else:
                reached = taker.pick(log, state.number, chain(ahead, entries), offset, end)
            if reached == offset or taker.is_over:
                return reached
            offset = reached
        return offset

    def _opened(
        self, state: SegmentShard, entries: Iterator[Entry], offset: int, end: int, budget: Budget | None
    ) -> Iterator[tuple[Entry, ColumnBatch | BatchCursor | None]]:
        """The frames of entries below `end`: columns, or a cursor into a Kafka batch, none if it was aborted."""
        first = next(entries, None)
        if first is None:
            return
        cursor = self.cursors.take(state.number, first.position, offset) if first.base_offset < offset else None
        if cursor is None:
            entries = chain((first,), entries)
        elif self.is_seen(state, first):
            yield first, cursor
        yield from self._frames(state, entries, end, budget, self._unopened)

    @staticmethod
    def _unopened(header: Header, body: bytes, record_bytes_max: int) -> ColumnBatch | BatchCursor | None:
        if header.kind == KAFKA and header.records:
            return BatchCursor(body, record_bytes_max)
        return records_of(header, body, record_bytes_max)

    def _take(
        self,
        state: SegmentShard,
        taker: Taker,
        entry: Entry,
        batch: ColumnBatch | BatchCursor,
        offset: int,
        end: int,
        deleted: Sequence[int],
    ) -> bool:
        """Take records of one frame; False if the read ends inside it."""
        if isinstance(batch, ColumnBatch):
            return taker.take(entry.base_offset, batch, offset, end, deleted)
        try:
            is_whole = taker.take_records(batch, offset, end, deleted)
        except _UNREADABLE as error:
            raise self.damaged(state, entry, error, first_offset=max(offset, batch.next_offset)) from error
        if batch.is_paused:
            self.cursors.leave(state.number, entry.position, batch)
        return is_whole

    def _walk_from(self, place: Place, log: Lane, state: SegmentShard, taker: Taker, end: int) -> int:
        reached = taker.walk(log, state.number, place, end)
        if taker.reached is not None:
            self.bookmarks.leave(state.number, taker.reached)
        return reached

    def _candidates(
        self, shard: int, offset: int, end: int, config: ShardConfig, tag: bytes | None, key: bytes | None
    ) -> Iterator[Entry]:
        """Frames from the one that holds `offset` on that may have what is looked for."""
        if key is not None and config.index_keys:
            return self._held(b"K", shard, hash64(key), offset)
        if tag is not None and config.index_tags:
            return self._held(b"G", shard, hash64(tag), offset)
        entries = self.index.entries(shard, offset)
        if tag is not None:
            bit = 1 << (hash64(tag) & 63)
            return (entry for entry in entries if entry.tag_mask & bit)
        return entries

    def _held(self, kind: bytes, shard: int, hashed: int, offset: int) -> Iterator[Entry]:
        for last_offset in self.index.holders(kind, shard, hashed, offset):
            entry = self.index.entry(shard, last_offset)
            if entry is not None:
                yield entry

    def _frames(
        self,
        state: SegmentShard,
        entries: Iterator[Entry],
        end: int,
        budget: Budget | None,
        opened: Callable[[Header, bytes, int], Opened],
    ) -> Iterator[tuple[Entry, Opened | None]]:
        """The frames of entries below `end`; neighbours in the log are read together, as far as the budget goes."""
        run: list[Entry] = []
        size = records = 0
        bytes_max, records_max = READ_RUN_BYTES, BATCH_RECORDS_MAX
        for entry in entries:
            if entry.base_offset >= end:
                break
            if run and (
                entry.position != run[0].position + size
                or size + entry.size_bytes > bytes_max
                or records >= records_max
            ):
                yield from self._read_run(state, run, size, opened)
                run, size, records = [], 0, 0
            if budget is not None and not run:
                bytes_max, records_max = min(READ_RUN_BYTES, budget.bytes_left), budget.records_left
            run.append(entry)
            size += entry.size_bytes
            records += entry.records
        if run:
            yield from self._read_run(state, run, size, opened)

    def _read_run(
        self,
        state: SegmentShard,
        run: list[Entry],
        size: int,
        opened: Callable[[Header, bytes, int], Opened],
        *,
        is_whole: bool = False,
    ) -> Iterator[tuple[Entry, Opened | None]]:
        """The records of frames; those of aborted ones only if asked for."""
        log = self.lanes[state.lane].log
        first = run[0].position
        raw = log.read(first, size)
        for entry in run:
            at = entry.position - first
            if at >= len(raw):
                # Neighbours, but in the next segment.
                first, at = entry.position, 0
                raw = log.read(first, size)
            try:
                header = decode_header(log.seed, raw, at)
                body = raw[at + HEADER_BYTES : at + HEADER_BYTES + header.body_bytes]
                check_body(header, body)
                if header.shard != state.number or header.last_offset != entry.last_offset:
                    raise CorruptionError("the index points to another frame")
                batch = None
                if is_whole or self.is_seen(state, entry):
                    batch = opened(header, body, state.config.record_bytes_max)
            except _UNREADABLE as error:
                raise self.damaged(state, entry, error) from error
            yield entry, batch

    def damaged(
        self, state: SegmentShard, entry: Entry, error: BasaltError, *, first_offset: int | None = None
    ) -> DamagedFrameError:
        """The error for a frame, or for its rest, that cannot be read. Logs lane and position once per frame."""
        log = self.lanes[state.lane].log
        place = (state.lane, entry.position)
        if place not in self._damage_logged:
            if len(self._damage_logged) >= DAMAGE_LOGGED_MAX:
                self._damage_logged.clear()
            self._damage_logged.add(place)
            _log.error(
                "damaged frame in lane %s at position %d (%d bytes): shard %d, offsets %d to %d: %s",
                log.path,
                entry.position,
                entry.size_bytes,
                state.number,
                entry.base_offset,
                entry.last_offset,
                error,
            )
        reason = f"{log.path} at position {entry.position}: {error}"
        base = entry.base_offset if first_offset is None else first_offset
        return DamagedFrameError(state.number, min(base, entry.last_offset), entry.last_offset, reason)

    def load(self, state: SegmentShard, entry: Entry) -> ColumnBatch | None:
        """The records of one frame, aborted or not."""
        return next(self._read_run(state, [entry], entry.size_bytes, records_of, is_whole=True))[1]

    def is_seen(self, state: SegmentShard, entry: Entry) -> bool:
        """Is the frame part of no transaction, or of one that was committed?"""
        return not entry.flags & IN_TRANSACTION or not self.index.outcomes.is_hidden(state.number, entry)

    def seen_of(self, state: SegmentShard, entry: Entry) -> ColumnBatch | None:
        """The records of one frame, none if it was aborted."""
        return next(self._read_run(state, [entry], entry.size_bytes, records_of))[1]

    def frame_of(self, state: SegmentShard, entry: Entry) -> tuple[Header, bytes]:
        """One frame as it lies in the log, checked."""
        log = self.lanes[state.lane].log
        if entry.size_bytes > LARGE_BYTES:
            header = decode_header(log.seed, log.read(entry.position, HEADER_BYTES))
            body = log.read(entry.position + HEADER_BYTES, header.body_bytes)
        else:
            raw = log.read(entry.position, entry.size_bytes)
            header = decode_header(log.seed, raw)
            body = raw[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        check_body(header, body)
        return header, body

    def get_offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: Otherwise) -> int:
        return self._retried(lambda: self._offset_by_timestamp(shard, timestamp_ms, otherwise))

    def _offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: Otherwise) -> int:
        config = self._own(shard).config
        state = self._states.get(shard)
        with state.lock:
            start, end, deleted = state.start_offset, state.stable_offset, state.deleted
        from_offset: int | None = start
        if config.index_times:
            from_offset = self.index.first_at_time(shard, timestamp_ms)
        if from_offset is not None:
            now_ms = self._clock_ms()
            entries = self.index.entries(shard, max(from_offset, start))
            older = (entry for entry in entries if entry.timestamp_max_ms >= timestamp_ms)
            wanted = Wanted(
                lambda each: [at >= timestamp_ms for at in each.timestamps()],
                lambda record: record.timestamp_ms >= timestamp_ms,
            )
            for entry, batch in self._frames(state, older, end, None, self._unopened):
                if batch is None:
                    continue
                gone = self.index.deleted(shard, entry.base_offset, entry.last_offset) if deleted else ()
                taker = Taker(Budget(1, 0), now_ms, wanted)
                try:
                    self._take(state, taker, entry, batch, start, end, gone)
                except DamagedFrameError:
                    # The record is in this frame, as its header says; who reads there is told what is wrong.
                    return max(start, entry.base_offset)
                if taker.parts:
                    return taker.parts[0].records()[0].offset
        return start if otherwise is Otherwise.EARLIEST else end


def wanted_records(tag: bytes | None, key: bytes | None) -> Wanted | None:
    if tag is not None:
        return Wanted(lambda batch: [tag in tags for tags in batch.tags()], lambda record: tag in record.tags)
    if key is not None:
        return Wanted(lambda batch: [key == each for each in ColumnBatch.keys(batch)], lambda record: record.key == key)
    return None
