"""Reads small and large bodies as one family, in scans and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import repeat
from typing import Final

from basaltmq.store.bodies.files import Pin
from basaltmq.store.families import Family
from basaltmq.store.rocks import RocksStore
from basaltmq.store.rocks_cursor import Cursor, RocksSnapshot

CONTENT: Final = Family.MESSAGE_CONTENT
PLACES: Final = Family.BODY_PLACES

Row = tuple[bytes, bytes]


class BodySnapshot(RocksSnapshot):
    """Some families as of one point in time, with large bodies."""

    def __init__(
        self,
        owner: RocksStore,
        cursors: dict[Family, Cursor],
        body: Callable[[bytes, bytes], bytes | None],
        pin: Pin,
    ) -> None:
        super().__init__(owner, cursors)
        self._body = body
        self._pin: Pin | None = pin

    def get(self, family: Family, key: bytes) -> bytes | None:
        if family is CONTENT:
            row = super().get(PLACES, key)
            if row is not None:
                return self._body(key, row)
        return super().get(family, key)

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(family, key) for key in keys]

    def scan(
        self, family: Family, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[Row]:
        small = super().scan(family, start, end, reverse=reverse)
        if family is not CONTENT or (end is not None and start >= end):
            return small
        places = super().scan(PLACES, start, end, reverse=reverse)
        return with_bodies(places, small, self._body, self._pin, reverse=reverse)

    def close(self) -> None:
        super().close()
        self._pin = None


def with_bodies(
    places: Iterator[Row],
    small: Iterator[Row],
    body: Callable[[bytes, bytes], bytes | None],
    pin: Pin | None,
    *,
    reverse: bool,
) -> Iterator[Row]:
    """Yield the rows of both families in key order, with bodies instead of places. Holds the pin meanwhile."""
    last: bytes | None = None
    rows = merge(zip(places, repeat(True)), zip(small, repeat(False)), key=lambda row: row[0][0], reverse=reverse)
    for (key, value), is_place in rows:
        if key == last:
            # If a key has both a small and a large body, the small one is older.
            continue
        last = key
        if not is_place:
            yield key, value
        elif (found := body(key, value)) is not None:
            yield key, found
    del pin
