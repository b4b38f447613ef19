"""Online migration of a topic to another engine (SPEC D5).

    begin    in one batch: creates a copy of every shard, without a name, and marks the topic as migrating
    step     copies the next records of one shard after another, with their offsets
    finish   under the topics' lock: blocks writes to the shards and copies the rest; then one batch names the copies,
             deletes the old shards and changes the topic's engine

The progress of a copy is its next offset, so `step` resumes an interrupted migration, also after a crash. Offsets do
not change, gaps included. Committed offsets are stored by topic and partition. So readers and groups see only a short
wait. `Drivers` applies deletes to source and copy. `finish` copies the log start offset.

A copy in the memory engine does not survive a restart, so a migration to it requires durability `memory`. A migration
away from it should state the wanted durability.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from basaltmq.durability import Durability
from basaltmq.errors import InvalidArgumentError, InvalidConfigError, StorageError
from basaltmq.log.batches.record import clamped
from basaltmq.store.batch import Batch
from basaltmq.streams.adapter import StorageAdapter
from basaltmq.streams.drivers import Engines
from basaltmq.streams.shards import SHADOW, Engine, Shards, ShardSpec
from basaltmq.streams.topics import MigrationState, Topic, TopicConfig, Topics

STEP_RECORDS: Final = 10_000
"""Default records per step. A step holds the topics' lock."""

READ_BYTES: Final = 8 << 20
"""Maximum bytes per copied batch."""

REST_RECORDS: Final = 1_000
"""`run` calls `finish`, which blocks writers, once at most this many records are left."""


class Progress(msgspec.Struct, frozen=True):
    """Progress of a migration in offsets. Gaps count as copied."""

    copied: int
    left: int


class Migration:
    """Moves topics between engines."""

    def __init__(self, topics: Topics, shards: Shards, engines: Engines) -> None:
        self._topics = topics
        self._shards = shards
        self._engines = engines

    def run(
        self,
        name: str,
        engine: Engine,
        durability: Durability | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Topic:
        """Migrate a topic to the end, or resume its migration."""
        self.begin(name, engine, durability)
        source = self._engines.get(self._topics.get(name).config.engine)
        while True:
            # Unsynced records are not visible, so the copy would miss them.
            source.sync()
            at = self.step(name)
            if progress is not None:
                progress(at)
            if at.left <= REST_RECORDS:
                return self.finish(name)

    def begin(self, name: str, engine: Engine, durability: Durability | None = None) -> Topic:
        """Create the copies. A running migration to the same engine continues."""
        with self._topics.lock:
            topic = self._topics.get(name)
            if topic.migration is not None:
                if topic.migration.engine is engine:
                    return topic
                raise InvalidArgumentError(
                    f"topic {name!r} is migrating to engine {topic.migration.engine.value!r}; finish or cancel it"
                )
            if topic.config.engine is engine:
                raise InvalidArgumentError(f"topic {name!r} already uses engine {engine.value!r}")
            config = _moved(topic.config, engine, durability)
            target = self._engines.get(engine)
            specs = [
                target.place(
                    ShardSpec(
                        topic.id,
                        partition,
                        engine,
                        config.of_shard(),
                        start_offset=self._source(topic, partition).shard_info(number).start_offset,
                        flags=SHADOW,
                    )
                )
                for partition, number in enumerate(topic.shards)
            ]
            with self._shards.exclusive():
                batch = Batch()
                metas = self._shards.plan_create(batch, specs)
                moving = MigrationState(engine, [meta.number for meta in metas])
                return self._topics.update_state(topic, topic.config, moving, batch)

    def step(self, name: str, records_max: int = STEP_RECORDS) -> Progress:
        """Copy up to `records_max` records and return the progress."""
        with self._topics.lock:
            topic, moving = self._moving(name)
            left = records_max
            for partition in range(len(topic.shards)):
                left -= self._copy(topic, moving, partition, left)
                if left <= 0:
                    break
            return self._progress(topic, moving)

    def progress(self, name: str) -> Progress:
        topic, moving = self._moving(name)
        return self._progress(topic, moving)

    def finish(self, name: str) -> Topic:
        """Copy the remaining records and switch engines. Blocks writers, so call it when little is left."""
        with self._topics.lock:
            topic, moving = self._moving(name)
            target = self._engines.get(moving.engine)
            batch = Batch()
            sealed: list[tuple[StorageAdapter, int]] = []
            try:
                for partition, number in enumerate(topic.shards):
                    source = self._source(topic, partition)
                    source.plan_delete(batch, number)
                    sealed.append((source, number))
                    # Writes are blocked from here on, so after a sync all records are visible.
                    source.sync()
                    self._copy_rest(topic, moving, partition)
                target.sync()
                moved = self._switch(topic, moving, batch)
            except BaseException:
                for source, number in sealed:
                    source.revive(number)
                raise
            for source, number in sealed:
                source.forget(number)
            return moved

    def cancel(self, name: str) -> Topic:
        """Delete the copies and keep the topic on its engine."""
        with self._topics.lock:
            topic, moving = self._moving(name)
            target = self._engines.get(moving.engine)
            batch = Batch()
            for number in moving.shards:
                target.plan_delete(batch, number)
            try:
                stayed = self._topics.update_state(topic, topic.config, None, batch)
            except BaseException:
                for number in moving.shards:
                    target.revive(number)
                raise
            for number in moving.shards:
                target.forget(number)
            return stayed

    def _copy(self, topic: Topic, moving: MigrationState, partition: int, records_max: int) -> int:
        """Copy records from the end of the copy on. Return how many."""
        source, target = self._source(topic, partition), self._engines.get(moving.engine)
        number, copy = topic.shards[partition], moving.shards[partition]
        at = target.shard_info(copy).next_offset
        copied = 0
        while copied < records_max:
            start = source.shard_info(number).start_offset
            batch = source.read_by_offset(number, max(at, start), min(records_max - copied, 10_000), READ_BYTES)
            if batch.next_offset <= at:
                break
            records = [clamped(record) for record in batch.records()]
            append = target.append_at(copy, records, batch.next_offset)
            target.wait(append)
            at = batch.next_offset
            copied += max(len(records), 1)
        return copied

    def _copy_rest(self, topic: Topic, moving: MigrationState, partition: int) -> None:
        """Copy the rest of a shard that accepts no more writes, and its log start offset."""
        source, target = self._source(topic, partition), self._engines.get(moving.engine)
        number, copy = topic.shards[partition], moving.shards[partition]
        while self._copy(topic, moving, partition, STEP_RECORDS):
            pass
        info = source.shard_info(number)
        target.delete_records_before(copy, info.start_offset)
        reached = target.shard_info(copy)
        if (reached.start_offset, reached.next_offset) != (info.start_offset, info.next_offset):
            raise StorageError(
                f"the copy of partition {partition} of topic {topic.name!r} has offsets {reached.start_offset} to "
                f"{reached.next_offset}, but the source has {info.start_offset} to {info.next_offset}; not switched"
            )

    def _switch(self, topic: Topic, moving: MigrationState, batch: Batch) -> Topic:
        """Write the batch that names the copies, deletes the old shards and changes the topic's engine."""
        with self._shards.exclusive():
            metas = [self._shards.get(copy) for copy in moving.shards]
            for meta in metas:
                self._shards.plan_update(batch, msgspec.structs.replace(meta, flags=meta.flags & ~SHADOW))
                # This follows the delete of the old name in the same batch: the last operation on a key wins.
                self._shards.plan_name(batch, meta)
            config = _moved(topic.config, moving.engine, metas[0].config.durability)
            moved = self._topics.update_state(topic, config, None, batch)
            for meta in metas:
                self._shards.forget(meta.number)
        return moved

    def _moving(self, name: str) -> tuple[Topic, MigrationState]:
        topic = self._topics.get(name)
        if topic.migration is None:
            raise InvalidArgumentError(f"topic {name!r} is not being migrated")
        return topic, topic.migration

    def _source(self, topic: Topic, partition: int) -> StorageAdapter:
        return self._engines.get(self._shards.get(topic.shards[partition]).engine)

    def _progress(self, topic: Topic, moving: MigrationState) -> Progress:
        target = self._engines.get(moving.engine)
        copied = left = 0
        for partition, (number, copy) in enumerate(zip(topic.shards, moving.shards, strict=True)):
            source = self._source(topic, partition).shard_info(number)
            reached = max(target.shard_info(copy).next_offset, source.start_offset)
            copied += reached - source.start_offset
            left += max(0, source.next_offset - reached)
        return Progress(copied, left)


def _moved(config: TopicConfig, engine: Engine, durability: Durability | None) -> TopicConfig:
    """Return the topic's settings with another engine."""
    if durability is None:
        durability = config.durability
    moved = msgspec.structs.replace(config, engine=engine, durability=durability)
    if moved.level is not config.level and durability is None and engine is Engine.MEMORY:
        raise InvalidConfigError(
            f"the memory engine cannot provide durability {config.level.value!r}; "
            "set durability 'memory' to accept the loss at a restart"
        )
    moved.check()
    return moved
