"""The read side of the segment engine: locates frames through the index, reads them in runs, and returns them whole.

    read   index entries from the offset on ─ pread runs of frames ─ checksums ─ frames, not records

Reads end at the last stable offset and skip aborted frames and transaction markers. Only Kafka reads can continue to
the high watermark.

Readers take no lock of the writer except the shard's, and only briefly. If segment cleaning has deleted a segment, the
read looks up the index again, which points to the copy. A damaged frame raises an error with its shard and offsets.
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
    SegmentGoneError,
    StoreStalledError,
    UnsupportedCodecError,
)
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.kafka import KafkaHeader
from basaltmq.log.frame import HEADER_BYTES, KAFKA, Header, check_body, decode_header, records_of
from basaltmq.log.kafka_run import LARGE_BYTES
from basaltmq.log.lane import Lane
from basaltmq.log.lane_sync import LaneSync
from basaltmq.log.run import Cut
from basaltmq.store.api import Store
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.streams.adapter import (
    BATCH_RECORDS_MAX,
    READ_BYTES,
    READ_RECORDS,
    Budget,
    Clock,
    IfAllOlder,
    check_offset,
    hash64,
)
from basaltmq.streams.batch_cursor import BatchCursor, Cursors
from basaltmq.streams.engines.base import EngineBase
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.engines.segment.index.rows import IN_TRANSACTION, Entry
from basaltmq.streams.engines.segment.kafka import Ahead, KafkaRead, producers_batches, read_batches
from basaltmq.streams.engines.segment.read_result import (
    READ_RUN_BYTES,
    Bookmarks,
    Collector,
    FramePosition,
    FramesRead,
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
"""Errors of unreadable frames. Kafka clients get such a batch unchanged; other readers can skip it."""

_log: Final = logging.getLogger(__name__)

ADJACENT_CHECKED: Final = 16
"""Frames checked in the index before a reader assumes that the shard's frames are adjacent: half of a run."""

RETRIES: Final = 16
"""Maximum retries of a read that meets segment cleaning. Each retry means that one more segment was deleted."""

DAMAGED_FRAMES_MAX: Final = 1_000
"""Damaged frames remembered, about 1 KB each. Beyond this, the first one is forgotten, and logged again if read."""

INDEX_WRITE_INTERVAL_MS: Final = 50
"""Interval for writing buffered index rows. At 1,000 rows per second the append that writes them takes 0.2 ms longer;
at the index's limit it would be 6 ms."""

INDEX_WRITE_ROWS_MAX: Final = 512
"""With more rows per interval, only the index's limit triggers a write: small writes would cost each append 5 %."""


class LogLane:
    """A lane with its watermarks and sync requests."""

    __slots__ = ("index_write_due_ms", "lock", "log", "number", "tick", "watermarks")

    def __init__(self, number: int, log: Lane, lock: threading.RLock, *, in_loop: bool = False) -> None:
        self.number = number
        self.log = log
        self.lock = lock
        """The index's lock. An append needs both, and a second lock would cost as much as the index entry."""
        finish = log.move_ring_frames
        group = partial(LaneSync, log=log, finish=finish) if in_loop else partial(GroupCommit, finish=finish)
        self.watermarks = Watermarks(log, log.sync_through_ring, group)
        self.tick = TickSync(self.watermarks.group)
        self.index_write_due_ms = 0

    def write_index_rows(self, index: StreamIndex, now_ms: int) -> None:
        """Write the buffered index rows, if they are few or at the limit. Call before an append, under the lock."""
        # Writing the index would first write the awaited frames to their segment, whose sync is slower than the ring's.
        if index.rows < index.rows_max:
            if self.watermarks.is_awaited:
                return
            if index.rows <= INDEX_WRITE_ROWS_MAX:
                # If the store is stalled, retry at the next interval; the buffer has room.
                with contextlib.suppress(StoreStalledError):
                    index.flush()
        else:
            index.flush()
        self.index_write_due_ms = now_ms + INDEX_WRITE_INTERVAL_MS

    def roll_if_old(self) -> None:
        """Roll a segment past its maximum age. The lock keeps an append's position and `active_start` consistent."""
        with self.lock:
            self.log.roll_if_old()

    def sync_soon(self) -> None:
        """Sync complete segments in the background, so that only a few segments are ever unsynced."""
        threading.Thread(target=self._sync_quietly, name="basalt-seal", daemon=True).start()

    def _sync_quietly(self) -> None:
        # A failure has poisoned the lane, so the next append reports it.
        with contextlib.suppress(BasaltError):
            self.log.sync()


class SegmentReader(EngineBase):
    """Reads of shards in segment files. Subclasses, the writing engine or a view, set the attributes."""

    index: StreamIndex
    lanes: list[LogLane]
    _states: Recent[SegmentShard]

    def __init__(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders | None = None
    ) -> None:
        super().__init__(store, shards, offsets, clock_ms, leaders)
        self.bookmarks = Bookmarks()
        self.damaged_frames: dict[tuple[int, int], DamagedFrameError] = {}
        """Damaged frames that reads found, by lane and position. Each is logged once, however often it is read."""
        self.cursors = Cursors()
        keep_freed_memory()

    def cut(self, raw: bytes) -> Cut | None:
        """Return a function that passes slices of `raw` to the checksum without a copy, if available."""
        cutter = find_cutter()
        return None if cutter is None else cutter(raw)

    def log_bytes(self) -> int:
        """Return the total size of the segments."""
        return sum(segment.size_bytes for lane in self.lanes for segment in lane.log.segments())

    def state_of(self, shard: int) -> SegmentShard:
        return self._states.get(shard)

    def config_of(self, shard: int) -> ShardConfig:
        return self._own(shard).config

    def read_by_offset(
        self, shard: int, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> FramesRead:
        return self._read_frames(shard, offset, max_records, max_bytes)

    def read_by_tag(
        self, shard: int, tag: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> FramesRead:
        return self._read_frames(shard, offset, max_records, max_bytes, tag=tag)

    def read_by_key(
        self, shard: int, key: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> FramesRead:
        return self._read_frames(shard, offset, max_records, max_bytes, key=key)

    def read_kafka(
        self,
        shard: int,
        offset: int,
        max_bytes: int = READ_BYTES,
        *,
        is_decided: bool = False,
        is_skipping: bool = False,
        ahead: Ahead | None = None,
    ) -> KafkaRead:
        """Return Kafka record batches up to the high watermark, or with `is_decided` up to the last stable offset.

        With `is_skipping`, damaged frames are skipped. `ahead` is a result of `take_ahead`, used if it fits.
        """
        self._own(shard)
        return self._retried(
            lambda: read_batches(
                self, shard, offset, max_bytes, is_decided=is_decided, is_skipping=is_skipping, ahead=ahead
            )
        )

    def producers_batches(self, shard: int, offset: int) -> list[KafkaHeader]:
        """Return the headers of idempotent producers' batches from `offset` on."""
        self._own(shard)
        return self._retried(lambda: producers_batches(self, shard, offset))

    def now_ms(self) -> int:
        return self._clock_ms()

    def _read_frames(
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
                # Segment cleaning moved the frame after its entry was read. The index has the new position.
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
        collector = Collector(budget, self._clock_ms(), wanted_records(tag, key), find_cutter())
        next_offset = end
        if tag is None and key is None and not deleted and not state.rewritten:
            offset = self._walk(state, collector, offset, end)
            if offset >= end or collector.is_full or budget.records_left <= 0:
                return FramesRead(collector.parts, offset, start, end)
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
                if not self._take(state, collector, entry, batch, offset, end, gone):
                    assert collector.stopped_at is not None
                    next_offset = collector.stopped_at
                    break
        except DamagedFrameError as error:
            # Return the records before the damage. The next read starts at it and raises the error.
            if not collector.parts:
                raise
            next_offset = error.base_offset
        return FramesRead(collector.parts, next_offset, start, end)

    def _walk(self, state: SegmentShard, collector: Collector, offset: int, end: int) -> int:
        """Read consecutive plain frames, adjacent ones without index lookups. Return the offset reached."""
        log = self.lanes[state.lane].log
        frame_position = self.bookmarks.take(state.number, offset)
        if frame_position is not None:
            offset = self._walk_from(frame_position, log, state, collector, end)
        while offset < end and collector.reached is None:
            entries = self.index.entries(state.number, offset)
            first = next(entries, None)
            if first is None or first.base_offset > offset:
                break
            if first.base_offset < offset:
                # The last read ended inside a frame.
                _, batch = next(self._opened(state, iter([first]), offset, end, None))
                if batch is not None and not self._take(state, collector, first, batch, offset, end, ()):
                    assert collector.stopped_at is not None
                    return collector.stopped_at
                offset = first.last_offset + 1
                continue
            ahead = [first, *islice(entries, collector.frames_wanted(first, ADJACENT_CHECKED) - 1)]
            if len(ahead) < 2:
                break
            if all(after.position == each.position + each.size_bytes for each, after in pairwise(ahead)):
                frame_position = FramePosition(offset, first.position, first.size_bytes, first.records)
                reached = self._walk_from(frame_position, log, state, collector, end)
            else:
                reached = collector.pick(log, state.number, chain(ahead, entries), offset, end)
            if reached == offset or collector.is_over:
                return reached
            offset = reached
        return offset

    def _opened(
        self, state: SegmentShard, entries: Iterator[Entry], offset: int, end: int, budget: Budget | None
    ) -> Iterator[tuple[Entry, ColumnBatch | BatchCursor | None]]:
        """Yield the frames of entries below `end` as columns or as a cursor into a Kafka batch; None if aborted."""
        first = next(entries, None)
        if first is None:
            return
        cursor = self.cursors.take(state.number, first.position, offset) if first.base_offset < offset else None
        if cursor is None:
            entries = chain((first,), entries)
        elif self.is_visible(state, first):
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
        collector: Collector,
        entry: Entry,
        batch: ColumnBatch | BatchCursor,
        offset: int,
        end: int,
        deleted: Sequence[int],
    ) -> bool:
        """Take records of one frame. Return False if the read ends inside it."""
        if isinstance(batch, ColumnBatch):
            return collector.take(entry.base_offset, batch, offset, end, deleted)
        try:
            is_whole = collector.take_records(batch, offset, end, deleted)
        except _UNREADABLE as error:
            raise self.damaged(state, entry, error, first_offset=max(offset, batch.next_offset)) from error
        if batch.is_paused:
            self.cursors.save(state.number, entry.position, batch)
        return is_whole

    def _walk_from(
        self, frame_position: FramePosition, log: Lane, state: SegmentShard, collector: Collector, end: int
    ) -> int:
        reached = collector.walk(log, state.number, frame_position, end)
        if collector.reached is not None:
            self.bookmarks.save(state.number, collector.reached)
        return reached

    def _candidates(
        self, shard: int, offset: int, end: int, config: ShardConfig, tag: bytes | None, key: bytes | None
    ) -> Iterator[Entry]:
        """Yield the frames from `offset` on that may contain the key or tag."""
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
        """Yield the frames of entries below `end`. Reads adjacent frames together, up to the budget."""
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
        """Yield the decoded frames; None for aborted ones unless `is_whole`."""
        log = self.lanes[state.lane].log
        first = run[0].position
        raw = log.read(first, size)
        for entry in run:
            at = entry.position - first
            if at >= len(raw):
                # Adjacent positions, but in the next segment.
                first, at = entry.position, 0
                raw = log.read(first, size)
            try:
                header = decode_header(log.seed, raw, at)
                body = raw[at + HEADER_BYTES : at + HEADER_BYTES + header.body_bytes]
                check_body(header, body)
                _require_same(state, entry, header)
                batch = None
                if is_whole or self.is_visible(state, entry):
                    batch = opened(header, body, state.config.record_bytes_max)
            except _UNREADABLE as error:
                raise self.damaged(state, entry, error) from error
            yield entry, batch

    def damaged(
        self, state: SegmentShard, entry: Entry, error: BasaltError, *, first_offset: int | None = None
    ) -> DamagedFrameError:
        """Return the error for a frame, or its rest, that cannot be read. Logs each frame once."""
        log = self.lanes[state.lane].log
        damaged_at = (state.lane, entry.position)
        reason = f"{log.path} at position {entry.position}: {error}"
        if damaged_at not in self.damaged_frames:
            if len(self.damaged_frames) >= DAMAGED_FRAMES_MAX:
                self.damaged_frames.pop(next(iter(self.damaged_frames)))
            whole = DamagedFrameError(state.number, entry.base_offset, entry.last_offset, reason)
            self.damaged_frames[damaged_at] = whole
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
        base = entry.base_offset if first_offset is None else first_offset
        return DamagedFrameError(state.number, min(base, entry.last_offset), entry.last_offset, reason)

    def load(self, state: SegmentShard, entry: Entry) -> ColumnBatch | None:
        """Return the records of one frame, aborted or not."""
        return next(self._read_run(state, [entry], entry.size_bytes, records_of, is_whole=True))[1]

    def is_visible(self, state: SegmentShard, entry: Entry) -> bool:
        """Whether the frame belongs to no transaction or to a committed one."""
        return not entry.flags & IN_TRANSACTION or not self.index.outcomes.is_hidden(state.number, entry)

    def visible_records(self, state: SegmentShard, entry: Entry) -> ColumnBatch | None:
        """Return the records of one frame, or None if it was aborted."""
        return next(self._read_run(state, [entry], entry.size_bytes, records_of))[1]

    def frame_of(self, state: SegmentShard, entry: Entry) -> tuple[Header, bytes]:
        """Return the header and the body of a frame, with verified checksums."""
        log = self.lanes[state.lane].log
        if entry.size_bytes > LARGE_BYTES:
            header = decode_header(log.seed, log.read(entry.position, HEADER_BYTES))
            body = log.read(entry.position + HEADER_BYTES, header.body_bytes)
        else:
            raw = log.read(entry.position, entry.size_bytes)
            header = decode_header(log.seed, raw)
            body = raw[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        check_body(header, body)
        _require_same(state, entry, header)
        return header, body

    def get_offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: IfAllOlder) -> int:
        return self._retried(lambda: self._offset_by_timestamp(shard, timestamp_ms, otherwise))

    def _offset_by_timestamp(self, shard: int, timestamp_ms: int, otherwise: IfAllOlder) -> int:
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
                collector = Collector(Budget(1, 0), now_ms, wanted)
                try:
                    self._take(state, collector, entry, batch, start, end, gone)
                except DamagedFrameError:
                    # According to its header, the frame has such a record. A read there reports the damage.
                    return max(start, entry.base_offset)
                if collector.parts:
                    return collector.parts[0].records()[0].offset
        return start if otherwise is IfAllOlder.EARLIEST else end


def _require_same(state: SegmentShard, entry: Entry, header: Header) -> None:
    """Raise if another frame is at the position of an entry, because segments were exchanged."""
    if header.shard != state.number or header.last_offset != entry.last_offset:
        raise CorruptionError("the index points to a different frame")


def wanted_records(tag: bytes | None, key: bytes | None) -> Wanted | None:
    if tag is not None:
        return Wanted(lambda batch: [tag in tags for tags in batch.tags()], lambda record: tag in record.tags)
    if key is not None:
        return Wanted(lambda batch: [key == each for each in ColumnBatch.keys(batch)], lambda record: record.key == key)
    return None
