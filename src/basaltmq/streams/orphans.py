"""Shards of topics that went with what they stood under (promise P10).

A topic deleted by name takes its shards along in one batch (`topics`). A virtual host, or whatever else a topic stands
under, is deleted by the catalog, which knows no shards: for each topic among what goes it leaves the topic's row in the
same batch. Here those rows are found, with every step of retention, and the topic's shards, copies under migration
included, and every group's offsets go in one batch with the row. So a crash in between leaves nothing behind, and
nobody can reach the records meanwhile: the name is gone, and a topic made again under it has another id.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final
from uuid import UUID

import msgspec

from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.record import decode_value
from basaltmq.errors import BasaltError, ShardNotFoundError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.streams.adapter import StorageAdapter
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import Topics, topic_state

TOPICS_PER_STEP: Final = 100
"""Topics removed in one step: as many small batches, some tens of milliseconds."""


class Orphans:
    """Removes what the catalog left word of."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        topics: Topics,
        shards: Shards,
        offsets: Offsets,
        engine_of: Callable[[Engine], StorageAdapter],
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._topics = topics
        self._shards = shards
        self._offsets = offsets
        self._engine_of = engine_of

    def sweep(self, limit: int = TOPICS_PER_STEP) -> int:
        """Remove the shards of up to `limit` topics that went; how many topics that were."""
        rows = list(islice(self._store.scan(Family.SHARDS, *keys.prefix_range(b"Z")), limit))
        for key, row in rows:
            with self._topics.lock:
                self._remove(keys.decode_orphaned_topic_key(key), key, row)
        return len(rows)

    def _remove(self, topic_id: UUID, key: bytes, row: bytes) -> None:
        batch = Batch()
        batch.delete(Family.SHARDS, key)
        going: list[tuple[StorageAdapter, int]] = []
        try:
            if self._catalog.get(topic_id) is None:
                for number in self._numbers(topic_id, row):
                    engine = self._engine_of(self._shards.get(number).engine)
                    engine.plan_delete(batch, number)
                    going.append((engine, number))
                self._offsets.plan_delete_topic(batch, topic_id)
            self._store.write(batch)
        except BaseException:
            for engine, number in going:
                engine.revive(number)
            raise
        for engine, number in going:
            engine.forget(number)

    def _numbers(self, topic_id: UUID, row: bytes) -> list[int]:
        """The topic's shards that are there: those that serve it, and the copies of a migration under way."""
        numbers = [number for _, number in self._shards.of_topic(topic_id)]
        return numbers + [number for number in _copies(topic_id, row) if self._is_of(number, topic_id)]

    def _is_of(self, number: int, topic_id: UUID) -> bool:
        try:
            meta = self._shards.get(number)
        except ShardNotFoundError:
            return False
        return meta.topic_id == topic_id


def _copies(topic_id: UUID, row: bytes) -> list[int]:
    try:
        state = topic_state(decode_value(row, topic_id).attributes)
    except (BasaltError, msgspec.ValidationError):
        # A row that cannot be read names no copies.
        return []
    return [] if state.migration is None else state.migration.shards
