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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
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
    StorageError,
    TopicExistsError,
    TopicNotFoundError,
)
from basaltmq.ids import Ids
from basaltmq.log.batches.record import RECORD_BYTES_MAX
from basaltmq.store.batch import Batch
from basaltmq.streams.adapter import StorageAdapter
from basaltmq.streams.deadline import Deadline
from basaltmq.streams.offsets import Durable, Offsets
from basaltmq.streams.shards import (
    CONFIGS_CACHED_MAX,
    DAY_MS,
    SHARDS_PER_BATCH_MAX,
    Engine,
    MessageType,
    ShardConfig,
    Shards,
    ShardSpec,
    check_compaction,
    check_durability,
    runs_of,
)

PARTITIONS_MAX: Final = SHARDS_PER_BATCH_MAX
"""One batch creates all shards of a topic."""

TOPICS_PER_BATCH: Final = 250
"""Topics created or deleted together: 20 ms to create and 60 ms to delete under the lock of the catalog."""

PARTITIONS_PER_BATCH: Final = 2_000
"""Partitions of the topics that are created together. A topic with more gets a separate batch."""

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
    retention_records: int | None = None
    """Limits of bytes and records are per partition."""
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
    message_type: MessageType | None = None
    """What RocketMQ clients may send. None: every type."""
    lite_of: str | None = None
    """The id of the topic whose lite topic this is."""
    kafka: tuple[tuple[str, str], ...] = ()
    """Other settings by their Kafka names, which apply to Kafka clients only or have no effect."""

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


class NewTopic(msgspec.Struct, frozen=True):
    """A topic to create."""

    name: str
    config: TopicConfig = TopicConfig()
    id: UUID | None = None
    """Used if it is free. None chooses one."""
    start_offsets: Mapping[int, int] = MappingProxyType({})
    """By partition."""


def in_batches(wanted: Iterable[NewTopic]) -> Iterator[list[NewTopic]]:
    """Divide topics into the batches that `Topics.create_many` takes."""
    batch: list[NewTopic] = []
    partitions = 0
    for each in wanted:
        if batch and (len(batch) == TOPICS_PER_BATCH or partitions + each.config.partitions > PARTITIONS_PER_BATCH):
            yield batch
            batch, partitions = [], 0
        batch.append(each)
        partitions += each.config.partitions
    if batch:
        yield batch


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


class Topic(msgspec.Struct, frozen=True):
    """A topic with its settings and shards."""

    id: UUID
    name: str
    config: TopicConfig
    shards: tuple[int, ...]
    """Shard numbers by partition."""
    migration: MigrationState | None = None


topic_config: Final = converter(TopicConfig)
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
        parent: UUID = ROOT,
    ) -> None:
        self.lock = threading.RLock()
        """Held during every change of topics and every step of a migration."""
        self.parent = parent
        self._catalog = catalog
        self._shards = shards
        self._offsets = offsets
        self._sync = sync
        self._engine_of = engine_of
        self._ids = Ids()
        self._cache: Cache[Topic] = Cache(CACHE_BYTES)
        self._stop_listening = catalog.on_change(self._changed)

    def create(self, name: str, config: TopicConfig | None = None, *, timeout_ms: int = CREATE_TIMEOUT_MS) -> Topic:
        """Create a topic with all its shards. Durable on return. After an error or time-out nothing is created."""
        made = self.create_many([NewTopic(name, config or TopicConfig())], timeout_ms=timeout_ms)[0]
        if isinstance(made, BasaltError):
            raise made
        return made

    def create_many(
        self, wanted: Sequence[NewTopic], *, timeout_ms: int = CREATE_TIMEOUT_MS
    ) -> list[Topic | BasaltError]:
        """Create topics with all their shards in one batch, with one sync. Durable on return.

        The result has, in the given order, the topic, or the error for which it was refused. A refused topic does not
        affect the others. Storage errors and time-outs are raised, and then none of the topics is created. `in_batches`
        divides more topics than fit into one batch.
        """
        more = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
        first = f"{wanted[0].name!r:.200}" if wanted else ""
        deadline = Deadline(f"the creation of topic {first}{more}", timeout_ms)
        if not self.lock.acquire(timeout=deadline.left_s()):
            raise deadline.passed()
        try:
            refused = self._refused(wanted)
            deadline.check()
            made = self._made([each for at, each in enumerate(wanted) if at not in refused], deadline)
        finally:
            self.lock.release()
        return [refused.get(at) or next(made) for at in range(len(wanted))]

    def _refused(self, wanted: Sequence[NewTopic]) -> dict[int, BasaltError]:
        """Return the errors of the topics that cannot be created, by position."""
        refused: dict[int, BasaltError] = {}
        names: dict[str, int] = {}
        checked: set[TopicConfig] = set()
        for at, each in enumerate(wanted):
            try:
                check_name(each.name)
                if not each.name:
                    raise InvalidArgumentError("a topic needs a name")
                if each.config not in checked:
                    each.config.check()
                    self._engine_of(each.config.engine)
                    checked.add(each.config)
                if names.setdefault(each.name, at) != at:
                    raise TopicExistsError(f"topic {each.name!r} is created twice in one call")
            except StorageError:
                raise
            except BasaltError as error:
                refused[at] = error
        for name in self._catalog.taken(Kind.TOPIC, list(names), self.parent):
            refused[names[name]] = TopicExistsError(f"topic {name!r} already exists")
        return refused

    def _made(self, wanted: list[NewTopic], deadline: Deadline) -> Iterator[Topic]:
        """Write topics and wait for the sync. On an error, delete them again."""
        if not wanted:
            return iter(())
        made = self._write(wanted)
        try:
            deadline.wait_durable(self._sync)
            epoch = self._cache.epoch
            for topic in made:
                self._cache.put(topic.name.encode(), topic, 400 + 40 * len(topic.shards), epoch)
            deadline.check()
        except BaseException:
            self._undo(made)
            raise
        return iter(made)

    def _write(self, wanted: list[NewTopic]) -> list[Topic]:
        """Write topics and their shards in one batch."""
        ids = [
            each.id if each.id is not None and self._catalog.get(each.id) is None else UUID(bytes=fresh)
            for each, fresh in zip(wanted, self._ids.many(len(wanted)), strict=True)
        ]
        specs = [spec for each, topic_id in zip(wanted, ids, strict=True) for spec in self._specs(each, topic_id)]
        made: list[Topic] = []
        with self._shards.exclusive():
            batch = Batch()
            numbers = iter([meta.number for meta in self._shards.plan_create(batch, specs)])
            for each, topic_id in zip(wanted, ids, strict=True):
                made.append(Topic(topic_id, each.name, each.config, tuple(islice(numbers, each.config.partitions))))
            objects = [
                NewObject(Kind.TOPIC, each.name, self.parent, _attributes(each.config, None, each.shards), each.id)
                for each in made
            ]
            try:
                self._catalog.create_many(objects, also=batch, durable=False)
            except AlreadyExistsError as error:
                raise TopicExistsError(str(error)) from error
        return made

    def _specs(self, wanted: NewTopic, topic_id: UUID) -> list[ShardSpec]:
        config = wanted.config
        engine = self._engine_of(config.engine)
        shard_config = _shard_config(config)
        starts = wanted.start_offsets
        return [
            engine.place(ShardSpec(topic_id, number, config.engine, shard_config, start_offset=starts.get(number, 0)))
            for number in range(config.partitions)
        ]

    def _undo(self, made: list[Topic]) -> None:
        try:
            self._delete([each for each in made if self._catalog.get(each.id) is not None], durable=False)
        except BasaltError:
            # The store has failed. Recovery finds either all complete topics or nothing.
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
                shards = [*topic.shards, *(meta.number for meta in made)]
                self._catalog.update(topic.id, _attributes(config, topic.migration, shards), also=batch)
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
        failure = self.delete_many([name])[0]
        if failure is not None:
            raise failure

    def delete_many(self, names: Sequence[str]) -> list[BasaltError | None]:
        """Delete topics as `delete` does, in one batch with one sync. Return the error of each that cannot be deleted.

        Topics that exceed the limits of a batch are deleted in several. Storage errors are raised.
        """
        failures: list[BasaltError | None] = []
        with self.lock:
            going: dict[str, Topic] = {}
            partitions = 0
            for name in names:
                try:
                    if name in going:
                        raise TopicNotFoundError(f"topic {name!r} is deleted twice in one call")
                    topic = going[name] = self.get(name)
                    failures.append(None)
                except StorageError:
                    raise
                except BasaltError as error:
                    failures.append(error)
                    continue
                partitions += len(topic.shards)
                if len(going) == TOPICS_PER_BATCH or partitions >= PARTITIONS_PER_BATCH:
                    self._delete(list(going.values()))
                    going, partitions = {}, 0
            self._delete(list(going.values()))
        return failures

    def _delete(self, topics: list[Topic], *, durable: bool = True) -> None:
        if not topics:
            return
        batch = Batch()
        planned: dict[StorageAdapter, list[int]] = {}
        try:
            for topic in topics:
                self._plan_delete(batch, topic, planned)
            self._catalog.start_delete(*(topic.id for topic in topics), also=batch, durable=False)
        except BaseException:
            for engine, numbers in planned.items():
                for number in numbers:
                    engine.revive(number)
            raise
        if durable:
            self._sync.wait_durable()
        for engine, numbers in planned.items():
            engine.forget(*numbers)

    def _plan_delete(self, batch: Batch, topic: Topic, planned: dict[StorageAdapter, list[int]]) -> None:
        going = [(self._engine_of(topic.config.engine), number) for number in topic.shards]
        if topic.migration is not None:
            going += [(self._engine_of(topic.migration.engine), number) for number in topic.migration.shards]
        for engine, number in going:
            engine.plan_delete(batch, number)
            planned.setdefault(engine, []).append(number)
        self._offsets.plan_delete_topic(batch, topic.id)

    def update_state(self, topic: Topic, config: TopicConfig, migration: MigrationState | None, also: Batch) -> Topic:
        """Write a topic's state together with the rows in `also`. Only for `Migration`, which holds the lock."""
        is_moved = migration is None and topic.migration is not None and config.engine is topic.migration.engine
        numbers = topic.migration.shards if is_moved and topic.migration is not None else topic.shards
        self._catalog.update(topic.id, _attributes(config, migration, numbers), also=also)
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


def _state(found: CatalogObject) -> TopicState:
    try:
        return topic_state(found.attributes)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"the settings of topic {found.name!r} cannot be decoded: {error}") from error


def _summary(found: CatalogObject) -> TopicSummary:
    return TopicSummary(found.id, found.name, _state(found).config.partitions)


def _attributes(config: TopicConfig, migration: MigrationState | None, shards: Iterable[int]) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(TopicState(config, migration, runs_of(shards))))
    return built


@lru_cache(maxsize=CONFIGS_CACHED_MAX)
def _shard_config(config: TopicConfig) -> ShardConfig:
    """Return one object for all topics with equal settings, which are most."""
    return config.of_shard()


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
    count = topic.config.partitions
    if config.partitions < count:
        raise InvalidConfigError(f"topic {topic.name!r} has {count} partitions and cannot have fewer; create another")
    return config
