"""A batch: the typed operations of one change, applied together or not at all.

A batch is a list of plain tuples, not of objects: building one costs an append per row, and both stores, the XA
records and the tests read the same list. Order counts: a later operation on a key wins.

Rows that come by the hundred can be handed over as columns (`put_many`, `delete_many`), without a tuple each. They are
kept beside the list, with their place in it, for the store that writes them straight from there; whoever asks for
`ops` has them in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from basaltmq.store.families import Family

PUT: Final = 0
DELETE: Final = 1
DELETE_RANGE: Final = 2

Operation: TypeAlias = tuple[int, Family, bytes, bytes]
"""(kind, family, key, value); DELETE has an empty value, DELETE_RANGE has the range's end (exclusive) there."""

BATCH_BYTES_MAX: Final = 256 << 20
"""One batch at most: a 64 MiB message with its index rows fits four times; RocksDB holds a batch in memory twice."""


class Columns(NamedTuple):
    """Rows of one family that are put, or deleted."""

    at: int
    """How many operations of the batch's list come before them."""
    family: Family
    keys: Sequence[bytes]
    values: Sequence[bytes] | None
    """None: the rows are deleted."""


class Batch:
    """Operations over any families, to be written as one."""

    __slots__ = ("_columns", "_ops")

    def __init__(self) -> None:
        self._ops: list[Operation] = []
        self._columns: list[Columns] = []

    @property
    def ops(self) -> list[Operation]:
        """All operations in their order, one by one."""
        if self._columns:
            self._ops = self._unfolded()
            self._columns = []
        return self._ops

    @ops.setter
    def ops(self, operations: list[Operation]) -> None:
        self._ops = operations
        self._columns = []

    def parts(self) -> tuple[list[Operation], list[Columns]]:
        """The operations as they were handed over: single ones, and columns with their places among them."""
        return self._ops, self._columns

    def __len__(self) -> int:
        return len(self._ops) + sum([len(columns.keys) for columns in self._columns])

    def __bool__(self) -> bool:
        return bool(self._ops or self._columns)

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        self._ops.append((PUT, family, key, value))

    def put_many(self, family: Family, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Put rows; neither of the two, which are of one length, may be changed afterwards."""
        assert len(keys) == len(values), "every row has a key and a value"
        if keys:
            self._columns.append(Columns(len(self._ops), family, keys, values))

    def delete(self, family: Family, key: bytes) -> None:
        self._ops.append((DELETE, family, key, b""))

    def delete_many(self, family: Family, keys: Sequence[bytes]) -> None:
        """Delete rows; the keys may not be changed afterwards."""
        if keys:
            self._columns.append(Columns(len(self._ops), family, keys, None))

    def delete_range(self, family: Family, start: bytes, end: bytes) -> None:
        """Delete every key in [start, end); none if the end does not come after the start."""
        self._ops.append((DELETE_RANGE, family, start, end))

    def extend(self, other: Batch) -> None:
        self.ops.extend(other.ops)

    def size_bytes(self) -> int:
        """Keys and values, without the store's own overhead."""
        return sum(len(key) + len(value) for _, _, key, value in self.ops)

    def _unfolded(self) -> list[Operation]:
        unfolded: list[Operation] = []
        done = 0
        for at, family, keys, values in self._columns:
            unfolded += self._ops[done:at]
            done = at
            if values is None:
                unfolded += [(DELETE, family, key, b"") for key in keys]
            else:
                unfolded += [(PUT, family, key, value) for key, value in zip(keys, values, strict=True)]
        return unfolded + self._ops[done:]
