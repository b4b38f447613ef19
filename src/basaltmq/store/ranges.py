"""Rows in bulk: the first of one range, or of many small ones in one pass over the disk.

A scan hands out row by row what may be given up at any of them; whoever knows how much it wants is served for half the
price. For many ranges a scan each would pay for an iterator each, which costs more than the few rows it is for. A
store that can do better says so by being a `RangeReader`; every other one is scanned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple, Protocol, TypeAlias, cast

from basaltmq.store.api import Reader
from basaltmq.store.families import Family

Row: TypeAlias = tuple[bytes, bytes]
Range: TypeAlias = tuple[bytes, bytes, int]
"""The first key, the one behind the last, and how many rows of it are wanted."""

_KEY: Final = itemgetter(0)
_VALUE: Final = itemgetter(1)


class Piece(NamedTuple):
    """Rows as columns, as many in one as the reader asked for: nobody makes an object of each, or counts them again."""

    keys: list[bytes]
    values: list[bytes]
    sizes: list[int]
    """Bytes of the values."""

    def add(self, rows: Sequence[Row]) -> int:
        """Take rows in behind those there are; the bytes of their values."""
        values = list(map(_VALUE, rows))
        sizes = list(map(len, values))
        self.keys.extend(map(_KEY, rows))
        self.values.extend(values)
        self.sizes.extend(sizes)
        return sum(sizes)


class RangeReader(Protocol):
    """A store that reads in bulk."""

    def read_pieces(
        self, family: Family, start: bytes, end: bytes, rows_max: int, bytes_max: int, piece_rows: int
    ) -> tuple[list[Piece], bool]: ...

    def read_ranges(self, family: Family, ranges: Sequence[Range], bytes_max: int) -> list[list[Row] | None]: ...


def read_pieces(
    store: Reader, family: Family, start: bytes, end: bytes, rows_max: int, bytes_max: int, piece_rows: int
) -> tuple[list[Piece], bool]:
    """The first rows of a range, up to `rows_max`, in pieces of `piece_rows`, and whether there may be more.

    No piece is empty, and only the last is shorter. Reading ends with the row whose value reaches `bytes_max`, or a few
    rows later.
    """
    reader = _reader(store)
    if reader is not None:
        return reader.read_pieces(family, start, end, rows_max, bytes_max, piece_rows)
    pieces: list[Piece] = []
    scan = iter(store.scan(family, start, end))
    for _ in range(rows_max):
        if bytes_max <= 0:
            break
        row = next(scan, None)
        if row is None:
            return pieces, False
        if not pieces or len(pieces[-1].keys) == piece_rows:
            pieces.append(Piece([], [], []))
        bytes_max -= pieces[-1].add([row])
    return pieces, True


def read_ranges(store: Reader, family: Family, ranges: Sequence[Range], bytes_max: int) -> list[list[Row] | None]:
    """The first rows of each range; the ranges ascend and do not overlap.

    A range of which fewer rows are told than wanted has no more. None stands for one that was not read, because so much
    was deleted around it that it would hold up the others. When `bytes_max` is reached the rest is left out.
    """
    reader = _reader(store)
    if reader is not None:
        return reader.read_ranges(family, ranges, bytes_max)
    found: list[list[Row] | None] = []
    for start, end, rows_max in ranges:
        if bytes_max <= 0:
            break
        rows = list(islice(store.scan(family, start, end), rows_max))
        bytes_max -= sum([len(key) + len(value) for key, value in rows])
        found.append(rows)
    return found


def _reader(store: Reader) -> RangeReader | None:
    # Asked for every read: a look at the protocol as a whole would cost more than some of the reads.
    return cast(RangeReader, store) if hasattr(store, "read_ranges") else None
