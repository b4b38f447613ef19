"""A run: frames of one shard that follow one another in the log and are laid out alike, left where they were read.

A reader that goes through a shard in order mostly meets plain batches of one producer, end to end. `take_runs` checks
them one by one, checksums included, and keeps only where each begins; objects per frame are made when somebody asks
for them, objects per record only for records. Arrow takes a run column by column (see `arrow`).

Anything out of the ordinary ends the taking: another shard, a gap, a copy made by cleaning, damage, a frame cut off by
the end of what was read, a body with expiries or holes, a time above TIMESTAMP_MS_MAX. What it is, is for the caller
to find out with care.

Invariants: frames of a run are dense, so the base offset of each follows from the first; all have the same directory,
which was checked; no frame reaches past `end`, and what was taken is within the limits given. Budget: 1.3 us per frame
beside its checksum.
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
"""(begin, length) of what was read, given to the checksum without a copy; see `arrow.cutter`."""

_TIMES: Final = Struct("<qq")
_TIMES_AT: Final = 40 - HEADER_BYTES
"""Least and largest time of a frame, seen from where its body begins."""

_AWAITED: Final = COLUMNAR | AWAITED << 8
"""What follows the times of a header of records that were waited for."""

_unpack = PLAIN_HEADER.unpack_from
_crc32c = google_crc32c.value
_extend = google_crc32c.extend


class Run:
    """Dense frames of the same layout in one piece of memory."""

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
        """Where the frames' bodies begin in `source`."""

    def __len__(self) -> int:
        return self.frame_records * len(self.begins)

    def batches(self) -> Iterator[tuple[int, ColumnBatch]]:
        """Each frame with its base offset."""
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
    """What `take_runs` found."""

    runs: list[Run]
    next_offset: int
    size_bytes: int
    """Of the memory gone through."""
    records: int
    data_bytes: int
    """Values, keys, tags and headers together."""
    is_next: bool
    """A whole plain frame of the shard comes next, and is over the limits."""
    is_full: bool
    """It has more bytes than were left."""
    is_cut: bool
    """What comes next was not read, or not to its end."""


def take_runs(
    seed: int, raw: bytes, shard: int, base_offset: int, end: int, records_max: int, bytes_max: int, cut: Cut | None
) -> Taken:
    """The plain frames of a shard from `base_offset` to below `end`, as many as `raw` begins with and limits allow."""
    size = len(raw)
    runs: list[Run] = []
    begins: list[int] = []
    front = b""
    count = body_bytes = frame_data_bytes = 0
    at = records = data_bytes = 0
    is_odd = is_next = is_full = is_cut = False
    expected = base_offset
    while expected < end:
        begin = at + HEADER_BYTES
        if begin > size:
            is_cut = True
            break
        magic, header_crc, body_crc, length, of, base, said, last_delta, _, largest_ms, _, rest = _unpack(raw, at)
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
            is_odd = EXPIRIES in extents or OFFSET_DELTAS in extents
            begins = []
            runs.append(Run(raw, base, count, extents, body_bytes, begins))
        if is_odd or count != said or last_delta != count - 1 or body_bytes != length:
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
