"""Reads the messages of a sub-queue from disk: persistent ones, and transient ones spilled for lack of memory.

The two have separate families, merged here in key order. Usually there are only persistent ones, which are read in
bulk. `PagingQueue` keeps the cursor. Unreadable rows are noted for the quarantine and skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Final

from basaltmq.errors import StoreStalledError
from basaltmq.queues.entries.backing import ENTRY_OVERHEAD_BYTES, SPILLED, TRANSIENT, Entry, Leased
from basaltmq.queues.entries.plain import SMALL
from basaltmq.queues.entries.quarantine import Suspects
from basaltmq.queues.entries.rows import fault_of, read_entries, read_plain
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import prefix_range
from basaltmq.store.keys.queues import TIME_AND_ID_BYTES
from basaltmq.store.ranges import Piece, Row, read_pieces

READ_CHUNK: Final = 32
"""Rows read between two checks of their size. A row has at most 2 MiB (headers and properties)."""

SPILL_WAIT_MS: Final = 0
"""A transient message that cannot be spilled at once stays in memory, so the publisher does not wait."""


def scan(store: Store, prefix: bytes, start: bytes, *, spilled: bool) -> Iterator[Row]:
    """Yield the rows from `start` to the end of the sub-queue."""
    end = end_of(prefix)
    kept = store.scan(Family.MESSAGES, start, end)
    return merge(kept, store.scan(Family.TRANSIENT, start, end)) if spilled else kept


def entries(store: Store, rows: list[Row], suspects: Suspects, *, spilled: bool) -> list[Entry]:
    """Return the entries of rows. Looks up which are spilled only if `spilled` is set."""

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
    """Return the messages of a piece that are not leased, as columns if requested and possible."""
    keys, rows, sizes = piece
    left_out = set(leased.leased_among(keys))
    key_bytes = len(prefix) + TIME_AND_ID_BYTES
    if {*map(len, keys)} != {key_bytes}:
        left_out |= {number for number, key in enumerate(keys) if len(key) != key_bytes}
        for key, row in zip(keys, rows, strict=True):
            if len(key) != key_bytes:
                suspects.note(Family.MESSAGES, key, row, f"the key has {len(key)} bytes, not {key_bytes}")
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
    """Read the row of a message that is not in memory; None if it is unreadable."""
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
    """Read rows from `start`, at least one if any exists. Return them, and whether there may be more.

    If `wanted` is large enough, each piece has that many rows.
    """
    if not spilled:
        count_max = min(count_max, max(wanted, bytes_max // ENTRY_OVERHEAD_BYTES))
        piece_rows = wanted if wanted >= SMALL else count_max
        return read_pieces(store, Family.MESSAGES, start, end_of(prefix), count_max, bytes_max, piece_rows)
    chunk_max = READ_CHUNK if bytes_max > 1 else wanted
    piece = Piece([], [], [])
    rows = scan(store, prefix, start, spilled=True)
    while len(piece.keys) < count_max and bytes_max > 0:
        chunk_rows = min(chunk_max, count_max - len(piece.keys))
        chunk = list(islice(rows, chunk_rows))
        bytes_max -= piece.add(chunk) + ENTRY_OVERHEAD_BYTES * len(chunk)
        if len(chunk) < chunk_rows:
            return [piece], False
    return [piece], True


def spill(store: Store, entries: Sequence[Entry]) -> bool:
    """Write transient messages to disk without the WAL. Return False if the store is stalled."""
    batch = Batch()
    for entry in entries:
        batch.put(Family.TRANSIENT, entry.key, entry.row)
    try:
        store.write(batch, wal=False, wait_ms=SPILL_WAIT_MS)
    except StoreStalledError:
        return False
    for entry in entries:
        entry.flags |= SPILLED
    return True


def end_of(prefix: bytes) -> bytes:
    """Return the key after the last possible key with this prefix."""
    end = prefix_range(prefix)[1]
    assert end is not None, "a length-prefixed name is never all 0xff"
    return end
