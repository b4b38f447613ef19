"""Writes many rows in batches, for repairs that change rows while they scan others."""

from __future__ import annotations

from typing import Final

from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

BATCH_ROWS: Final = 1000
"""Rows per batch."""


class RowWriter:
    """Collects changes and writes a batch whenever it has BATCH_ROWS rows. `flush` writes the rest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch = Batch()

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        self._batch.put(family, key, value)
        self._write_full()

    def put_if_missing(self, family: Family, key: bytes) -> None:
        """Put an index row, which has no value."""
        if self._store.get(family, key) is None:
            self.put(family, key, b"")

    def delete(self, family: Family, key: bytes) -> None:
        self._batch.delete(family, key)
        self._write_full()

    def flush(self) -> None:
        if self._batch:
            self._store.write(self._batch)
            self._batch = Batch()

    def _write_full(self) -> None:
        if len(self._batch) >= BATCH_ROWS:
            self.flush()
