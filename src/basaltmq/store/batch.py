"""A batch: the typed operations of one change, applied together or not at all.

A batch is a list of plain tuples, not of objects: building one costs an append per row, and both stores, the XA
records and the tests read the same list. Order counts: a later operation on a key wins.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from basaltmq.store.families import Family

PUT: Final = 0
DELETE: Final = 1
DELETE_RANGE: Final = 2

Operation: TypeAlias = tuple[int, Family, bytes, bytes]
"""(kind, family, key, value); DELETE has an empty value, DELETE_RANGE has the range's end (exclusive) there."""

BATCH_BYTES_MAX: Final = 256 << 20
"""One batch at most: a 64 MiB message with its index rows fits four times; RocksDB holds a batch in memory twice."""


class Batch:
    """Operations over any families, to be written as one."""

    __slots__ = ("ops",)

    def __init__(self) -> None:
        self.ops: list[Operation] = []

    def __len__(self) -> int:
        return len(self.ops)

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        self.ops.append((PUT, family, key, value))

    def delete(self, family: Family, key: bytes) -> None:
        self.ops.append((DELETE, family, key, b""))

    def delete_range(self, family: Family, start: bytes, end: bytes) -> None:
        """Delete every key in [start, end); none if the end does not come after the start."""
        self.ops.append((DELETE_RANGE, family, start, end))

    def extend(self, other: Batch) -> None:
        self.ops.extend(other.ops)

    def size_bytes(self) -> int:
        """Keys and values, without the store's own overhead."""
        return sum(len(key) + len(value) for _, _, key, value in self.ops)
