"""A run: consecutive frames of one shard in the log with the same layout, in the buffer of one read.

A sequential reader of a shard mostly reads plain, adjacent batches of one producer. `take_runs` checks each frame,
including its checksums, and keeps only the start of each. Objects per frame and per record are created on demand. Arrow
reads a run column by column (see `arrow`).

A run ends before any other frame: of another shard, after a gap, copied by cleaning, damaged, truncated by the end of
the buffer, with expiries or offset gaps, or with a time above TIMESTAMP_MS_MAX. The caller handles that frame.

Invariants: frames of a run are dense, so each base offset follows from the first. All have the same, checked directory.
No frame reaches past `end`, and the result is within the given limits. A frame costs 1.3 us plus its checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.log.batches.columnar import EXPIRIES, OFFSET_DELTAS, ColumnBatch, Extent, directory_bytes, directory_of
from basaltmq.log.batches.record import TIMESTAMP_MS_MAX, StoredRecord
from basaltmq.log.frame import AWAITED, COLUMNAR, HEADER_BYTES, MAGIC, PLAIN_HEADER

Cut: TypeAlias = Callable[[int, int], bytes]
"""Returns the part (begin, length) of the buffer without a copy, for the checksum (see `arrow.cutter`)."""

_TIMES: Final = Struct("<qq")
_TIMES_AT: Final = 40 - HEADER_BYTES
"""Position of the smallest and largest time of a frame, relative to the start of its body."""

_AWAITED: Final = COLUMNAR | AWAITED << 8
"""The header bytes after the times, for records with the AWAITED flag."""

_unpack = PLAIN_HEADER.unpack_from
_crc32c = google_crc32c.value
_extend = google_crc32c.extend


class Run:
    """Dense frames of the same layout in one buffer."""

    __slots__ = ("base_offset", "begins", "body_bytes", "extents", "frame_records", "source")

    def __init__(
        self,
        source: bytes,
        base_offset: int,
        frame_records: int,
        extents: dict[int, Extent],
        body_bytes: int,
        begins: list[int],
    ) -> None:
        self.source = source
        self.base_offset = base_offset
        self.frame_records = frame_records
        self.extents = extents
        self.body_bytes = body_bytes
        self.begins = begins
        """Start positions of the frame bodies in `source`."""

    def __len__(self) -> int:
        return self.frame_records * len(self.begins)

    def batches(self) -> Iterator[tuple[int, ColumnBatch]]:
        """Yield each frame with its base offset."""
        base = self.base_offset
        records = self.frame_records
        for begin in self.begins:
            least_ms, largest_ms = _TIMES.unpack_from(self.source, begin + _TIMES_AT)
            yield (
                base,
                ColumnBatch(self.source, records, self.extents, least_ms, largest_ms, begin, self.body_bytes),
            )
            base += records

    def records(self) -> list[StoredRecord]:
        return [record for base, batch in self.batches() for record in batch.records(base)]


class Taken(NamedTuple):
    """The result of `take_runs`."""

    runs: list[Run]
    next_offset: int
    size_bytes: int
    """Bytes of the buffer that were consumed."""
    records: int
    data_bytes: int
    """Bytes of values, keys, tags and headers together."""
    is_next: bool
    """Whether a complete plain frame of the shard follows that exceeds the limits."""
    is_full: bool
    """Whether that frame exceeds the byte limit."""
    is_cut: bool
    """Whether the next frame is not, or not completely, in the buffer."""


def take_runs(
    seed: int, raw: bytes, shard: int, base_offset: int, end: int, records_max: int, bytes_max: int, cut: Cut | None
) -> Taken:
    """Return the plain frames of a shard from `base_offset` to below `end`, as far as `raw` and the limits allow."""
    size = len(raw)
    runs: list[Run] = []
    begins: list[int] = []
    front = b""
    count = body_bytes = frame_data_bytes = 0
    at = records = data_bytes = 0
    is_irregular = is_next = is_full = is_cut = False
    expected = base_offset
    while expected < end:
        begin = at + HEADER_BYTES
        if begin > size:
            is_cut = True
            break
        magic, header_crc, body_crc, length, of, base, claimed, last_delta, _, largest_ms, _, rest = _unpack(raw, at)
        if base != expected or of != shard or (rest != COLUMNAR and rest != _AWAITED) or magic != MAGIC:
            break
        if largest_ms > TIMESTAMP_MS_MAX:
            break
        if begin + length > size:
            is_cut = True
            break
        if header_crc != _extend(seed, raw[at + 8 : begin]):
            break
        if _crc32c(raw[begin : begin + length] if cut is None else cut(begin, length)) != body_crc:
            break
        if not front or not raw.startswith(front, begin):
            try:
                count, extents, body_bytes, frame_data_bytes = directory_of(raw, begin)
            except CorruptionError:
                break
            front = raw[begin : begin + directory_bytes(len(extents))]
            is_irregular = EXPIRIES in extents or OFFSET_DELTAS in extents
            begins = []
            runs.append(Run(raw, base, count, extents, body_bytes, begins))
        if is_irregular or count != claimed or last_delta != count - 1 or body_bytes != length:
            break
        records += count
        data_bytes += frame_data_bytes
        if records > records_max or data_bytes > bytes_max:
            is_next = True
            is_full = records <= records_max
            records -= count
            data_bytes -= frame_data_bytes
            break
        begins.append(begin)
        expected += count
        at = begin + length + (-length & 7)
    if runs and not begins:
        runs.pop()
    return Taken(runs, expected, at, records, data_bytes, is_next, is_full, is_cut)
