"""Reads RocksDB rows as of one point in time: cursors, runs, and the snapshot made of cursors.

A `rocksdict` iterator is consistent as of its creation. A scan owns one iterator. A snapshot has one per family and
seeks it for every read, so that gets and any number of scans can interleave. Rows are read in chunks under the cursor's
lock. The first chunk is one row, because many scans need no more; each following chunk is twice as long. A chunk is
also bounded in bytes, so a scan over large values buffers at most one value beyond the bound.

The database stays open while any iterator exists. So a cursor never exposes its iterator: `close` waits for the current
chunk and drops the iterator, and no error carries a stack frame that references it.

`Rdict.items` is faster by a third, but ends without an error at a damaged block. So `Run` uses it only to read a known
number of rows. If it returns fewer, a cursor must confirm that no more rows exist.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

from rocksdict import RdictIter

from basaltmq.errors import BasaltError, StorageError, StoreClosedError
from basaltmq.store.api import Snapshot
from basaltmq.store.families import Family
from basaltmq.store.ranges import Piece
from basaltmq.store.rocks_errors import translate

CHUNK_ROWS_MAX: Final = 256
"""Larger chunks no longer reduce the cost of the lock per row measurably."""

CHUNK_BYTES_MAX: Final = 1 << 20
"""Bytes of values that a scan reads ahead."""

RUN_ROWS: Final = 50
"""Rows that a run reads between two size checks. A queue row has typically 4 KiB and at most 2 MiB. A piece of the
usual 100 rows needs two reads."""

WASTED_MAX: Final = 8
"""Rows between two ranges that a run may skip. Beyond that a seek is cheaper."""

SKIPPED_MAX: Final = 4096
"""Tombstones that a read of many ranges may skip between two rows: about 0.5 ms."""


class Owner(Protocol):
    """The store a cursor reads from."""

    path: Path

    def require_open(self) -> None: ...


class Cursor:
    """Reads one family as of one point in time."""

    __slots__ = ("__weakref__", "_iter", "_lock", "_owner", "reached")

    def __init__(self, owner: Owner, native: RdictIter) -> None:
        self._owner = owner
        self.reached: bytes | None = None
        """The last key that `scan_once` read."""
        self._iter: RdictIter | None = native
        self._lock = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        self._owner.require_open()
        with self._lock:
            native = self._require()
            native.seek(key)
            if native.valid():
                value: bytes | None = native.value() if native.key() == key else None
                return value
            fault = _fault(native, self._owner.path)
            # The stack frame of an error outlives the read and must not keep the iterator alive.
            del native
        if fault is not None:
            raise fault
        return None

    def scan_once(self, start: bytes, end: bytes | None, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """Yield the only scan of this cursor, then close the cursor."""
        rows_max, seek, more = 1, True, True
        try:
            while more:
                rows, more = self._read(start, end, reverse=reverse, rows_max=rows_max, seek=seek)
                if rows:
                    self.reached = rows[-1][0]
                yield from rows
                rows_max, seek = min(2 * rows_max, CHUNK_ROWS_MAX), False
        finally:
            self.close()

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """Yield one of many scans: seek again for every chunk."""
        rows_max, more = 1, True
        while more:
            rows, more = self._read(start, end, reverse=reverse, rows_max=rows_max, seek=True)
            yield from rows
            rows_max = min(2 * rows_max, CHUNK_ROWS_MAX)
            if rows and reverse:
                end = rows[-1][0]
            elif rows:
                start = rows[-1][0] + b"\0"

    def read_ranges(
        self, ranges: Sequence[tuple[bytes, bytes, int]], bytes_max: int
    ) -> list[list[tuple[bytes, bytes]] | None]:
        """Return the first rows of ascending ranges (see `ranges.read_ranges`)."""
        self._owner.require_open()
        found: list[list[tuple[bytes, bytes]] | None] = []
        fault: BasaltError | None = None
        with self._lock:
            native = self._require()
            valid, key_of, value_of, step = native.valid, native.key, native.value, native.next
            # The key at the iterator's position: empty if a seek is required, None at the end.
            key: bytes | None = b""
            for start, end, rows_max in ranges:
                if bytes_max <= 0:
                    break
                rows: list[tuple[bytes, bytes]] = []
                if key is not None and key < start:
                    native.seek(start)
                    key = key_of() if valid() else None
                while key is not None and key < end and len(rows) < rows_max:
                    value = value_of()
                    rows.append((key, value))
                    bytes_max -= len(key) + len(value)
                    step()
                    key = key_of() if valid() else None
                if key is not None:
                    found.append(rows)
                    continue
                fault = _fault(native, self._owner.path)
                if fault is None:
                    found.append(rows)
                elif "incomplete" in str(fault.__cause__).lower():
                    # Too many tombstones here. The next range starts with a seek beyond them.
                    fault, key = None, b""
                    found.append(None)
                else:
                    break
            del native, valid, key_of, value_of, step
        if fault is not None:
            raise fault
        return found

    def close(self) -> None:
        with self._lock:
            self._iter = None

    def _read(
        self, start: bytes, end: bytes | None, *, reverse: bool, rows_max: int, seek: bool
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return the next chunk, and whether more rows may follow."""
        self._owner.require_open()
        rows: list[tuple[bytes, bytes]] = []
        with self._lock:
            native = self._require()
            if seek:
                _seek(native, start, end, reverse)
            step = native.prev if reverse else native.next
            room = CHUNK_BYTES_MAX
            while native.valid():
                key = native.key()
                if key < start if reverse else end is not None and key >= end:
                    return rows, False
                value = native.value()
                rows.append((key, value))
                step()
                room -= len(key) + len(value)
                if len(rows) >= rows_max or room <= 0:
                    return rows, True
            fault = _fault(native, self._owner.path)
            del native, step
        if fault is not None and not rows:
            raise fault
        # Return the rows before a fault. The next read meets it again and raises.
        return rows, fault is not None

    def _require(self) -> RdictIter:
        if self._iter is None:
            self._owner.require_open()
            raise StoreClosedError("the snapshot is closed")
        return self._iter


def _seek(native: RdictIter, start: bytes, end: bytes | None, reverse: bool) -> None:
    if not reverse:
        native.seek(start)
    elif end is None:
        native.seek_to_last()
    else:
        native.seek_for_prev(end)
        if native.valid() and native.key() == end:
            native.prev()


def _fault(native: RdictIter, path: Path) -> BasaltError | None:
    """Return the error of an iterator that is no longer valid, None if it reached the end."""
    try:
        native.status()
    except Exception as error:
        fault = translate(error, path)
        fault.__cause__ = error.with_traceback(None)
        return fault
    return None


class Run:
    """Reads the first rows of a range, many at a time."""

    __slots__ = ("__weakref__", "_items", "_lock", "_owner")

    def __init__(self, owner: Owner, items: Iterator[tuple[bytes, bytes]]) -> None:
        self._owner = owner
        self._items: Iterator[tuple[bytes, bytes]] | None = items
        self._lock = threading.Lock()

    def read(self, rows_max: int, bytes_max: int, piece_rows: int) -> tuple[list[Piece], bool]:
        """Return up to `rows_max` rows, fewer after `bytes_max`, and False if the range ended before either limit."""
        pieces: list[Piece] = []
        with self._lock:
            if self._items is None:
                self._owner.require_open()
                raise StoreClosedError("the store was closed during a read")
            items = self._items
            while rows_max > 0 and bytes_max > 0:
                piece = Piece([], [], [])
                room = min(piece_rows, rows_max)
                while room > 0 and bytes_max > 0:
                    requested = min(RUN_ROWS, room)
                    # Rows become columns at once, so the garbage collector does not track them.
                    rows = list(islice(items, requested))
                    bytes_max -= piece.add(rows)
                    room -= requested
                    rows_max -= requested
                    if len(rows) < requested:
                        if piece.keys:
                            pieces.append(piece)
                        return pieces, False
                pieces.append(piece)
        return pieces, True

    def read_ranges(
        self, ranges: Sequence[tuple[bytes, bytes, int]], bytes_max: int
    ) -> tuple[list[list[tuple[bytes, bytes]]], int]:
        """Return the first rows of ascending, adjacent ranges, as far as each is known to be complete, and the rest of
        `bytes_max`. A cursor continues from there."""
        found: list[list[tuple[bytes, bytes]]] = []
        with self._lock:
            if self._items is None:
                self._owner.require_open()
                raise StoreClosedError("the store was closed during a read")
            following = iter(ranges)
            start, end, rows_max = next(following)
            rows: list[tuple[bytes, bytes]] = []
            wasted = 0
            for row in self._items:
                key = row[0]
                while key >= end:
                    found.append(rows)
                    following_range = next(following, None)
                    if following_range is None or bytes_max <= 0:
                        return found, bytes_max
                    start, end, rows_max = following_range
                    rows, wasted = [], 0
                if key < start or len(rows) == rows_max:
                    wasted += 1
                    if wasted > WASTED_MAX:
                        break
                    continue
                rows.append(row)
                bytes_max -= len(key) + len(row[1])
        return found, bytes_max

    def close(self) -> None:
        with self._lock:
            self._items = None


class RocksSnapshot(Snapshot):
    """Some families as of one point in time."""

    def __init__(self, owner: Owner, cursors: dict[Family, Cursor]) -> None:
        self._owner = owner
        self._cursors = cursors
        self._closed = False

    def get(self, family: Family, key: bytes) -> bytes | None:
        return self._of(family).get(key)

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        get = self._of(family).get
        return [get(key) for key in keys]

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._of(family)
        if end is not None and start >= end:
            return iter(())
        return cursor.scan(start, end, reverse=reverse)

    def close(self) -> None:
        self._closed = True
        for cursor in self._cursors.values():
            cursor.close()

    def _of(self, family: Family) -> Cursor:
        self._owner.require_open()
        if self._closed:
            raise StoreClosedError("the snapshot is closed")
        try:
            return self._cursors[family]
        except KeyError:
            raise StorageError(f"the snapshot does not include family {family.label}") from None
