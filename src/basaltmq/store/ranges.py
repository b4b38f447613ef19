"""The first rows of many small ranges at once, in one pass over the disk.

A scan each would pay for an iterator each, which costs more than the few rows it is for. A store that can do it with
one iterator says so by being a `RangeReader`; of every other one the ranges are scanned one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol, TypeAlias, runtime_checkable

from basaltmq.store.api import Reader
from basaltmq.store.families import Family

Row: TypeAlias = tuple[bytes, bytes]
Range: TypeAlias = tuple[bytes, bytes, int]
"""The first key, the one behind the last, and how many rows of it are wanted."""


@runtime_checkable
class RangeReader(Protocol):
    """A store that reads many ranges in one pass."""

    def read_ranges(self, family: Family, ranges: Sequence[Range], bytes_max: int) -> list[list[Row] | None]: ...


def read_ranges(store: Reader, family: Family, ranges: Sequence[Range], bytes_max: int) -> list[list[Row] | None]:
    """The first rows of each range; the ranges ascend and do not overlap.

    A range of which fewer rows are told than wanted has no more. None stands for one that was not read, because so much
    was deleted around it that it would hold up the others. When `bytes_max` is reached the rest is left out.
    """
    if isinstance(store, RangeReader):
        return store.read_ranges(family, ranges, bytes_max)
    found: list[list[Row] | None] = []
    for start, end, rows_max in ranges:
        if bytes_max <= 0:
            break
        rows = list(islice(store.scan(family, start, end), rows_max))
        bytes_max -= sum([len(key) + len(value) for key, value in rows])
        found.append(rows)
    return found
