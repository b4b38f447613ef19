"""What a sub-queue has on disk: the rows of persistent messages, and of transient ones that memory had no room for.

The two are families of their own and in one order here. As a rule there are only persistent ones, and those are read in
bulk. What of them is leased, and where reading goes on, is paging.py's. A row that cannot be read is noted for the
quarantine and left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Final

from basaltmq.queues.quarantine import Suspects
from basaltmq.queues.ready.backing import ENTRY_OVERHEAD_BYTES, SPILLED, TRANSIENT, Entry, Leased
from basaltmq.queues.ready.plain import SMALL
from basaltmq.queues.ready.rows import fault_of, read_entries, read_plain
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import prefix_range
from basaltmq.store.ranges import Piece, Row, read_pieces

READ_CHUNK: Final = 32
"""Rows read between two looks at their size. A row is at most 2 MiB (headers and properties)."""

_PLACE_BYTES: Final = 24
"""Enqueue time and id: what a message's key has behind its sub-queue."""


def scan(store: Store, prefix: bytes, start: bytes, *, spilled: bool) -> Iterator[Row]:
    """Rows from `start` to the end of the sub-queue."""
    end = end_of(prefix)
    kept = store.scan(Family.MESSAGES, start, end)
    return merge(kept, store.scan(Family.TRANSIENT, start, end)) if spilled else kept


def entries(store: Store, rows: list[Row], suspects: Suspects, *, spilled: bool) -> list[Entry]:
    """Entries of rows; which of them are spilled ones is asked only where there are some."""

    def damaged(key: bytes, row: bytes, reason: str) -> None:
        is_spilled = spilled and store.get(Family.TRANSIENT, key) is not None
        suspects.note(Family.TRANSIENT if is_spilled else Family.MESSAGES, key, row, reason)

    found = read_entries(rows, damaged)
    if spilled:
        transient = store.get_many(Family.TRANSIENT, [e.key for e in found])
        for entry, row in zip(found, transient, strict=True):
            if row is not None:
                entry.flags |= TRANSIENT | SPILLED
    return found


def read(
    store: Store,
    prefix: bytes,
    piece: Piece,
    leased: Leased,
    suspects: Suspects,
    *,
    columns: bool = False,
    spilled: bool = False,
) -> Sequence[Entry]:
    """The messages of a piece that are not leased, as columns if that is wanted and possible."""
    keys, rows, sizes = piece
    left_out = set(leased.held_among(keys))
    key_bytes = len(prefix) + _PLACE_BYTES
    if {*map(len, keys)} != {key_bytes}:
        left_out |= {number for number, key in enumerate(keys) if len(key) != key_bytes}
        for key, row in zip(keys, rows, strict=True):
            if len(key) != key_bytes:
                suspects.note(Family.MESSAGES, key, row, f"its key has {len(key)} bytes, not {key_bytes}")
    if left_out:
        chosen = [number for number in range(len(keys)) if number not in left_out]
        keys, rows, sizes = [keys[n] for n in chosen], [rows[n] for n in chosen], [sizes[n] for n in chosen]
    if not keys:
        return []
    if columns and not spilled:
        plain = read_plain(keys, rows, sizes)
        if plain is not None:
            return plain
    return entries(store, list(zip(keys, rows, strict=True)), suspects, spilled=spilled)


def row_of(store: Store, entry: Entry, suspects: Suspects) -> bytes | None:
    """The row of a message that lost it to the disk; None if it cannot be read."""
    family = Family.TRANSIENT if entry.flags & SPILLED else Family.MESSAGES
    row = store.get(family, entry.key)
    fault = fault_of(entry.key, row)
    if fault is None:
        return row
    suspects.note(family, entry.key, row, fault)
    return None


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
