"""The result of a segment engine read: whole or partial frames, converted to records or Arrow on demand.

Whole frames cost nothing per record until records are requested, and never with Arrow. Only frames at the edges of a
read, and frames with deleted or expired records, are examined per record.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from basaltmq.errors import BasaltError, SegmentGoneError
from basaltmq.log.batches.columnar import OFFSET_DELTAS, ColumnBatch, directory_of
from basaltmq.log.batches.record import NEVER, TIMESTAMP_MS_MAX, StoredRecord, record_size_bytes
from basaltmq.log.lane import Lane
from basaltmq.log.run import Cut, Run, Taken, take_runs
from basaltmq.streams.adapter import Budget
from basaltmq.streams.batch_cursor import BatchCursor
from basaltmq.streams.engines.segment.index.rows import Entry

if TYPE_CHECKING:
    import pyarrow as pa

READ_RUN_BYTES: Final = 5 << 18
"""Bytes of adjacent frames per read call: large enough for cheap calls, small enough for the CPU cache."""

KEPT_BYTES: Final = 16 << 20
"""The allocator may keep twice this after a free: more than a read of the largest default size needs."""

BOOKMARKS_MAX: Final = 4096
"""Maximum bookmarks of readers, about 200 bytes each."""

Cutter: TypeAlias = Callable[[bytes], Cut]
"""Passes slices of a buffer to the checksum without a copy; see `log.batches.arrow.cutter`."""


def find_cutter() -> Cutter | None:
    """Return Arrow's cutter if pyarrow is already loaded. Loading it only for this would cost 33 MiB."""
    if "pyarrow" not in sys.modules:
        return None
    from basaltmq.log.arrow import cutter

    return cutter


def keep_freed_memory() -> None:
    """Make the allocator keep freed read buffers instead of returning them to the system each time.

    Fresh memory costs a page fault per 4 KB, more than reading and checking the bytes in it. glibc adapts its threshold
    to the largest freed block that was mapped separately, so this frees an untouched block. No effect on other libcs.
    """
    bytes(KEPT_BYTES)


class Wanted(NamedTuple):
    """The filter of a read, for columns and for single records."""

    marks: Callable[[ColumnBatch], list[bool]]
    is_meant: Callable[[StoredRecord], bool]


class FramePosition(NamedTuple):
    """The position of a frame, and the expected size of it and the next frames."""

    base_offset: int
    position: int
    size_bytes: int
    records: int
    data_bytes: int = 0
    """Bytes of the read budget that such a frame takes; 0 if unknown."""


class Bookmarks:
    """Positions where reads stopped, so that the next read needs no index lookup.

    A bookmark is a hint: the header and checksums of the frame there show whether it is the right one. A read removes
    the bookmark it uses and saves a new one.
    """

    def __init__(self) -> None:
        self._positions: dict[tuple[int, int], FramePosition] = {}
        self._lock = threading.Lock()

    def take(self, shard: int, offset: int) -> FramePosition | None:
        return self._positions.pop((shard, offset), None)

    def save(self, shard: int, frame_position: FramePosition) -> None:
        with self._lock:
            self._positions[shard, frame_position.base_offset] = frame_position
            if len(self._positions) > BOOKMARKS_MAX:
                for oldest in list(self._positions)[: BOOKMARKS_MAX // 2]:
                    self._positions.pop(oldest, None)


class Part:
    """Some records of one frame: all, a run, or those marked."""

    __slots__ = ("base_offset", "batch", "begin", "end", "marks")

    def __init__(
        self, base_offset: int, batch: ColumnBatch, begin: int, end: int, marks: list[bool] | None = None
    ) -> None:
        self.base_offset = base_offset
        self.batch = batch
        self.begin = begin
        self.end = end
        self.marks = marks
        """Which records from `begin` to `end` are selected; None for all."""

    def __len__(self) -> int:
        return self.end - self.begin if self.marks is None else sum(self.marks)

    def as_run(self) -> Run | None:
        """Return the frame as a run, if it is complete, has no gaps, and its times need no clamping."""
        batch = self.batch
        if self.marks is not None or self.end - self.begin != batch.count or OFFSET_DELTAS in batch.extents:
            return None
        if batch.timestamp_max_ms > TIMESTAMP_MS_MAX:
            return None
        return Run(batch.source, self.base_offset, batch.count, batch.extents, len(batch.body), [batch.begin])

    def records(self) -> list[StoredRecord]:
        records = self.batch.records(self.base_offset)
        if self.end - self.begin != len(records):
            records = records[self.begin : self.end]
        return records if self.marks is None else list(compress(records, self.marks))

    def arrow(self) -> pa.RecordBatch:
        from basaltmq.log.arrow import masked, to_arrow

        whole = to_arrow(self.batch, self.base_offset)
        if self.end - self.begin != self.batch.count:
            whole = whole.slice(self.begin, self.end - self.begin)
        return whole if self.marks is None else masked(whole, self.marks)


class RecordsPart:
    """Individually decoded records of a Kafka batch."""

    __slots__ = ("_records",)

    def __init__(self, records: list[StoredRecord]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def records(self) -> list[StoredRecord]:
        return self._records

    def arrow(self) -> pa.RecordBatch:
        from basaltmq.log.arrow import to_arrow

        records = self._records
        base = records[0].offset
        is_dense = records[-1].offset - base == len(records) - 1
        deltas = None if is_dense else [record.offset - base for record in records]
        return to_arrow(ColumnBatch.from_records(records, 0, deltas), base)


class FramesRead:
    """A `ReadBatch` over frames."""

    __slots__ = ("_parts", "high_watermark", "next_offset", "start_offset")

    def __init__(
        self, parts: Sequence[Part | RecordsPart | Run], next_offset: int, start_offset: int, high_watermark: int
    ) -> None:
        self._parts = parts
        self.next_offset = next_offset
        self.start_offset = start_offset
        self.high_watermark = high_watermark

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def records(self) -> list[StoredRecord]:
        if len(self._parts) == 1:
            return self._parts[0].records()
        return [record for part in self._parts for record in part.records()]

    def arrow(self) -> pa.RecordBatch:
        from basaltmq.log.arrow import concatenated, joined

        batches: list[pa.RecordBatch] = []
        runs: list[Run] = []
        for part in self._parts:
            run = part.as_run() if isinstance(part, Part) else part
            if isinstance(run, Run):
                runs.append(run)
                continue
            assert not isinstance(part, Run)
            if runs:
                batches.append(joined(runs))
                runs = []
            batches.append(part.arrow())
        if runs or not batches:
            batches.append(joined(runs))
        return concatenated(batches)


def offset_at(batch: ColumnBatch, base_offset: int, at: int) -> int:
    deltas = batch.deltas()
    return base_offset + (at if deltas is None else deltas[at])


def _likely(frame_position: FramePosition, taken: Taken) -> FramePosition:
    """Return the position with the average sizes of the frames just taken."""
    frames = sum([len(run.begins) for run in taken.runs])
    if not frames:
        return frame_position
    sizes = -(-taken.size_bytes // frames), max(1, taken.records // frames), max(1, taken.data_bytes // frames)
    return FramePosition(frame_position.base_offset, frame_position.position, *sizes)


def _read_some(log: Lane, position: int, size_bytes: int) -> bytes:
    """Read log bytes. Return none at the end of the segment."""
    try:
        return log.read(position, size_bytes)
    except SegmentGoneError:
        return b""


class Collector:
    """Takes records of frames in order until the budget of a read is used up."""

    def __init__(
        self,
        budget: Budget,
        now_ms: int,
        wanted: Wanted | None = None,
        cutter: Cutter | None = None,
    ) -> None:
        self.parts: list[Part | RecordsPart | Run] = []
        self.stopped_at: int | None = None
        """The offset at which to continue after the budget was used up."""
        self.is_full = False
        self.is_over = False
        """The budget had no room for the next picked frame."""
        self.reached: FramePosition | None = None
        """Where the last walk stopped at a valid frame because of the budget."""
        self._cutter = cutter
        self._budget = budget
        self._now_ms = now_ms
        self._wanted = wanted

    def take(self, base_offset: int, batch: ColumnBatch, offset: int, end: int, deleted: Sequence[int]) -> bool:
        """Take the selected records in [offset, end). Return False when the read is full."""
        budget = self._budget
        begin = batch.count_below(offset - base_offset)
        stop = batch.count_below(end - base_offset)
        marks = self._marks(batch, base_offset, begin, stop, deleted)
        if begin >= stop or (marks is not None and not any(marks)):
            return True
        if (
            marks is None
            and stop - begin == batch.count
            and batch.count <= budget.records_left
            and (size := directory_of(batch.body).data_bytes) <= budget.bytes_left
        ):
            budget.taken += batch.count
            budget.records_left -= batch.count
            budget.bytes_left -= size
            self.parts.append(Part(base_offset, batch, 0, batch.count))
            return True
        return self._take_some(base_offset, batch, begin, stop, marks)

    def take_records(self, cursor: BatchCursor, offset: int, end: int, deleted: Sequence[int]) -> bool:
        """As `take`, for a Kafka batch, which is decoded only as far as the budget goes.

        A decode error is raised only if no record precedes it; otherwise the next read starts there.
        """
        budget = self._budget
        gone = set(deleted)
        is_meant = None if self._wanted is None else self._wanted.is_meant
        found: list[StoredRecord] = []
        is_whole = True
        try:
            while (record := cursor.take(offset)) is not None and record.offset < end:
                if record.offset in gone or (is_meant is not None and not is_meant(record)):
                    continue
                if budget.records_left <= 0 or not budget.take(record_size_bytes(record)):
                    cursor.put_back(record)
                    self.stopped_at = record.offset
                    self.is_full = True
                    is_whole = False
                    break
                found.append(record)
        except BasaltError:
            if not found:
                raise
            self.stopped_at = cursor.next_offset
            self.is_full = True
            is_whole = False
        if found:
            self.parts.append(RecordsPart(found))
        return is_whole

    def walk(self, log: Lane, shard: int, first: FramePosition, end: int) -> int:
        """Take adjacent plain frames from `first` on, without index lookups. Return the offset after them.

        Stops at any frame that is not plain. The caller then reads that frame through the index.
        """
        budget = self._budget
        expected = first.base_offset
        position = first.position
        # Assume that the next frames are like the first one.
        record_bytes = first.size_bytes // max(1, first.records) + 1
        self.reached = None
        while expected < end:
            likely = budget.bytes_left + budget.bytes_left // 8
            if first.data_bytes:
                likely = -(-budget.bytes_left // first.data_bytes) * first.size_bytes
            likely = min(likely, record_bytes * budget.records_left)
            raw = _read_some(log, position, max(first.size_bytes, min(READ_RUN_BYTES, likely + first.size_bytes)))
            cut = None if self._cutter is None else self._cutter(raw)
            taken = take_runs(log.seed, raw, shard, expected, end, budget.records_left, budget.bytes_left, cut)
            self._take_runs(taken)
            expected = taken.next_offset
            position += taken.size_bytes
            if not taken.runs or not taken.is_cut:
                if taken.is_next:
                    self.reached = _likely(FramePosition(expected, position, first.size_bytes, first.records), taken)
                break
        return expected

    def frames_wanted(self, first: Entry, most: int) -> int:
        """Return how many frames like the first one fit the budget; at least two, to detect adjacent frames."""
        budget = self._budget
        by_bytes = budget.bytes_left // first.size_bytes + 1
        return max(2, min(most, by_bytes, budget.records_left // max(1, first.records) + 1))

    def pick(self, log: Lane, shard: int, entries: Iterator[Entry], offset: int, end: int) -> int:
        """Take plain frames that are not adjacent in the log, by their index entries. Return the offset after them.

        Concatenates the frames and takes them like adjacent ones, so it stops at the same frames as `walk`.
        """
        budget = self._budget
        expected = offset
        is_more = True
        while is_more and expected < end:
            pieces: list[bytes] = []
            size = records = 0
            reached = expected
            is_more = False
            for entry in entries:
                if entry.base_offset != reached or reached >= end:
                    break
                pieces.append(log.read(entry.position, entry.size_bytes))
                size += entry.size_bytes
                records += entry.records
                reached = entry.last_offset + 1
                if size >= READ_RUN_BYTES or size > budget.bytes_left or records >= budget.records_left:
                    is_more = True
                    break
            raw = b"".join(pieces)
            cut = None if self._cutter is None else self._cutter(raw)
            taken = take_runs(log.seed, raw, shard, expected, end, budget.records_left, budget.bytes_left, cut)
            self._take_runs(taken)
            expected = taken.next_offset
            if expected != reached:
                self.is_over = taken.is_next
                break
        return expected

    def _take_runs(self, taken: Taken) -> None:
        budget = self._budget
        budget.taken += taken.records
        budget.records_left -= taken.records
        budget.bytes_left -= taken.data_bytes
        self.parts += taken.runs
        # A read that has records ends at a frame boundary rather than inside a frame.
        self.is_full = taken.is_full and bool(self.parts)

    def _take_some(self, base_offset: int, batch: ColumnBatch, begin: int, stop: int, marks: list[bool] | None) -> bool:
        budget = self._budget
        sizes = batch.sizes()
        at = begin
        while at < stop:
            is_meant = marks is None or marks[at - begin]
            if is_meant and (budget.records_left <= 0 or not budget.take(sizes[at])):
                break
            at += 1
        if at > begin:
            part = Part(base_offset, batch, begin, at, None if marks is None else marks[: at - begin])
            if len(part):
                self.parts.append(part)
        if at == stop:
            return True
        self.stopped_at = offset_at(batch, base_offset, at)
        self.is_full = True
        return False

    def _marks(
        self, batch: ColumnBatch, base_offset: int, begin: int, stop: int, deleted: Sequence[int]
    ) -> list[bool] | None:
        """Return which records between `begin` and `stop` are selected; None if all are."""
        marks: list[bool] | None = None
        if self._wanted is not None:
            marks = self._wanted.marks(batch)[begin:stop]
        expiries = batch.expiries()
        if expiries is not None:
            now_ms = self._now_ms
            alive = [time_ms == NEVER or time_ms > now_ms for time_ms in expiries[begin:stop]]
            marks = alive if marks is None else [a and b for a, b in zip(marks, alive, strict=True)]
        if deleted:
            gone = set(deleted)
            deltas = batch.deltas()
            deltas_read = range(begin, stop) if deltas is None else deltas[begin:stop]
            marks = marks or [True] * (stop - begin)
            marks = [mark and base_offset + delta not in gone for mark, delta in zip(marks, deltas_read, strict=True)]
        return None if marks is not None and all(marks) else marks
