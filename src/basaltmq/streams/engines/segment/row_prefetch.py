"""Rows of shards that are touched for the first time in the order of their numbers, read some at a time.

The shards of a topic are numbered in a row, and so are those of topics made together; who goes through them asks for
one row after the other, and a row costs ten times as much alone as among its neighbours. So after some in a row the
following ones are read along, more of them the longer it goes on.

A row that was read ahead is used only if nothing was written to the store since: then it is what the store says. Where
others write all the time that is never so, and soon no row is read ahead any more.

Not here: what a row says (`shards`), and what is made of it. One thread at a time.
"""

from __future__ import annotations

from typing import Final

from basaltmq.store.api import ManagedStore
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

AHEAD_MAX: Final = 64
"""Rows read at once: a row among them costs no less beyond that."""

IN_ORDER_MIN: Final = 4
"""Rows asked for in a row before others are read along."""


class RowsAhead:
    """Gives the rows of shards."""

    def __init__(self, store: ManagedStore) -> None:
        self._store = store
        self._rows: dict[int, bytes | None] = {}
        self._writes = -1
        self._next = 0
        self._in_order = 0

    def get(self, shard: int) -> bytes | None:
        """A shard's row; None if there is none."""
        if shard != self._next:
            self._next = shard + 1
            self._in_order = 0
            return self._store.get(Family.SHARDS, keys.shard_key(shard))
        self._next = shard + 1
        rows = self._rows
        if shard in rows:
            if self._writes == self._store.writes():
                self._in_order += 1
                return rows.pop(shard)
            # In vain: as many must follow again before it is tried again.
            self._in_order = -len(rows)
            self._rows = {}
        self._in_order += 1
        if self._in_order < IN_ORDER_MIN:
            return self._store.get(Family.SHARDS, keys.shard_key(shard))
        return self._read_ahead(shard)

    def _read_ahead(self, shard: int) -> bytes | None:
        numbers = range(shard, shard + min(AHEAD_MAX, self._in_order))
        # Counted before they are read: a write between the two makes them useless, not wrong.
        self._writes = self._store.writes()
        found = self._store.get_many(Family.SHARDS, [keys.shard_key(number) for number in numbers])
        self._rows = dict(zip(numbers, found, strict=True))
        return self._rows.pop(shard)
