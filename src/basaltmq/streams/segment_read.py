"""What a read of the segment engine found: frames, whole or in part, made into records or Arrow on demand.

Whole frames cost nothing per record until somebody asks for records; for Arrow they never do. Only the frames at the
edges of a read, and those with deleted or expired records, are looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Final, TypeAlias

from basaltmq.errors import SegmentGoneError
from basaltmq.log.columnar import EXPIRIES, OFFSET_DELTAS, ColumnBatch, directory_bytes, directory_of
from basaltmq.log.frame import HEADER_BYTES, take_frame
from basaltmq.log.lane import Lane
from basaltmq.log.record import NEVER, StoredRecord
from basaltmq.streams.adapter import Budget
from basaltmq.streams.index_rows import Entry

if TYPE_CHECKING:
    import pyarrow as pa

READ_RUN_BYTES: Final = 5 << 18
"""Neighbouring frames read at once: enough to make the call cheap, little enough to stay in the processor's cache."""

WALK_BYTES: Final = 1 << 18
"""What a walk over neighbouring frames reads at once: it stays in the processor's own cache until it is checked."""

Cutter: TypeAlias = Callable[[bytes], Callable[[int, int], bytes]]
"""How parts of a run are given to the checksum without a copy; see `log.arrow.cutter`."""


def find_cutter() -> Cutter | None:
    """Arrow's, where it is installed."""
    try:
        from basaltmq.log.arrow import cutter
    except ImportError:
        return None
    return cutter


class Part:
    """Some records of one frame: all of them, a run, or those marked."""

    __slots__ = ("base_offset", "batch", "begin", "end", "marks")

    def __init__(
        self, base_offset: int, batch: ColumnBatch, begin: int, end: int, marks: list[bool] | None = None
    ) -> None:
        self.base_offset = base_offset
        self.batch = batch
        self.begin = begin
        self.end = end
        self.marks = marks
        """Of the records from `begin` to `end`, those meant."""

    def __len__(self) -> int:
        return self.end - self.begin if self.marks is None else sum(self.marks)

    @property
    def is_whole(self) -> bool:
        return self.marks is None and self.end - self.begin == self.batch.count

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


class FramesRead:
    """A `ReadBatch` over frames."""

    __slots__ = ("high_watermark", "next_offset", "parts", "start_offset")

    def __init__(self, parts: list[Part], next_offset: int, start_offset: int, high_watermark: int) -> None:
        self.parts = parts
        self.next_offset = next_offset
        self.start_offset = start_offset
        self.high_watermark = high_watermark

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def records(self) -> list[StoredRecord]:
        if len(self.parts) == 1:
            return self.parts[0].records()
        return [record for part in self.parts for record in part.records()]

    def arrow(self) -> pa.RecordBatch:
        from basaltmq.log.arrow import concatenated, joined

        whole = [(part.base_offset, part.batch) for part in self.parts if part.is_whole]
        if len(whole) == len(self.parts):
            return joined(whole)
        return concatenated(self.arrow_batches())

    def arrow_batches(self) -> list[pa.RecordBatch]:
        """A batch per frame."""
        return [part.arrow() for part in self.parts]


def index_of(batch: ColumnBatch, base_offset: int, offset: int) -> int:
    """How many records of a frame lie below an offset."""
    if offset <= base_offset:
        return 0
    deltas = batch.deltas()
    if deltas is None:
        return min(batch.count, offset - base_offset)
    return sum(base_offset + delta < offset for delta in deltas)


def offset_at(batch: ColumnBatch, base_offset: int, at: int) -> int:
    deltas = batch.deltas()
    return base_offset + (at if deltas is None else deltas[at])


def _read_some(log: Lane, position: int, size_bytes: int) -> bytes:
    """Bytes of the log, none where its segment ends."""
    try:
        return log.read(position, size_bytes)
    except SegmentGoneError:
        return b""


class Taker:
    """Takes records of frames, in order, until a read's budget is used up."""

    def __init__(
        self,
        budget: Budget,
        now_ms: int,
        wanted: Callable[[ColumnBatch], list[bool]] | None = None,
        cutter: Cutter | None = None,
    ) -> None:
        self.parts: list[Part] = []
        self.stopped_at: int | None = None
        """The offset to go on with, once the budget did not allow more."""
        self.is_full = False
        self._cutter = cutter
        self._budget = budget
        self._now_ms = now_ms
        self._wanted = wanted

    def take(self, base_offset: int, batch: ColumnBatch, offset: int, end: int, deleted: Sequence[int]) -> bool:
        """Take what lies in [offset, end) and is wanted; False when the read is full."""
        budget = self._budget
        begin = index_of(batch, base_offset, offset)
        stop = index_of(batch, base_offset, end)
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

    def walk(self, log: Lane, shard: int, first: Entry, end: int) -> int:
        """Take whole plain frames that follow one another in the log, beginning with `first`; the offset after them.

        No index is asked and no record looked at. Stops at anything out of the ordinary, which is then read with care.
        """
        budget = self._budget
        expected = first.base_offset
        position = first.position
        size_max = max(first.size_bytes, WALK_BYTES)
        seed = log.seed
        parts = self.parts
        raw = front = b""
        cut = None
        at = front_bytes = count = body_bytes = data_bytes = 0
        extents: dict[int, tuple[int, int]] = {}
        is_odd = False
        while expected < end:
            found = take_frame(seed, raw, at, shard, expected, cut)
            if found is None:
                if raw and not at:
                    break
                # The frame may only be cut off by the end of what was read.
                position += at
                at = 0
                left = budget.bytes_left + budget.bytes_left // 8 + size_max
                raw = _read_some(log, position, min(size_max, left))
                cut = None if self._cutter is None else self._cutter(raw)
                found = take_frame(seed, raw, 0, shard, expected, cut)
                if found is None:
                    break
            records, size, least_ms, largest_ms = found
            begin = at + HEADER_BYTES
            if not front or raw[begin : begin + front_bytes] != front:
                count, extents, body_bytes, data_bytes = directory_of(raw, begin)
                front_bytes = directory_bytes(len(extents))
                front = raw[begin : begin + front_bytes]
                is_odd = EXPIRIES in extents or OFFSET_DELTAS in extents
            if is_odd or count != records or body_bytes != size or count > budget.records_left:
                break
            if data_bytes > budget.bytes_left:
                # A read that has something ends with a frame rather than inside one.
                self.is_full = bool(parts)
                break
            budget.taken += count
            budget.records_left -= count
            budget.bytes_left -= data_bytes
            parts.append(Part(expected, ColumnBatch(raw, count, extents, least_ms, largest_ms, begin, size), 0, count))
            expected += count
            at = begin + size + (-size & 7)
        return expected

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
        """Which records between `begin` and `stop` are meant; None if all are."""
        marks: list[bool] | None = None
        if self._wanted is not None:
            marks = self._wanted(batch)[begin:stop]
        expiries = batch.expiries()
        if expiries is not None:
            now_ms = self._now_ms
            alive = [time_ms == NEVER or time_ms > now_ms for time_ms in expiries[begin:stop]]
            marks = alive if marks is None else [a and b for a, b in zip(marks, alive, strict=True)]
        if deleted:
            gone = set(deleted)
            deltas = batch.deltas()
            places = range(begin, stop) if deltas is None else deltas[begin:stop]
            marks = marks or [True] * (stop - begin)
            marks = [mark and base_offset + place not in gone for mark, place in zip(marks, places, strict=True)]
        return None if marks is not None and all(marks) else marks
