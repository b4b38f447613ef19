"""A batch: row operations that the store applies atomically.

A batch is a list of plain tuples, so adding a row costs one list append. Both stores, the XA records and the tests read
the same list. Order matters: the last operation on a key wins.

`put_many` and `delete_many` take hundreds of rows as columns, without a tuple per row. Columns are stored next to the
list with their position in it, and RocksStore writes them directly. Reading `ops` merges them into the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from basaltmq.store.families import Family

PUT: Final = 0
DELETE: Final = 1
DELETE_RANGE: Final = 2

Operation: TypeAlias = tuple[int, Family, bytes, bytes]
"""(kind, family, key, value). The value is empty for DELETE and the exclusive end of the range for DELETE_RANGE."""

BATCH_BYTES_MAX: Final = 256 << 20
"""Size limit of one batch: two messages of 128 MiB. RocksDB holds rows of a batch twice in memory."""


class Columns(NamedTuple):
    """Rows of one family to put or delete."""

    at: int
    """The number of list operations that precede these rows."""
    family: Family
    keys: Sequence[bytes]
    values: Sequence[bytes] | None
    """None deletes the rows."""


class Batch:
    """Operations over any families, written atomically."""

    __slots__ = ("_columns", "_ops")

    def __init__(self) -> None:
        self._ops: list[Operation] = []
        self._columns: list[Columns] = []

    @property
    def ops(self) -> list[Operation]:
        """All operations in order, one tuple per row."""
        if self._columns:
            self._ops = self._unfolded()
            self._columns = []
        return self._ops

    @ops.setter
    def ops(self, operations: list[Operation]) -> None:
        self._ops = operations
        self._columns = []

    def parts(self) -> tuple[list[Operation], list[Columns]]:
        """Return the list operations and the columns, without merging them."""
        return self._ops, self._columns

    def __len__(self) -> int:
        return len(self._ops) + sum([len(columns.keys) for columns in self._columns])

    def __bool__(self) -> bool:
        return bool(self._ops or self._columns)

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        self._ops.append((PUT, family, key, value))

    def put_many(self, family: Family, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Put rows. `keys` and `values` have the same length and must not change afterwards."""
        assert len(keys) == len(values), "every row has a key and a value"
        if keys:
            self._columns.append(Columns(len(self._ops), family, keys, values))

    def put_or_delete(self, rows: Iterable[tuple[Family, bytes, bytes | None]]) -> None:
        """Put rows, and delete those without a value."""
        for family, key, value in rows:
            self._ops.append((DELETE, family, key, b"") if value is None else (PUT, family, key, value))

    def delete(self, family: Family, key: bytes) -> None:
        self._ops.append((DELETE, family, key, b""))

    def delete_many(self, family: Family, keys: Sequence[bytes]) -> None:
        """Delete rows. `keys` must not change afterwards."""
        if keys:
            self._columns.append(Columns(len(self._ops), family, keys, None))

    def delete_range(self, family: Family, start: bytes, end: bytes) -> None:
        """Delete every key in [start, end). The range is empty unless start < end."""
        self._ops.append((DELETE_RANGE, family, start, end))

    def extend(self, other: Batch) -> None:
        self.ops.extend(other.ops)

    def size_bytes(self) -> int:
        """Return the size of keys and values, without the store's overhead."""
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
