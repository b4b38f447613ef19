"""How far a cursor reads ahead of its reader, measured with a counting iterator."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from rocksdict import RdictIter

from basaltmq.store.rocks_cursor import CHUNK_BYTES_MAX, CHUNK_ROWS_MAX, Cursor


class CountingIterator:
    """Endless rows 0, 1, 2 ... of one size. `read` is the number of values fetched."""

    def __init__(self, value_bytes: int) -> None:
        self._value = bytes(value_bytes)
        self._at = 0
        self.read = 0

    def seek(self, key: bytes) -> None:
        self._at = int.from_bytes(key[:8], "big") + (1 if len(key) > 8 else 0)

    def valid(self) -> bool:
        return True

    def key(self) -> bytes:
        return self._at.to_bytes(8, "big")

    def value(self) -> bytes:
        self.read += 1
        return self._value

    def next(self) -> None:
        self._at += 1

    def prev(self) -> None:
        self._at -= 1


class Owner:
    """A store that is always open."""

    path = Path("store")

    def require_open(self) -> None:
        return None


@pytest.mark.promise("P8")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("value_bytes", [0, 100, CHUNK_BYTES_MAX // 10, CHUNK_BYTES_MAX, 4 * CHUNK_BYTES_MAX])
def test_a_scan_reads_ahead_within_its_limits_in_rows_and_bytes(value_bytes: int, shared: bool) -> None:
    native = CountingIterator(value_bytes)
    cursor = Cursor(Owner(), cast(RdictIter, native))
    scan = (cursor.scan if shared else cursor.scan_once)(b"", None, reverse=False)
    row_bytes = 8 + value_bytes
    ahead_max = 0
    for taken in range(1, 1500):
        assert next(scan)[0] == (taken - 1).to_bytes(8, "big")
        ahead_max = max(ahead_max, native.read - taken)
    assert ahead_max < CHUNK_ROWS_MAX
    assert ahead_max * row_bytes <= CHUNK_BYTES_MAX
    if value_bytes <= 100:
        assert ahead_max == CHUNK_ROWS_MAX - 1, "small rows are read in full chunks"


@pytest.mark.promise("P8")
def test_a_scan_reads_one_row_for_its_first_row() -> None:
    native = CountingIterator(100)
    scan = Cursor(Owner(), cast(RdictIter, native)).scan_once(b"", None, reverse=False)
    next(scan)
    assert native.read == 1
