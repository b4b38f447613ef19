"""The store in memory: behaves like the RocksDB store, but its data is lost at close.

Each family is a sorted dict that scans and snapshots share. The first write to a family with active readers copies it,
so readers keep their state and writers never wait. The copy is O(rows): use this store for tests, for the `memory`
durability level and for small embedded use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from sortedcontainers import SortedDict

from basaltmq.errors import (
    InvalidArgumentError,
    InvalidConfigError,
    LimitExceededError,
    StorageError,
    StoreClosedError,
    StorePoisonedError,
    UnknownOptionError,
)
from basaltmq.store.api import Snapshot
from basaltmq.store.batch import BATCH_BYTES_MAX, DELETE, PUT, Batch
from basaltmq.store.families import Family


class _Rows:
    """Rows of one family. Readers keep a reference to the object they started with."""

    __slots__ = ("__weakref__", "data", "readers", "size_bytes")

    def __init__(self, data: SortedDict[bytes, bytes] | None = None, size_bytes: int = 0) -> None:
        self.data: SortedDict[bytes, bytes] = SortedDict() if data is None else data
        self.size_bytes = size_bytes
        self.readers: weakref.WeakSet[_Scan | MemorySnapshot] = weakref.WeakSet()

    def put(self, key: bytes, value: bytes) -> None:
        old = self.data.get(key)
        self.size_bytes += len(value) - len(old) if old is not None else len(key) + len(value)
        self.data[key] = value

    def delete(self, key: bytes) -> None:
        old = self.data.pop(key, None)
        if old is not None:
            self.size_bytes -= len(key) + len(old)

    def delete_range(self, start: bytes, end: bytes) -> None:
        for key in list(self.data.irange(start, end, inclusive=(True, False))):
            self.delete(key)


class _Scan:
    """An iterator over a family as of its creation."""

    __slots__ = ("__weakref__", "_data", "_keys", "_store")

    def __init__(self, store: MemoryStore, rows: _Rows, start: bytes, end: bytes | None, reverse: bool) -> None:
        self._store = store
        self._data = rows.data
        self._keys = self._data.irange(start, end, inclusive=(True, False), reverse=reverse)
        rows.readers.add(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[bytes, bytes]:
        self._store.require_open()
        key = next(self._keys)
        return key, self._data[key]


class MemoryStore:
    """A `ManagedStore` without a disk."""

    def __init__(self) -> None:
        self._rows = [_Rows() for _ in Family]
        # Reads take the lock too, so that they see a batch completely or not at all.
        self._lock = threading.Lock()
        self._error: StorageError | None = None
        self._wrote: Callable[[int], None] | None = None
        self._writes = 0

    def get(self, family: Family, key: bytes) -> bytes | None:
        with self._lock:
            self.require_open()
            value: bytes | None = self._rows[family].data.get(key)
        return value

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            self.require_open()
            get = self._rows[family].data.get
            return [get(key) for key in keys]

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            self.require_open()
            if end is not None and start >= end:
                return iter(())
            return _Scan(self, self._rows[family], start, end, reverse)

    def snapshot(self, *families: Family) -> MemorySnapshot:
        with self._lock:
            self.require_open()
            return MemorySnapshot(self, {family: self._rows[family] for family in families})

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        size_bytes = checked_size_bytes(batch)
        if size_bytes > BATCH_BYTES_MAX:
            raise LimitExceededError(f"a batch of {size_bytes} bytes is over the limit of {BATCH_BYTES_MAX}; split it")
        with self._lock:
            self.require_open()
            self._writes += 1
            for kind, family, key, value in batch.ops:
                rows = self._rows[family]
                if rows.readers:
                    rows = self._rows[family] = _Rows(rows.data.copy(), rows.size_bytes)
                if kind == PUT:
                    rows.put(key, value)
                elif kind == DELETE:
                    rows.delete(key)
                elif key < value:
                    rows.delete_range(key, value)
        if self._wrote is not None:
            self._wrote(size_bytes)

    def on_write(self, listener: Callable[[int], None]) -> None:
        self._wrote = listener

    def sync(self) -> None:
        self.require_open()

    def size_bytes(self) -> int:
        with self._lock:
            self.require_open()
            return sum(rows.size_bytes for rows in self._rows)

    def writes(self) -> int:
        with self._lock:
            return self._writes

    def has_unreadable(self, family: Family) -> bool:
        return False

    def is_behind(self) -> bool:
        self.require_open()
        return False

    def poison(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = StorePoisonedError(f"the store in memory stopped after an error; open it again: {error}")

    def close(self) -> None:
        with self._lock:
            self._error = StoreClosedError("the store in memory is closed")
            self._rows = [_Rows() for _ in Family]

    def set_options(self, options: Mapping[str, str], family: Family | None = None) -> None:
        self.require_open()
        for name in options:
            raise UnknownOptionError(f"the memory store has no option {name!r}")

    def flush(self, family: Family | None = None, *, wait: bool = True) -> None:
        self.require_open()

    def compact(self, family: Family | None = None) -> None:
        self.require_open()

    def properties(self, family: Family | None = None) -> dict[str, int]:
        with self._lock:
            self.require_open()
            chosen = self._rows if family is None else [self._rows[family]]
            return {
                "estimated-rows": sum(len(rows.data) for rows in chosen),
                "memtable-bytes": sum(rows.size_bytes for rows in chosen),
            }

    def statistics(self) -> dict[str, str]:
        self.require_open()
        raise InvalidConfigError("the memory store keeps no statistics")

    def checkpoint(self, target: Path, *, add_files: Callable[[Path], None] | None = None) -> None:
        self.require_open()
        raise StorageError("a store in memory has no files for a checkpoint; use a store on disk")

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[str]:
        self.require_open()
        return []

    def require_open(self) -> None:
        """Raise the store's error, if any: a new object each time, because a shared one would collect tracebacks."""
        error = self._error
        if error is not None:
            raise type(error)(*error.args)


def checked_size_bytes(batch: Batch) -> int:
    """Return the size of a batch. Raise before any row is applied if a key or value is not bytes."""
    size_bytes = 0
    for _, _, key, value in batch.ops:
        if type(key) is not bytes or type(value) is not bytes:
            culprit = value if type(key) is bytes else key
            raise InvalidArgumentError(
                f"a batch takes keys and values of type bytes only, not {type(culprit).__name__}"
            )
        size_bytes += len(key) + len(value)
    return size_bytes


class MemorySnapshot(Snapshot):
    """Some families as of one point in time."""

    def __init__(self, store: MemoryStore, rows: dict[Family, _Rows]) -> None:
        self._store = store
        self._rows = rows
        self._closed = False
        for each in rows.values():
            each.readers.add(self)

    def get(self, family: Family, key: bytes) -> bytes | None:
        value: bytes | None = self._of(family).data.get(key)
        return value

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        get = self._of(family).data.get
        return [get(key) for key in keys]

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        rows = self._of(family)
        if end is not None and start >= end:
            return iter(())
        return self._rows_of(_Scan(self._store, rows, start, end, reverse), family)

    def _rows_of(self, scan: _Scan, family: Family) -> Iterator[tuple[bytes, bytes]]:
        for row in scan:
            self._of(family)
            yield row

    def close(self) -> None:
        self._closed = True
        for rows in self._rows.values():
            rows.readers.discard(self)

    def _of(self, family: Family) -> _Rows:
        self._store.require_open()
        if self._closed:
            raise StoreClosedError("the snapshot is closed")
        try:
            return self._rows[family]
        except KeyError:
            raise StorageError(f"the snapshot does not include family {family.label}") from None
