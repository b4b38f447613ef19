"""Deletes the shards of topics whose parent, such as a virtual host, was deleted (promise P10).

Deleting a topic by name deletes its shards in the same batch (`Topics.delete`). Deleting a parent happens in the
catalog, which has no access to shards. The catalog instead writes one orphan row per deleted topic, in its own batch.

Each retention step scans those rows. One batch deletes the row, the topic's shards, the copies of a running migration
and every group's committed offsets, so a crash leaves nothing behind. Until then the records are unreachable, because
the name is deleted and a new topic of that name has a new id.
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
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.adapter import StorageAdapter
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import Topics, topic_state

TOPICS_PER_STEP: Final = 100
"""Topics deleted per step. Each is one small batch; a step takes tens of milliseconds."""


class Orphans:
    """Processes the orphan rows that the catalog wrote."""

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
        """Delete the shards of up to `limit` orphaned topics. Return the number of topics."""
        rows = list(islice(self._store.scan(Family.SHARDS, *key_parts.prefix_range(b"Z")), limit))
        for key, row in rows:
            with self._topics.lock:
                self._remove(stream_keys.decode_orphaned_topic_key(key), key, row)
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
        """Return the topic's existing shards: those that serve it and the copies of a running migration."""
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
        # An unreadable row names no copies.
        return []
    return [] if state.migration is None else state.migration.shards
