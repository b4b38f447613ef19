"""Reading RocksDB rows of one moment: a cursor, and the snapshot made of cursors.

An iterator of `rocksdict` honours the moment it was made. A scan owns one; a snapshot has one per family and seeks it
again for every read, so that gets and any number of scans can interleave on it. Rows are fetched in chunks under the
cursor's lock: the first chunk is one row, because many scans want no more, and each next one twice as long. A chunk is
bounded in bytes too, so that a scan over large values holds at most one value more than the bound.

The database stays open while any iterator lives. So a cursor never lets its iterator out: `close` waits for the chunk
under way and drops it, and no error carries a frame that still holds it.

`Rdict.items` is faster by a third, but ends silently at a damaged block. So a `Run` of it is for whoever wants a number
of rows, and where it ends before that a cursor has to say that there is nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from rocksdict import RdictIter

from basaltmq.errors import BasaltError, StorageError, StoreClosedError
from basaltmq.store.families import Family
from basaltmq.store.ranges import Piece
from basaltmq.store.rocks_errors import translate

CHUNK_ROWS_MAX: Final = 256
"""Past this the lock's cost per row is no longer seen."""

CHUNK_BYTES_MAX: Final = 1 << 20
"""Values a scan holds ahead of its reader."""


RUN_ROWS: Final = 50
"""Rows of a run between two looks at their size: a row of the queues has 4 KiB as a rule, and 2 MiB at most. A piece of
the usual hundred takes two."""

WASTED_MAX: Final = 8
"""Rows between two ranges that a run reads in vain: beyond that a seek is cheaper."""

SKIPPED_MAX: Final = 4096
"""Deleted rows stepped over between two rows, where many ranges are read in one pass: half a millisecond."""


class Owner(Protocol):
    """The store a cursor reads from."""

    path: Path

    def require_open(self) -> None: ...


class Cursor:
    """One family at one moment."""

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
            # The frame of an error outlives the read; it must not keep the iterator.
            del native
        if fault is not None:
            raise fault
        return None

    def scan_once(self, start: bytes, end: bytes | None, *, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        """The only scan of this cursor; the cursor is closed when it ends."""
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
        """One of many scans: seeks again for every chunk."""
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
        """The first rows of ranges that ascend, as `ranges.read_ranges` tells them."""
        self._owner.require_open()
        found: list[list[tuple[bytes, bytes]] | None] = []
        fault: BasaltError | None = None
        with self._lock:
            native = self._require()
            valid, key_of, value_of, forth = native.valid, native.key, native.value, native.next
            # The row the iterator is at; empty when it has to seek, None when it is at the end.
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
                    forth()
                    key = key_of() if valid() else None
                if key is not None:
                    found.append(rows)
                    continue
                fault = _fault(native, self._owner.path)
                if fault is None:
                    found.append(rows)
                elif "incomplete" in str(fault.__cause__).lower():
                    # Too much was deleted here. The next range begins with a seek, behind it.
                    fault, key = None, b""
                    found.append(None)
                else:
                    break
            del native, valid, key_of, value_of, forth
        if fault is not None:
            raise fault
        return found

    def close(self) -> None:
        with self._lock:
            self._iter = None

    def _read(
        self, start: bytes, end: bytes | None, *, reverse: bool, rows_max: int, seek: bool
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        """The next chunk, and whether there may be more."""
        self._owner.require_open()
        rows: list[tuple[bytes, bytes]] = []
        with self._lock:
            native = self._require()
            if seek:
                _seek(native, start, end, reverse)
            forth = native.prev if reverse else native.next
            room = CHUNK_BYTES_MAX
            while native.valid():
                key = native.key()
                if key < start if reverse else end is not None and key >= end:
                    return rows, False
                value = native.value()
                rows.append((key, value))
                forth()
                room -= len(key) + len(value)
                if len(rows) >= rows_max or room <= 0:
                    return rows, True
            fault = _fault(native, self._owner.path)
            del native, forth
        if fault is not None and not rows:
            raise fault
        # The rows before a fault are handed out; the next read meets it again.
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
    """An iterator that is not valid has come to the end, or met a fault."""
    try:
        native.status()
    except Exception as error:
        fault = translate(error, path)
        fault.__cause__ = error.with_traceback(None)
        return fault
    return None


class Run:
    """Rows of a range from its beginning, many at a time."""

    __slots__ = ("__weakref__", "_items", "_lock", "_owner")

    def __init__(self, owner: Owner, items: Iterator[tuple[bytes, bytes]]) -> None:
        self._owner = owner
        self._items: Iterator[tuple[bytes, bytes]] | None = items
        self._lock = threading.Lock()

    def read(self, rows_max: int, bytes_max: int, piece_rows: int) -> tuple[list[Piece], bool]:
        """Up to `rows_max` rows, fewer if they reach `bytes_max`; and False if it ended before either."""
        pieces: list[Piece] = []
        with self._lock:
            if self._items is None:
                self._owner.require_open()
                raise StoreClosedError("the store was closed while it was read")
            items = self._items
            while rows_max > 0 and bytes_max > 0:
                piece = Piece([], [], [])
                room = min(piece_rows, rows_max)
                while room > 0 and bytes_max > 0:
                    asked = min(RUN_ROWS, room)
                    # What becomes columns at once is no matter for the garbage collector.
                    some = list(islice(items, asked))
                    bytes_max -= piece.add(some)
                    room -= asked
                    rows_max -= asked
                    if len(some) < asked:
                        if piece.keys:
                            pieces.append(piece)
                        return pieces, False
                pieces.append(piece)
        return pieces, True

    def read_ranges(
        self, ranges: Sequence[tuple[bytes, bytes, int]], bytes_max: int
    ) -> tuple[list[list[tuple[bytes, bytes]]], int]:
        """The first rows of ranges that ascend, as long as they are neighbours and it is known that each is whole; and
        what is left of `bytes_max`. A cursor goes on from there."""
        found: list[list[tuple[bytes, bytes]]] = []
        with self._lock:
            if self._items is None:
                self._owner.require_open()
                raise StoreClosedError("the store was closed while it was read")
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


class RocksSnapshot:
    """Some families at one moment."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _of(self, family: Family) -> Cursor:
        self._owner.require_open()
        if self._closed:
            raise StoreClosedError("the snapshot is closed")
        try:
            return self._cursors[family]
        except KeyError:
            raise StorageError(f"the snapshot was not made for family {family.label}") from None
