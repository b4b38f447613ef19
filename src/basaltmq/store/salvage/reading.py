"""Reads the rows of a family past its damage, and reports the key ranges that could not be read.

A damaged block hides its own rows and, from an iterator, the rows of other SST files in the same key range. So a family
is read in parts:

    all SST files            ──rows──┤ damaged block of file T ├──rows──┤ lost value ├──rows──>
    all SST files except T           ├──────────rows───────────┤

Bisection over keys on T alone finds the end of the block. Seeking a key in the block raises an error that names the
block, and those keys form one range. A lost value in a blob file costs one row. Its key is read without checksums,
because its block has just been checked.

A lost block may have held tombstones. Then older rows of the same keys in other SST files reappear, undetected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from rocksdict import Rdict, RdictIter, ReadOptions

from basaltmq.store.rocks_errors import named_file
from basaltmq.store.salvage.losses import Gap
from basaltmq.store.salvage.views import Table, Views

_PLACE: Final = re.compile(r"offset (\d+)")

_DIRECTORY: Final = re.compile(r"/[^\s:]*/")

KEY_BYTES_MAX: Final = 1 << 17
"""The longest key has two texts of 64 KiB. Bisection ignores longer ones."""

KEY_BYTES_USUAL: Final = 64
"""Minimum key bytes compared. A message key has 35 bytes plus the queue name and the fairness key."""

EMPTY_STEPS_MAX: Final = 100_000
"""Consecutive faults without a readable key between them, after which the rest of the range is lost."""


Row = tuple[bytes, bytes]


def read_family(views: Views, label: str, gaps: list[Gap], excised: Iterable[Gap] = ()) -> Iterator[Row]:
    """Yield every readable row of a family in key order. Append the unreadable ranges to `gaps`, and the excised ones,
    which readers do not meet."""
    open_gaps: list[Gap] = []

    def lost(gap: Gap) -> None:
        gaps.append(gap)
        open_gaps.append(gap)

    for gap in excised:
        lost(gap)
    for name in sorted(views.missing()):
        table = views.tables[name]
        if table.family == label:
            lost(Gap(label, table.first, _after(table), name, "the file is missing"))
    for row in read_range(views, label, b"", None, lost):
        if open_gaps:
            for gap in [gap for gap in open_gaps if gap.end is not None and row[0] >= gap.end]:
                gap.following = row[0]
                open_gaps.remove(gap)
        yield row


def read_range(views: Views, label: str, start: bytes, end: bytes | None, lost: Callable[[Gap], None]) -> Iterator[Row]:
    """Yield the readable rows of a range. Call `lost` for each gap."""
    return _Reading(views, label, lost).rows(frozenset(), start, end)


class _Reading:
    """One pass over a family."""

    def __init__(self, views: Views, label: str, lost: Callable[[Gap], None]) -> None:
        self._views = views
        self._label = label
        self._lost = lost

    def rows(self, without: frozenset[str], start: bytes, end: bytes | None) -> Iterator[Row]:
        """Yield the rows of a range from all SST files except `without`."""
        stuck = 0
        while True:
            cursor = self._iter(without, end)
            cursor.seek(start)
            moved = False
            while cursor.valid():
                key = cursor.key()
                yield key, cursor.value()
                start, moved = key + b"\0", True
                cursor.next()
            fault = _fault(cursor)
            del cursor
            if fault is None:
                return
            stuck = 0 if moved else stuck + 1
            if stuck > EMPTY_STEPS_MAX:
                self._lost(Gap(self._label, start, end, "", fault))
                return
            file = fault_of(fault) or self._unopened(without, fault, start)
            if file.endswith(".blob") and self._views.substitute(file, self._label):
                continue
            if file.endswith(".sst"):
                following = self._end_of_block(file, fault, start, end)
                first = max(start, self._views.tables[file].first) if file in self._views.tables else start
                self._lost(Gap(self._label, first, following, file, _short(fault)))
                yield from self.rows(without | {file}, start, following)
            else:
                following = self._end_of_row(without, fault, start, end)
            if following is None or (end is not None and following >= end):
                return
            start = following

    def _unopened(self, without: frozenset[str], fault: str, start: bytes) -> str:
        """Return the SST file that cannot be opened, if RocksDB does not name it. Empty if a value is unreadable."""
        for name, table in self._views.tables.items():
            if table.family == self._label and name.endswith(".sst") and name not in without:
                alone = partial(self._iter, self._views.others(name), None, checked=False)
                if not table.is_missing and fails_like(alone, fault)(start):
                    return name
        return ""

    def _end_of_row(self, without: frozenset[str], fault: str, start: bytes, end: bytes | None) -> bytes | None:
        """Return the key after a row whose value is unreadable."""
        cursor = self._iter(without, end, checked=False)
        cursor.seek(start)
        if cursor.valid():
            key = cursor.key()
            self._lost(Gap(self._label, key, key + b"\0", "", _short(fault)))
            return bytes(key) + b"\0"
        cursors = partial(self._iter, without, None)
        following = _bisected(fails_like(cursors, fault), cursors, start, end)
        self._lost(Gap(self._label, start, following, "", _short(fault)))
        return following

    def _end_of_block(self, file: str, fault: str, start: bytes, end: bytes | None) -> bytes | None:
        """Return the first key at or after `start` outside the damaged block, None if there is none."""
        table = self._views.tables.get(file)
        if table is None:
            return end
        cursors = partial(self._iter, self._views.others(file), None)
        fails = fails_like(cursors, fault)
        last = _after(table)
        if (last is not None and last <= start) or not fails(start):
            # The table alone does not fail here.
            return end
        following = _bisected(fails, cursors, start, last)
        return following if end is None or (following is not None and following < end) else end

    def _iter(self, without: frozenset[str], end: bytes | None, *, checked: bool = True) -> RdictIter:
        family: Rdict = self._views.family(self._label, without)
        reading = ReadOptions()
        reading.set_verify_checksums(checked)
        if end is not None:
            reading.set_iterate_upper_bound(end)
        return family.iter(reading)


def fault_of(fault: str) -> str:
    """Return the name of the file in a fault, empty if it names none."""
    named = named_file(fault, Path())
    return named.name


def after_block(new_cursor: Callable[[], RdictIter], fault: str, start: bytes) -> bytes | None:
    """Return the first readable key at or after `start`, None if there is none."""
    return _bisected(fails_like(new_cursor, fault), new_cursor, start, None)


def fails_like(new_cursor: Callable[[], RdictIter], fault: str) -> Callable[[bytes], bool]:
    """Return a function that returns whether a seek of a key fails at the same position."""
    place = _PLACE.search(fault)

    def fails(key: bytes) -> bool:
        cursor = new_cursor()
        cursor.seek(key)
        if cursor.valid():
            return False
        again = _fault(cursor)
        if again is None:
            return False
        found = _PLACE.search(again)
        return _short(again) == _short(fault) if place is None else found is not None and found[1] == place[1]

    return fails


def _after(table: Table) -> bytes | None:
    return None if table.last is None else table.last + b"\0"


def _fault(cursor: RdictIter) -> str | None:
    """Return the error of an iterator that is no longer valid, None if it reached the end."""
    try:
        cursor.status()
    except Exception as error:
        return str(error)
    return None


def _short(fault: str) -> str:
    """Return a fault without the directory of the view."""
    return _DIRECTORY.sub("", fault.split(" in /")[0]).strip()


def _bisected(
    fails: Callable[[bytes], bool], new_cursor: Callable[[], RdictIter], start: bytes, end: bytes | None
) -> bytes | None:
    """Return the first key after `start` that does not fail, given that keys from `start` on fail. `end` if it fails.

    Keys are compared as fractions: byte strings padded with zeros. Keys that differ only after the compared bytes count
    as equal, so the second pass compares as many bytes as the key found has.
    """
    ceiling = b"\xff" * (len(start) + 8) if end is None else end
    if len(ceiling) > KEY_BYTES_MAX or fails(ceiling):
        return end
    width = max(len(start), len(ceiling)) + 1
    low, high = _narrowed(fails, start, ceiling, width)
    cursor = new_cursor()
    cursor.seek(high)
    found: bytes = cursor.key() if cursor.valid() else b""
    finer = max(len(found) + 1, KEY_BYTES_USUAL)
    if finer > width:
        high = _narrowed(fails, low, high, finer)[1]
    return high


def _narrowed(fails: Callable[[bytes], bool], low_key: bytes, high_key: bytes, width: int) -> tuple[bytes, bytes]:
    """Return two adjacent keys of a width, of which the first fails and the second does not."""
    low = int.from_bytes(low_key.ljust(width, b"\0"), "big")
    high = int.from_bytes(high_key.ljust(width, b"\0"), "big")
    while high - low > 1:
        middle = (low + high) // 2
        if fails(middle.to_bytes(width, "big")):
            low = middle
        else:
            high = middle
    return low.to_bytes(width, "big"), high.to_bytes(width, "big")
