"""The driver manager: routes operations to the engine of a topic (SPEC B4).

The shard row names the engine of a shard. If a call fails because its topic has just migrated, the manager repeats it
on the new engine.

Deletes on a migrating topic also apply to the copies, under the lock of the copy steps, so no deleted record is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, TypeVar

from basaltmq.durability import Durability
from basaltmq.errors import (
    DamagedFrameError,
    InvalidArgumentError,
    InvalidConfigError,
    ShardNotFoundError,
    StoreClosedError,
)
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.streams.adapter import (
    READ_BYTES,
    READ_RECORDS,
    Append,
    IfAllOlder,
    ReadBatch,
    ShardInfo,
    StorageAdapter,
    plain_records,
)
from basaltmq.streams.partitions import Partitioner, partition_of_key
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import Topic, Topics

EngineFactory = Callable[[], StorageAdapter]

MIGRATION_TRIES_MAX: Final = 3
"""Maximum tries of a call whose topic migrates during the call. Two migrations in a row are already unrealistic."""

T = TypeVar("T")


class Engines:
    """The engines of one store, each created on first use."""

    def __init__(self, factories: Mapping[Engine, EngineFactory]) -> None:
        self._factories = dict(factories)
        self._open: dict[Engine, StorageAdapter] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._retention_steps: list[Callable[[], int]] = []

    def on_retain(self, step: Callable[[], int]) -> None:
        """Run `step` in every retention step. `step` must be bounded and return how many items it removed."""
        self._retention_steps.append(step)

    def get(self, engine: Engine) -> StorageAdapter:
        made = self._open.get(engine)
        if made is not None:
            return made
        with self._lock:
            if self._closed:
                raise StoreClosedError("the stream engines are closed")
            made = self._open.get(engine)
            if made is None:
                factory = self._factories.get(engine)
                if factory is None:
                    known = ", ".join(sorted(self._factories))
                    raise InvalidConfigError(f"engine {engine.value!r} is not available here; use one of {known}")
                made = self._open[engine] = factory()
            return made

    def in_use(self) -> list[StorageAdapter]:
        return list(self._open.values())

    def retain(self, now_ms: int) -> int:
        """Run one bounded retention step in every engine in use. Return how many records and other items it removed."""
        also = sum(step() for step in self._retention_steps)
        return also + sum(engine.retain(now_ms) for engine in self.in_use())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            made, self._open = self._open, {}
        with ExitStack() as stack:
            for engine in made.values():
                stack.callback(engine.close)


class Drivers:
    """Stream operations by topic and partition."""

    def __init__(self, topics: Topics, shards: Shards, engines: Engines) -> None:
        self._topics = topics
        self._shards = shards
        self._engines = engines
        self._partitioner = Partitioner()

    def append(
        self,
        topic: str,
        record: Record,
        *,
        partition: int | None = None,
        durability: Durability | None = None,
    ) -> tuple[int, Append]:
        """Append one record to the given partition, by its key, or round robin. Return the partition and the append."""
        found = self._topics.get(topic)
        chosen = self._partitioner.choose(found.config.partitions, record.key, partition)
        return chosen, self._on(topic, chosen, lambda engine, shard: engine.write(shard, record, durability))

    def append_batch(
        self,
        topic: str,
        records: Sequence[Record] | ColumnBatch,
        *,
        partition: int | None = None,
        durability: Durability | None = None,
    ) -> list[tuple[int, Append]]:
        """Append a batch, split by key. Records without a key stay together. Each partition gets one atomic append."""
        partitions = self._topics.get(topic).config.partitions
        if partition is not None or partitions == 1:
            chosen = self._partitioner.choose(partitions, None, 0 if partition is None else partition)
            return [(chosen, self._append(topic, chosen, records, durability))]
        parts = self._split(records, partitions)
        return [(chosen, self._append(topic, chosen, parts[chosen], durability)) for chosen in sorted(parts)]

    def _append(
        self, topic: str, partition: int, records: Sequence[Record] | ColumnBatch, durability: Durability | None
    ) -> Append:
        return self._on(topic, partition, lambda engine, shard: engine.batch_write(shard, records, durability))

    def _split(self, records: Sequence[Record] | ColumnBatch, partitions: int) -> dict[int, Sequence[Record]]:
        plain = plain_records(records)
        if not plain:
            raise InvalidArgumentError("an empty batch cannot be written; give at least one record")
        parts: dict[int, list[Record]] = {}
        for_keyless: int | None = None
        for record in plain:
            if record.key is not None:
                chosen = partition_of_key(record.key, partitions)
            else:
                if for_keyless is None:
                    for_keyless = self._partitioner.in_turn(partitions)
                chosen = for_keyless
            parts.setdefault(chosen, []).append(record)
        return dict(parts)

    def wait(self, append: Append) -> None:
        """Return when an append has its requested durability."""
        try:
            engine = self._engines.get(self._shards.get(append.shard).engine)
        except ShardNotFoundError:
            # The shard was deleted or migrated with the record. That change must be durable too.
            for each in self._engines.in_use():
                each.sync()
        else:
            engine.wait(append)

    def read(
        self, topic: str, partition: int, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch:
        return self._on(
            topic, partition, lambda engine, shard: engine.read_by_offset(shard, offset, max_records, max_bytes)
        )

    def read_by_tag(
        self,
        topic: str,
        partition: int,
        tag: bytes,
        offset: int,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
    ) -> ReadBatch:
        return self._on(
            topic, partition, lambda engine, shard: engine.read_by_tag(shard, tag, offset, max_records, max_bytes)
        )

    def read_by_key(
        self,
        topic: str,
        partition: int,
        key: bytes,
        offset: int,
        max_records: int = READ_RECORDS,
        max_bytes: int = READ_BYTES,
    ) -> ReadBatch:
        return self._on(
            topic, partition, lambda engine, shard: engine.read_by_key(shard, key, offset, max_records, max_bytes)
        )

    def offset_at(self, topic: str, partition: int, timestamp_ms: int, otherwise: IfAllOlder) -> int:
        return self._on(
            topic, partition, lambda engine, shard: engine.get_offset_by_timestamp(shard, timestamp_ms, otherwise)
        )

    def info(self, topic: str, partition: int) -> ShardInfo:
        return self._on(topic, partition, lambda engine, shard: engine.shard_info(shard))

    def delete_by_key(self, topic: str, partition: int, key: bytes) -> int:
        return self._delete(topic, partition, lambda engine, shard: engine.delete_by_key(shard, key))

    def delete_by_offset(self, topic: str, partition: int, offsets: Sequence[int]) -> int:
        return self._delete(topic, partition, lambda engine, shard: engine.delete_by_offset(shard, offsets))

    def delete_records_before(self, topic: str, partition: int, offset: int) -> int:
        return self._on(topic, partition, lambda engine, shard: engine.delete_records_before(shard, offset))

    def route(self, topic: Topic, partition: int) -> tuple[StorageAdapter, int]:
        """Return the engine and the shard number of a partition."""
        if not 0 <= partition < len(topic.shards):
            raise InvalidArgumentError(
                f"topic {topic.name!r} has no partition {partition}; it has 0 to {len(topic.shards) - 1}"
            )
        number = topic.shards[partition]
        return self._engines.get(self._shards.get(number).engine), number

    def _on(self, topic: str, partition: int, call: Callable[[StorageAdapter, int], T]) -> T:
        for _ in range(MIGRATION_TRIES_MAX):
            found = self._topics.get(topic)
            try:
                return call(*self.route(found, partition))
            except DamagedFrameError as error:
                raise error.within(topic, partition) from error
            except ShardNotFoundError:
                # The topic was deleted or migrates. Both hold the lock until they are complete.
                with self._topics.lock:
                    if self._topics.get(topic).shards == found.shards:
                        raise
        raise ShardNotFoundError(
            f"partition {partition} of topic {topic!r} migrated {MIGRATION_TRIES_MAX} times during the call; try again"
        )

    def _delete(self, topic: str, partition: int, call: Callable[[StorageAdapter, int], int]) -> int:
        if self._topics.get(topic).migration is None:
            return self._on(topic, partition, call)
        with self._topics.lock:
            found = self._topics.get(topic)
            if found.migration is not None:
                call(self._engines.get(found.migration.engine), found.migration.shards[partition])
            return self._on(topic, partition, call)
