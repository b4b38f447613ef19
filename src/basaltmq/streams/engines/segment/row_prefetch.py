"""Read-ahead for shard rows that are loaded in the order of their numbers.

The shards of a topic have consecutive numbers, and so have those of topics created together. Code that visits them
loads one row after another, and a single row costs ten times as much as one in a batch. So after a few sequential
loads, this class reads the following rows along, more of them the longer the sequence.

A prefetched row is used only if the store was not written since, so it is always current. With constant writes the
prefetch always fails, and it is soon no longer tried. Not thread-safe.
"""

from __future__ import annotations

from typing import Final

from basaltmq.store.api import ManagedStore
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys

AHEAD_MAX: Final = 64
"""Maximum rows per read. Larger reads do not lower the cost per row."""

IN_ORDER_MIN: Final = 4
"""Sequential loads before read-ahead starts."""


class RowPrefetch:
    """Loads shard rows with read-ahead."""

    def __init__(self, store: ManagedStore) -> None:
        self._store = store
        self._rows: dict[int, bytes | None] = {}
        self._writes = -1
        self._next = 0
        self._in_order = 0

    def get(self, shard: int) -> bytes | None:
        """Return a shard's row, or None."""
        if shard != self._next:
            self._next = shard + 1
            self._in_order = 0
            return self._store.get(Family.SHARDS, stream_keys.shard_key(shard))
        self._next = shard + 1
        rows = self._rows
        if shard in rows:
            if self._writes == self._store.writes():
                self._in_order += 1
                return rows.pop(shard)
            # The prefetch was useless. Require as many sequential loads before the next one.
            self._in_order = -len(rows)
            self._rows = {}
        self._in_order += 1
        if self._in_order < IN_ORDER_MIN:
            return self._store.get(Family.SHARDS, stream_keys.shard_key(shard))
        return self._read_ahead(shard)

    def _read_ahead(self, shard: int) -> bytes | None:
        numbers = range(shard, shard + min(AHEAD_MAX, self._in_order))
        # Read the write count first: a write in between then makes the rows unused, not stale.
        self._writes = self._store.writes()
        found = self._store.get_many(Family.SHARDS, [stream_keys.shard_key(number) for number in numbers])
        self._rows = dict(zip(numbers, found, strict=True))
        return self._rows.pop(shard)
