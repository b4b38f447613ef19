"""The rows of a family read past its damage, and the key ranges that could not be read.

A damaged block hides its own rows and, from an iterator, the rows that other tables have in the same key range. So a
family is read in pieces:

    all tables        ──rows──┤ damaged block of table T ├──rows──┤ value lost ├──rows──>
    all tables but T          ├──────────rows────────────┤

Where the block ends is found by bisection over keys, on T alone: seeking a key of the block names the block in the
error, and the keys that do so are one range. A lost value in a blob file costs one row. Its key is read with checksums
off: the block that holds it was checked a moment before.

What cannot be told: a block that is lost may have held deletions. Then older rows of the same keys, in other tables,
come back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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
"""The longest key has two texts of 64 KiB. Bisection looks at no longer ones."""

KEY_BYTES_USUAL: Final = 64
"""Bytes of a key that are compared at least: a message's key has 35 and the names of queue and fairness key."""

EMPTY_STEPS_MAX: Final = 100_000
"""Faults in a row without a key that can be told between them; then the rest of the range is given up."""


Row = tuple[bytes, bytes]


def read_family(views: Views, label: str, gaps: list[Gap]) -> Iterator[Row]:
    """Every row of a family that can be read, in the order of keys. Gaps are added to `gaps`."""
    open_gaps: list[Gap] = []

    def lost(gap: Gap) -> None:
        gaps.append(gap)
        open_gaps.append(gap)

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
    """The rows of a range that can be read; `lost` hears of the gaps."""
    return _Reading(views, label, lost).rows(frozenset(), start, end)


class _Reading:
    """One pass over a family."""

    def __init__(self, views: Views, label: str, lost: Callable[[Gap], None]) -> None:
        self._views = views
        self._label = label
        self._lost = lost

    def rows(self, without: frozenset[str], start: bytes, end: bytes | None) -> Iterator[Row]:
        """The rows of a range, as tables other than `without` have them."""
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
            file = fault_of(fault)
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

    def _end_of_row(self, without: frozenset[str], fault: str, start: bytes, end: bytes | None) -> bytes | None:
        """A value cannot be read: the key behind its row."""
        cursor = self._iter(without, end, checked=False)
        cursor.seek(start)
        if cursor.valid():
            key = cursor.key()
            self._lost(Gap(self._label, key, key + b"\0", "", _short(fault)))
            return bytes(key) + b"\0"
        cursors = partial(self._iter, without, None)
        following = _bisected(_fails_like(cursors, fault), cursors, start, end)
        self._lost(Gap(self._label, start, following, "", _short(fault)))
        return following

    def _end_of_block(self, file: str, fault: str, start: bytes, end: bytes | None) -> bytes | None:
        """The first key at or after `start` that does not lie in the damaged block; None if there is none."""
        table = self._views.tables.get(file)
        if table is None:
            return end
        cursors = partial(self._iter, self._views.others(file), None)
        fails = _fails_like(cursors, fault)
        last = _after(table)
        if (last is not None and last <= start) or not fails(start):
            # A place that the table alone does not have.
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
    """The name of the file a fault names; empty if it names none."""
    named = named_file(fault, Path())
    return named.name


def after_block(new_cursor: Callable[[], RdictIter], fault: str, start: bytes, end: bytes | None) -> bytes | None:
    """The first key at or after `start` that can be read where a fault was met; None if none before `end` can."""
    following = _bisected(_fails_like(new_cursor, fault), new_cursor, start, end)
    return None if following is None or (end is not None and following >= end) else following


def _fails_like(new_cursor: Callable[[], RdictIter], fault: str) -> Callable[[bytes], bool]:
    """Whether seeking a key fails at the same place."""
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
    """An iterator that is not valid has come to the end, or met a fault."""
    try:
        cursor.status()
    except Exception as error:
        return str(error)
    return None


def _short(fault: str) -> str:
    """A fault without the directory of the view it was met in."""
    return _DIRECTORY.sub("", fault.split(" in /")[0]).strip()


def _bisected(
    fails: Callable[[bytes], bool], new_cursor: Callable[[], RdictIter], start: bytes, end: bytes | None
) -> bytes | None:
    """The first key after `start` that does not fail, for a range of keys from `start` on that do.

    `end`, if even that fails. Keys are compared as fractions: byte strings with zeros behind them. Two keys that differ
    behind the bytes compared are taken for one, so the second pass compares as many as the key has that was found.
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
    """Two neighbours among the keys of a width, of which the first fails and the second does not."""
    low = int.from_bytes(low_key.ljust(width, b"\0"), "big")
    high = int.from_bytes(high_key.ljust(width, b"\0"), "big")
    while high - low > 1:
        middle = (low + high) // 2
        if fails(middle.to_bytes(width, "big")):
            low = middle
        else:
            high = middle
    return low.to_bytes(width, "big"), high.to_bytes(width, "big")
