"""Topics: named sets of shards with one configuration, stored as catalog objects (SPEC B1, B8, D1).

Creating, altering or deleting a topic is one batch with the catalog rows and the shard rows. A delete also includes
every group's committed offsets, and the records of engines that keep them in the store. So after a crash a topic exists
with all its shards or not at all. A topic that is created again under a name has a new id and new shards, so records of
the old one cannot reappear (promise P10).

Creation has a time limit. A creation that fails or times out is rolled back before the error is raised. If the rollback
fails too, because the disk failed, recovery may find the complete topic.

    attributes of a topic    {"config": TopicConfig, "migration": {"engine", "shards"} during a migration,
                              "shards": [[first shard, count], ...] by partition}

`shards` duplicates the shard rows. Only a repair that cannot read those rows uses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from basaltmq.catalog.cache import Cache
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import Action, CatalogObject, Event, NewObject
from basaltmq.catalog.record import ROOT, check_name
from basaltmq.decoding import converter
from basaltmq.durability import Durability
from basaltmq.errors import (
    AlreadyExistsError,
    BasaltError,
    CorruptionError,
    InvalidArgumentError,
    InvalidConfigError,
    TimedOutError,
    TopicExistsError,
    TopicNotFoundError,
)
from basaltmq.ids import Ids
from basaltmq.log.batches.record import RECORD_BYTES_MAX
from basaltmq.store.batch import Batch
from basaltmq.streams.adapter import StorageAdapter
from basaltmq.streams.offsets import Durable, Offsets
from basaltmq.streams.shards import (
    DAY_MS,
    SHARDS_PER_BATCH_MAX,
    Engine,
    ShardConfig,
    Shards,
    ShardSpec,
    check_compaction,
    check_durability,
)

PARTITIONS_MAX: Final = SHARDS_PER_BATCH_MAX
"""One batch creates all shards of a topic."""

PAGE_PARTITIONS: Final = 2_000
"""Partitions after which a page of topics ends. Reading a partition's shard row takes 3 to 5 us."""

CREATE_TIMEOUT_MS: Final = 30_000
"""A creation is two small writes and a sync. A longer one means disk trouble."""

CACHE_BYTES: Final = 8 << 20
"""Cache size for decoded topics: about 10,000 small ones."""


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of a topic. None means no limit; for `durability`, the highest level of the engine."""

    partitions: int = 1
    engine: Engine = Engine.SEGMENT
    durability: Durability | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None
    """Per partition."""
    retention_records: int | None = None
    """Per partition."""
    compact: bool = False
    compact_only: bool = False
    """With `compact`: retention does not apply, as with Kafka's cleanup.policy=compact without delete."""
    tombstone_retention_ms: int = DAY_MS
    index_keys: bool = True
    index_tags: bool = True
    index_times: bool = True
    record_bytes_max: int = RECORD_BYTES_MAX
    append_time: bool = False
    """The broker replaces the timestamps of Kafka producers' record batches with its own time."""

    def check(self) -> None:
        if not 1 <= self.partitions <= PARTITIONS_MAX:
            raise InvalidConfigError(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {self.partitions}")
        self.of_shard().check()
        check_compaction(self.engine, self.of_shard())
        check_durability(self.engine, self.level)

    @property
    def level(self) -> Durability:
        if self.durability is not None:
            return self.durability
        return Durability.MEMORY if self.engine is Engine.MEMORY else Durability.SYNCED

    def of_shard(self) -> ShardConfig:
        is_kept = self.compact and self.compact_only
        return ShardConfig(
            durability=self.level,
            retention_ms=None if is_kept else self.retention_ms,
            retention_bytes=None if is_kept else self.retention_bytes,
            retention_records=None if is_kept else self.retention_records,
            compact=self.compact,
            tombstone_retention_ms=self.tombstone_retention_ms,
            index_keys=self.index_keys,
            index_tags=self.index_tags,
            index_times=self.index_times,
            record_bytes_max=self.record_bytes_max,
            append_time=self.append_time,
        )


class MigrationState(msgspec.Struct, frozen=True):
    """A running migration of a topic to another engine."""

    engine: Engine
    shards: list[int]
    """Shard numbers of the copies, by partition."""


class TopicState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The attributes of a topic's catalog object."""

    config: TopicConfig
    migration: MigrationState | None = None
    shards: list[list[int]] = []
    """Runs of shard numbers by partition, as [first, count]."""

    def numbers(self) -> list[int]:
        return [number for first, count in self.shards for number in range(first, first + count)]


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Encode numbers as [first, count] runs. The shards of a topic mostly have consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


class Topic(msgspec.Struct, frozen=True):
    """A topic with its settings and shards."""

    id: UUID
    name: str
    config: TopicConfig
    shards: tuple[int, ...]
    """Shard numbers by partition."""
    migration: MigrationState | None = None


topic_config: Final = converter(TopicConfig)
"""Converts plain values to a `TopicConfig`."""

topic_state: Final = converter(TopicState)


class TopicSummary(NamedTuple):
    """A topic without its shards. Reading the shards of a topic takes 3 to 5 us per partition."""

    id: UUID
    name: str
    partitions: int


class TopicPage(msgspec.Struct, frozen=True):
    topics: list[Topic]
    next_after: str | None
    """Pass as `start_after` for the next page; None on the last page."""


FIXED: Final = ("engine", "index_keys", "index_tags", "index_times")
"""Settings that cannot be altered. The constants below state the remedies."""

_INDEXES_FIXED: Final = "indexes are built at append time; create another topic and copy the records"
_ENGINE_FIXED: Final = "migrate the topic to another engine instead"


class Topics:
    """The topics of one store, under one parent of the catalog."""

    def __init__(
        self,
        catalog: Catalog,
        shards: Shards,
        offsets: Offsets,
        sync: Durable,
        engine_of: Callable[[Engine], StorageAdapter],
        *,
        ids: Ids | None = None,
        parent: UUID = ROOT,
        create_timeout_ms: int = CREATE_TIMEOUT_MS,
    ) -> None:
        self.lock = threading.RLock()
        """Held during every change of topics and every step of a migration."""
        self.parent = parent
        self._catalog = catalog
        self._shards = shards
        self._offsets = offsets
        self._sync = sync
        self._engine_of = engine_of
        self._ids = ids or Ids()
        self._create_timeout_ms = create_timeout_ms
        self._cache: Cache[Topic] = Cache(CACHE_BYTES)
        self._stop_listening = catalog.on_change(self._changed)

    def create(
        self,
        name: str,
        config: TopicConfig | None = None,
        *,
        timeout_ms: int | None = None,
        topic_id: UUID | None = None,
        start_offsets: Mapping[int, int] | None = None,
    ) -> Topic:
        """Create a topic with all its shards. Durable on return. On an error, time-outs included, nothing is created.

        Imports pass `topic_id`, which is used if it is free, and `start_offsets` by partition.
        """
        config = config or TopicConfig()
        check_name(name)
        if not name:
            raise InvalidArgumentError("a topic needs a name")
        config.check()
        limit_ms = self._create_timeout_ms if timeout_ms is None else timeout_ms
        deadline = _Deadline(f"the creation of topic {name!r}", limit_ms)
        if not self.lock.acquire(timeout=deadline.left_s()):
            raise deadline.passed()
        try:
            engine = self._engine_of(config.engine)
            deadline.check()
            if topic_id is None or self._catalog.get(topic_id) is not None:
                topic_id = UUID(bytes=self._ids.next())
            self._write(name, topic_id, config, engine, start_offsets or {})
            try:
                self._wait_durable(deadline)
                found = self.find(name)
                assert found is not None, "a topic is found once it is written"
                deadline.check()
            except BaseException:
                self._undo(topic_id)
                raise
            return found
        finally:
            self.lock.release()

    def _write(
        self, name: str, topic_id: UUID, config: TopicConfig, engine: StorageAdapter, starts: Mapping[int, int]
    ) -> None:
        """Write the topic and its shards in one batch."""
        shard_config = config.of_shard()
        specs = [
            engine.place(
                ShardSpec(topic_id, partition, config.engine, shard_config, start_offset=starts.get(partition, 0))
            )
            for partition in range(config.partitions)
        ]
        with self._shards.exclusive():
            batch = Batch()
            made = self._shards.plan_create(batch, specs)
            state = TopicState(config, shards=runs_of(meta.number for meta in made))
            wanted = NewObject(Kind.TOPIC, name, self.parent, _attributes(state), topic_id)
            try:
                self._catalog.create_many([wanted], also=batch, durable=False)
            except AlreadyExistsError as error:
                raise TopicExistsError(f"topic {name!r} already exists") from error

    def _undo(self, topic_id: UUID) -> None:
        try:
            found = self._catalog.get(topic_id)
            if found is not None:
                self._delete(self._decoded(found), durable=False)
        except BasaltError:
            # The store has failed. Recovery finds either the complete topic or nothing.
            return

    @property
    def epoch(self) -> int:
        """Changes whenever any topic changes. Lookups may be cached until then."""
        return self._cache.epoch

    def find(self, name: str) -> Topic | None:
        """Return the topic of this name, or None. Uses a bounded cache."""
        check_name(name)
        key = name.encode()
        cached = self._cache.get(key)
        if cached is not None:
            return cached[0]
        epoch = self._cache.epoch
        found = self._catalog.find(Kind.TOPIC, name, self.parent)
        if found is None:
            return None
        try:
            topic = self._decoded(found)
        except TopicNotFoundError:
            return None
        self._cache.put(key, topic, 400 + 40 * len(topic.shards), epoch)
        return topic

    def get(self, name: str) -> Topic:
        topic = self.find(name)
        if topic is None:
            raise TopicNotFoundError(f"there is no topic {name!r}; create it first")
        return topic

    def page(self, *, start_after: str | None = None, limit: int = 100) -> TopicPage:
        """Return topics by name, at most `limit`, and fewer if they have many partitions."""
        page = self._catalog.page(Kind.TOPIC, self.parent, start_after=start_after, limit=limit)
        topics: list[Topic] = []
        partitions = 0
        for each in page.objects:
            if partitions >= PAGE_PARTITIONS:
                return TopicPage(topics, topics[-1].name)
            topics.append(self._decoded(each))
            partitions += len(topics[-1].shards)
        return TopicPage(topics, page.next_after)

    def summary(self, name: str) -> TopicSummary | None:
        """Return the summary of the topic of this name, or None."""
        check_name(name)
        cached = self._cache.get(name.encode())
        if cached is not None:
            topic = cached[0]
            return None if topic is None else TopicSummary(topic.id, topic.name, topic.config.partitions)
        found = self._catalog.find(Kind.TOPIC, name, self.parent)
        return None if found is None else _summary(found)

    def summary_of(self, topic_id: UUID) -> TopicSummary | None:
        """Return the summary of the topic with this id, or None."""
        found = self._catalog.get(topic_id)
        return None if found is None or found.kind is not Kind.TOPIC else _summary(found)

    def summaries(self, *, start_after: str | None = None, limit: int = 100) -> tuple[list[TopicSummary], str | None]:
        """Return a page of summaries by name, and the `start_after` of the next page; None on the last page."""
        page = self._catalog.page(Kind.TOPIC, self.parent, start_after=start_after, limit=limit)
        return [_summary(each) for each in page.objects], page.next_after

    def alter(self, name: str, **changes: Any) -> Topic:
        """Change settings of a topic in one batch. The number of partitions can only grow. Durable on return."""
        with self.lock:
            topic = self.get(name)
            config = _changed(topic, changes)
            shard_config = config.of_shard()
            engine = self._engine_of(config.engine)
            specs = [
                engine.place(ShardSpec(topic.id, partition, config.engine, shard_config))
                for partition in range(topic.config.partitions, config.partitions)
            ]
            if specs and topic.migration is not None:
                raise InvalidArgumentError(f"topic {name!r} is being migrated; add partitions after the migration")
            copies = topic.migration.shards if topic.migration else []
            with self._shards.exclusive():
                batch = Batch()
                for number in (*topic.shards, *copies):
                    self._shards.batch_update(batch, number, config=shard_config)
                made = self._shards.plan_create(batch, specs) if specs else []
                shards = runs_of([*topic.shards, *(meta.number for meta in made)])
                self._catalog.update(topic.id, _attributes(TopicState(config, topic.migration, shards)), also=batch)
                for number in (*topic.shards, *copies):
                    self._shards.forget(number)
            for number in topic.shards:
                engine.reconfigured(number)
            if topic.migration is not None:
                for number in copies:
                    self._engine_of(topic.migration.engine).reconfigured(number)
            return self.get(name)

    def delete(self, name: str) -> None:
        """Delete a topic with its records, its shards and every group's offsets in it. Durable on return."""
        with self.lock:
            self._delete(self.get(name))

    def _delete(self, topic: Topic, *, durable: bool = True) -> None:
        going = [(self._engine_of(topic.config.engine), number) for number in topic.shards]
        if topic.migration is not None:
            going += [(self._engine_of(topic.migration.engine), number) for number in topic.migration.shards]
        batch = Batch()
        planned: list[tuple[StorageAdapter, int]] = []
        try:
            for engine, number in going:
                engine.plan_delete(batch, number)
                planned.append((engine, number))
            self._offsets.plan_delete_topic(batch, topic.id)
            self._catalog.start_delete(topic.id, also=batch, durable=False)
        except BaseException:
            for engine, number in planned:
                engine.revive(number)
            raise
        for engine, number in going:
            engine.forget(number)
        if durable:
            self._sync.wait_durable()

    def update_state(self, topic: Topic, config: TopicConfig, migration: MigrationState | None, also: Batch) -> Topic:
        """Write a topic's state together with the rows in `also`. Only for `Migration`, which holds the lock."""
        is_moved = migration is None and topic.migration is not None and config.engine is topic.migration.engine
        numbers = topic.migration.shards if is_moved and topic.migration is not None else topic.shards
        state = TopicState(config, migration, runs_of(numbers))
        self._catalog.update(topic.id, _attributes(state), also=also)
        return self.get(topic.name)

    def close(self) -> None:
        self._stop_listening()

    def _decoded(self, found: CatalogObject) -> Topic:
        state = _state(found)
        numbers = tuple(number for _, number in self._shards.of_topic(found.id))
        if len(numbers) != state.config.partitions:
            again = self._catalog.get(found.id)
            if again is None:
                raise TopicNotFoundError(f"topic {found.name!r} was deleted")
            if again.attributes == found.attributes:
                raise CorruptionError(
                    f"topic {found.name!r} has {len(numbers)} shards for {state.config.partitions} partitions"
                )
            return self._decoded(again)
        return Topic(found.id, found.name, state.config, numbers, state.migration)

    def _changed(self, event: Event) -> None:
        if event.kind is Kind.TOPIC and event.parent == self.parent:
            names = [event.name] if event.old_name is None else [event.name, event.old_name]
            self._cache.discard(*(name.encode() for name in names))
        elif event.action is Action.DELETED:
            self._cache.clear()

    def _wait_durable(self, deadline: _Deadline) -> None:
        """Wait for the sync up to the deadline, because a hanging disk must not block the caller for ever."""
        failure: list[BaseException] = []

        def wait() -> None:
            try:
                self._sync.wait_durable()
            except BaseException as error:
                failure.append(error)

        waiter = threading.Thread(target=wait, name="basalt-topic-create", daemon=True)
        waiter.start()
        waiter.join(deadline.left_s())
        if waiter.is_alive():
            raise deadline.passed()
        if failure:
            raise failure[0]


class _Deadline:
    """A time limit for an operation."""

    def __init__(self, what: str, limit_ms: int) -> None:
        self._what = what
        self._limit_ms = limit_ms
        self._end = time.monotonic() + limit_ms / 1000

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise self.passed()

    def passed(self) -> TimedOutError:
        return TimedOutError(f"{self._what} took longer than {self._limit_ms} ms and was rolled back; try again")


def _state(found: CatalogObject) -> TopicState:
    try:
        return topic_state(found.attributes)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"the settings of topic {found.name!r} cannot be decoded: {error}") from error


def _summary(found: CatalogObject) -> TopicSummary:
    return TopicSummary(found.id, found.name, _state(found).config.partitions)


def _attributes(state: TopicState) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(state)
    return built


def _changed(topic: Topic, changes: dict[str, Any]) -> TopicConfig:
    given = msgspec.structs.asdict(topic.config) | changes
    unknown = changes.keys() - set(TopicConfig.__struct_fields__)
    if unknown:
        known = ", ".join(TopicConfig.__struct_fields__)
        raise InvalidArgumentError(f"a topic has no setting {', '.join(sorted(unknown))}; the settings are {known}")
    try:
        config = topic_config(msgspec.to_builtins(given))
    except msgspec.ValidationError as error:
        raise InvalidConfigError(f"topic {topic.name!r}: {error}") from error
    config.check()
    for field in FIXED:
        if getattr(config, field) != getattr(topic.config, field):
            remedy = _ENGINE_FIXED if field == "engine" else _INDEXES_FIXED
            raise InvalidConfigError(f"{field} of topic {topic.name!r} cannot be altered: {remedy}")
    if config.partitions < topic.config.partitions:
        raise InvalidConfigError(
            f"topic {topic.name!r} has {topic.config.partitions} partitions and cannot have fewer; create another topic"
        )
    return config
