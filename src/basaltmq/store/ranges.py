"""Bulk reads: the first rows of one range, or of many small ranges in one pass.

A scan returns single rows, because its reader may stop at any of them. A read of a known number of rows costs half as
much. A scan per small range would create an iterator per range, which costs more than the few rows. Stores that
implement `RangeReader` read in bulk; other stores are scanned.
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
"""(first key, key after the last, number of rows requested)"""

_KEY: Final = itemgetter(0)
_VALUE: Final = itemgetter(1)


class Piece(NamedTuple):
    """Rows as columns, so that readers need no object per row and need not measure the values again."""

    keys: list[bytes]
    values: list[bytes]
    sizes: list[int]
    """Sizes of the values in bytes."""

    def add(self, rows: Sequence[Row]) -> int:
        """Append rows and return the bytes of their values."""
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
    """Return the first rows of a range, up to `rows_max`, in pieces of `piece_rows`, and whether more may follow.

    No piece is empty, and only the last is shorter. Reading stops at the row whose value reaches `bytes_max`, or a few
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
    """Return the first rows of each range. The ranges ascend and do not overlap.

    A range with fewer rows than requested has no more rows. None marks a range that was skipped because too many
    tombstones surround it. Ranges after `bytes_max` is reached are omitted.
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
    # Runs for every read: an isinstance check against the protocol would cost more than some reads.
    return cast(RangeReader, store) if hasattr(store, "read_ranges") else None
