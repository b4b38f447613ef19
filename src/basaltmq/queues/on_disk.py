"""What a sub-queue has on disk: the rows of persistent messages, and of transient ones that memory had no room for.

The two are families of their own and in one order here. As a rule there are only persistent ones, and those are read in
bulk. What of them is leased, and where reading goes on, is paging.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from typing import Final

from basaltmq.queues.backing import ENTRY_OVERHEAD_BYTES, SPILLED, TRANSIENT, Entry
from basaltmq.queues.plain import SMALL
from basaltmq.queues.rows import read_entries
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys import prefix_range
from basaltmq.store.ranges import Piece, Row, read_pieces

READ_CHUNK: Final = 32
"""Rows read between two looks at their size. A row is at most 2 MiB (headers and properties)."""


def scan(store: Store, prefix: bytes, start: bytes, *, spilled: bool) -> Iterator[Row]:
    """Rows from `start` to the end of the sub-queue."""
    end = end_of(prefix)
    kept = store.scan(Family.MESSAGES, start, end)
    return merge(kept, store.scan(Family.TRANSIENT, start, end)) if spilled else kept


def entries(store: Store, rows: list[Row], *, spilled: bool) -> list[Entry]:
    """Entries of rows; which of them are spilled ones is asked only where there are some."""
    found = read_entries(rows)
    if spilled:
        transient = store.get_many(Family.TRANSIENT, [e.key for e in found])
        for entry, row in zip(found, transient, strict=True):
            if row is not None:
                entry.flags |= TRANSIENT | SPILLED
    return found


def pieces(
    store: Store, prefix: bytes, start: bytes, count_max: int, bytes_max: int, wanted: int, *, spilled: bool
) -> tuple[list[Piece], bool]:
    """Rows from `start` on, at least one if there are any, and whether there may be more.

    They are in pieces as long as what is `wanted`, where that is some.
    """
    if not spilled:
        count_max = min(count_max, max(wanted, bytes_max // ENTRY_OVERHEAD_BYTES))
        piece_rows = wanted if wanted >= SMALL else count_max
        return read_pieces(store, Family.MESSAGES, start, end_of(prefix), count_max, bytes_max, piece_rows)
    chunk_max = READ_CHUNK if bytes_max > 1 else wanted
    piece = Piece([], [], [])
    rows = scan(store, prefix, start, spilled=True)
    while len(piece.keys) < count_max and bytes_max > 0:
        asked = min(chunk_max, count_max - len(piece.keys))
        chunk = list(islice(rows, asked))
        bytes_max -= piece.add(chunk) + ENTRY_OVERHEAD_BYTES * len(chunk)
        if len(chunk) < asked:
            return [piece], False
    return [piece], True


def end_of(prefix: bytes) -> bytes:
    """The key behind the last a sub-queue can have."""
    end = prefix_range(prefix)[1]
    assert end is not None, "a length-prefixed name is never all 0xff"
    return end
