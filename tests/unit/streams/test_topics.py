"""Topics, the driver manager, migration, and metadata as JSON."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.stream_engines import FakeClock, GatedStore

from basaltmq.catalog.kinds import Kind
from basaltmq.durability import Durability
from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    InvalidArgumentError,
    InvalidConfigError,
    StorageError,
    StoreTooNewError,
    TimedOutError,
    TopicExistsError,
    TopicNotFoundError,
)
from basaltmq.log.batches.record import Record
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.streams.metadata_json import export_metadata, import_metadata
from basaltmq.streams.migration import Progress
from basaltmq.streams.partitions import Partitioner, murmur2, partition_of_key
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import TopicConfig

ROCKSDB = TopicConfig(engine=Engine.ROCKSDB)
STREAM_FAMILIES = (
    Family.SHARDS,
    Family.STREAM_RECORDS,
    Family.STREAM_RECORD_INDEX,
    Family.CONSUMER_OFFSETS,
    Family.TOPIC_GROUPS,
    Family.CONFIGURED_OBJECTS,
    Family.OBJECT_NAMES,
)


class UnpoisonedStore(GatedStore):
    """A store that a failed sync does not poison, so that tests can read it afterwards."""

    def poison(self, error: BaseException) -> None:
        pass


@pytest.fixture
def store() -> GatedStore:
    return UnpoisonedStore(MemoryStore())


@pytest.fixture
def plane(store: GatedStore) -> Iterator[StreamPlane]:
    made = StreamPlane(store, FakeClock())
    yield made
    store.gate.set()
    store.fail_write = store.fail_sync = None
    made.close()


def rows(store: GatedStore, *families: Family) -> dict[Family, list[tuple[bytes, bytes]]]:
    """Return all rows except the shard counter: numbers of failed creations stay unused."""
    return {each: [row for row in store.scan(each) if row[0] != b"N"] for each in families or STREAM_FAMILIES}


def values(plane: StreamPlane, topic: str, partition: int = 0) -> list[bytes]:
    start = plane.drivers.info(topic, partition).start_offset
    return [(each.value or b"") for each in plane.drivers.read(topic, partition, start).records()]


@pytest.mark.spec("B1", "B8", "D1")
@pytest.mark.promise("P2")
def test_a_topic_is_created_with_its_shards_in_one_batch(plane: StreamPlane, store: GatedStore) -> None:
    batches: list[Batch] = []
    write = store.write

    def seen(batch: Batch, **options: Any) -> None:
        batches.append(batch)
        write(batch, **options)

    store.write = seen  # type: ignore[method-assign]
    topic = plane.topics.create("orders", TopicConfig(partitions=3, engine=Engine.ROCKSDB))
    assert len(batches) == 1
    assert {Family.SHARDS, Family.CONFIGURED_OBJECTS, Family.OBJECT_NAMES} <= {op[1] for op in batches[0].ops}
    assert plane.topics.get("orders") == topic
    assert len(topic.shards) == 3
    assert [plane.shards.get(number).name for number in topic.shards] == [f"{topic.id}_{n}" for n in range(3)]


@pytest.mark.spec("B8")
@pytest.mark.promise("P2")
@pytest.mark.parametrize("step", ["engine", "write", "sync", "cache"])
def test_a_creation_that_fails_at_any_step_leaves_no_rows(
    plane: StreamPlane, store: GatedStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.engines.get(Engine.ROCKSDB)
    before = rows(store)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise StorageError("on purpose")

    if step == "engine":
        monkeypatch.setattr(plane.topics, "_engine_of", fail)
    elif step == "write":
        store.fail_write = StorageError("on purpose")
    elif step == "sync":
        store.fail_sync = StorageError("on purpose")
    else:
        monkeypatch.setattr(plane.topics._cache, "put", fail)
    with pytest.raises(StorageError, match="on purpose"):
        plane.topics.create("orders", TopicConfig(partitions=3, engine=Engine.ROCKSDB))
    monkeypatch.undo()
    store.fail_write = store.fail_sync = None
    assert rows(store) == before
    assert plane.topics.find("orders") is None
    topic = plane.topics.create("orders", TopicConfig(partitions=3, engine=Engine.ROCKSDB))
    assert len(topic.shards) == 3


@pytest.mark.spec("B8")
def test_a_creation_over_the_time_limit_is_rolled_back(plane: StreamPlane, store: GatedStore) -> None:
    plane.engines.get(Engine.ROCKSDB)
    before = rows(store)
    store.gate.clear()
    with pytest.raises(TimedOutError, match="rolled back") as caught:
        plane.topics.create("orders", ROCKSDB, timeout_ms=50)
    assert caught.value.retriable
    store.gate.set()
    assert rows(store) == before
    plane.topics.create("orders", ROCKSDB)


@pytest.mark.spec("B8")
def test_a_creation_waits_for_another_only_up_to_its_time_limit(plane: StreamPlane) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with plane.topics.lock:
            held.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    with pytest.raises(TimedOutError):
        plane.topics.create("orders", ROCKSDB, timeout_ms=20)
    done.set()
    holder.join(30)


@pytest.mark.spec("B8")
def test_one_of_many_concurrent_creates_succeeds(plane: StreamPlane) -> None:
    made: list[object] = []
    refused: list[BaseException] = []
    begin = threading.Barrier(6)

    def create() -> None:
        begin.wait(30)
        try:
            made.append(plane.topics.create("orders", ROCKSDB))
        except TopicExistsError as error:
            refused.append(error)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(made), len(refused)) == (1, 5)


@pytest.mark.spec("B8")
@pytest.mark.parametrize(
    "config",
    [
        TopicConfig(partitions=0),
        TopicConfig(partitions=100_001),
        TopicConfig(engine=Engine.MEMORY, durability=Durability.SYNCED),
        TopicConfig(compact=True, index_keys=False, engine=Engine.ROCKSDB),
        TopicConfig(retention_ms=-1),
        TopicConfig(record_bytes_max=0),
    ],
)
def test_an_invalid_config_is_refused(plane: StreamPlane, store: GatedStore, config: TopicConfig) -> None:
    before = rows(store)
    with pytest.raises(InvalidConfigError):
        plane.topics.create("orders", config)
    assert rows(store) == before


@pytest.mark.spec("B8")
@pytest.mark.parametrize("name", ["", "x" * 70_000, 7, "\ud800"])
def test_invalid_queue_name_is_refused(plane: StreamPlane, name: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        plane.topics.create(name, ROCKSDB)


@pytest.mark.spec("D1")
def test_topics_are_listed_in_pages(plane: StreamPlane) -> None:
    for number in range(7):
        plane.topics.create(f"t{number}", TopicConfig(partitions=number + 1, engine=Engine.ROCKSDB))
    seen: list[str] = []
    after: str | None = None
    while True:
        page = plane.topics.page(start_after=after, limit=3)
        seen += [topic.name for topic in page.topics]
        after = page.next_after
        if after is None:
            break
    assert seen == [f"t{number}" for number in range(7)]


def test_a_page_of_topics_with_many_partitions_ends_early(plane: StreamPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("basaltmq.streams.topics.PAGE_PARTITIONS", 4)
    for number in range(5):
        plane.topics.create(f"t{number}", TopicConfig(partitions=3, engine=Engine.MEMORY))
    pages: list[list[str]] = []
    after: str | None = None
    while not pages or after is not None:
        page = plane.topics.page(start_after=after, limit=100)
        pages.append([topic.name for topic in page.topics])
        after = page.next_after
    assert pages == [["t0", "t1"], ["t2", "t3"], ["t4"]]


@pytest.mark.promise("P10")
@pytest.mark.parametrize("engine", [Engine.MEMORY, Engine.ROCKSDB])
def test_a_deleted_topic_leaves_no_rows_and_does_not_reappear(
    plane: StreamPlane, store: GatedStore, engine: Engine
) -> None:
    before = rows(store)
    topic = plane.topics.create("orders", TopicConfig(partitions=2, engine=engine))
    for number in range(200):
        plane.drivers.append("orders", Record(b"%d" % number, key=b"%d" % (number % 7), tags=(b"t",)))
    plane.offsets.commit("g", {(topic.id, 0): 3, (topic.id, 1): 4})
    plane.topics.delete("orders")
    assert rows(store) == before
    with pytest.raises(TopicNotFoundError):
        plane.drivers.append("orders", Record(b"x"))
    with pytest.raises(TopicNotFoundError):
        plane.topics.delete("orders")
    again = plane.topics.create("orders", TopicConfig(partitions=2, engine=engine))
    assert again.id != topic.id
    assert not set(again.shards) & set(topic.shards)
    assert values(plane, "orders") == []
    assert plane.offsets.of_group("g") == {}


@pytest.mark.promise("P2")
def test_a_failed_delete_keeps_the_topic_usable(plane: StreamPlane, store: GatedStore) -> None:
    plane.topics.create("orders", ROCKSDB)
    plane.drivers.append("orders", Record(b"a"), durability=Durability.WRITTEN)
    store.fail_write = StorageError("on purpose")
    with pytest.raises(StorageError):
        plane.topics.delete("orders")
    store.fail_write = None
    plane.drivers.append("orders", Record(b"b"), durability=Durability.WRITTEN)
    assert values(plane, "orders") == [b"a", b"b"]


@pytest.mark.spec("B8")
@pytest.mark.promise("P2")
def test_settings_change_in_the_topic_and_all_its_shards(plane: StreamPlane) -> None:
    plane.topics.create("orders", TopicConfig(partitions=2, engine=Engine.ROCKSDB))
    topic = plane.topics.alter("orders", retention_records=5, durability="written", partitions=4)
    assert (topic.config.retention_records, topic.config.partitions, len(topic.shards)) == (5, 4, 4)
    for number in topic.shards:
        config = plane.shards.get(number).config
        assert (config.retention_records, config.durability) == (5, Durability.WRITTEN)
    for number in range(9):
        plane.drivers.append("orders", Record(b"%d" % number), partition=3)
    plane.engines.retain(0)
    assert values(plane, "orders", 3) == [b"4", b"5", b"6", b"7", b"8"]
    for wrong in (
        {"engine": "memory", "durability": "memory"},
        {"index_keys": False},
        {"partitions": 3},
        {"retention_ms": "soon"},
        {"retention_ms": -1},
    ):
        with pytest.raises(InvalidConfigError):
            plane.topics.alter("orders", **wrong)
    with pytest.raises(InvalidArgumentError, match="retention_hours"):
        plane.topics.alter("orders", retention_hours=1)
    assert plane.topics.get("orders") == topic


@pytest.mark.spec("B4")
def test_an_engine_is_created_once_on_first_use_by_any_thread(store: GatedStore) -> None:
    made: list[str] = []
    begin = threading.Barrier(8)
    plane = StreamPlane(store, FakeClock())
    factories = plane.engines._factories
    original = factories[Engine.ROCKSDB]

    def counted() -> Any:
        made.append("rocksdb")
        return original()

    factories[Engine.ROCKSDB] = counted
    assert made == []

    def use() -> None:
        begin.wait(30)
        plane.engines.get(Engine.ROCKSDB)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert made == ["rocksdb"]
    with pytest.raises(InvalidConfigError, match="segment"):
        plane.engines.get(Engine.SEGMENT)
    plane.close()


@pytest.mark.spec("B3", "B4")
def test_topics_of_different_engines_coexist(plane: StreamPlane) -> None:
    plane.topics.create("fast", TopicConfig(engine=Engine.MEMORY))
    plane.topics.create("safe", ROCKSDB)
    for name in ("fast", "safe"):
        for number in range(5):
            _, append = plane.drivers.append(name, Record(f"{name} {number}".encode()))
            plane.drivers.wait(append)
    assert values(plane, "fast") == [b"fast %d" % n for n in range(5)]
    assert values(plane, "safe") == [b"safe %d" % n for n in range(5)]
    plane.topics.delete("fast")
    assert len(values(plane, "safe")) == 5


@pytest.mark.spec("B4")
def test_partitions_are_chosen_round_robin_by_key_or_explicitly(plane: StreamPlane) -> None:
    plane.topics.create("orders", TopicConfig(partitions=3, engine=Engine.MEMORY))
    assert [plane.drivers.append("orders", Record(b""))[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    keyed = {plane.drivers.append("orders", Record(b"", key=b"customer"))[0] for _ in range(5)}
    assert keyed == {partition_of_key(b"customer", 3)}
    assert plane.drivers.append("orders", Record(b"", key=b"customer"), partition=1)[0] == 1
    for wrong in (-1, 3):
        with pytest.raises(InvalidArgumentError, match="0 to 2"):
            plane.drivers.append("orders", Record(b""), partition=wrong)
        with pytest.raises(InvalidArgumentError, match="0 to 2"):
            plane.drivers.read("orders", wrong, 0)
    batch = [Record(b"%d" % n, key=None if n % 4 == 0 else b"k%d" % n) for n in range(40)]
    appends = plane.drivers.append_batch("orders", batch)
    assert sum(append.count for _, append in appends) == 40
    for partition, append in appends:
        records = plane.drivers.read("orders", partition, append.base_offset).records()
        assert all(each.key is None or partition_of_key(each.key, 3) == partition for each in records)
    everywhere = [each.value for p in range(3) for each in plane.drivers.read("orders", p, 0).records()]
    assert sorted(each for each in everywhere if each) == sorted((each.value or b"") for each in batch)


@pytest.mark.spec("B4")
def test_keys_map_to_the_same_partitions_as_in_kafka() -> None:
    # Values from Kafka's tests of murmur2, as unsigned numbers.
    known = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    known |= {
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    }
    known |= {b"abc": 479470107}
    assert {key: murmur2(key) for key in known} == {key: value & 0xFFFFFFFF for key, value in known.items()}
    assert Partitioner().choose(10, b"foobar") == (-790332482 & 0x7FFFFFFF) % 10


@pytest.mark.spec("B4", "D1")
@pytest.mark.promise("P8")
def test_a_change_through_the_catalog_invalidates_the_cache(plane: StreamPlane) -> None:
    topic = plane.topics.create("orders", ROCKSDB)
    assert plane.topics.get("orders") is plane.topics.get("orders")
    plane.catalog.rename(topic.id, "invoices")
    assert plane.topics.find("orders") is None
    assert plane.topics.get("invoices").shards == topic.shards
    assert plane.catalog.find(Kind.TOPIC, "invoices") is not None


@pytest.mark.spec("D5")
@pytest.mark.promise("P3")
@pytest.mark.parametrize(("source", "target"), [(Engine.ROCKSDB, Engine.MEMORY), (Engine.MEMORY, Engine.ROCKSDB)])
def test_a_topic_migrates_to_another_engine_with_its_offsets_and_groups(
    plane: StreamPlane, store: GatedStore, source: Engine, target: Engine
) -> None:
    topic = plane.topics.create("orders", TopicConfig(partitions=2, engine=source, durability=Durability.MEMORY))
    for number in range(300):
        plane.drivers.append("orders", Record(b"%d" % number, key=b"k%d" % (number % 9), tags=(b"t",)))
    plane.drivers.delete_by_offset("orders", 0, [1, plane.drivers.info("orders", 0).next_offset - 1])
    plane.drivers.delete_records_before("orders", 1, 5)
    plane.offsets.commit("g", {(topic.id, 0): 7})
    before = [plane.drivers.read("orders", p, plane.drivers.info("orders", p).start_offset).records() for p in (0, 1)]
    infos = [plane.drivers.info("orders", p) for p in (0, 1)]

    plane.migration.begin("orders", target, Durability.MEMORY)
    reports: list[Progress] = []
    while not reports or reports[-1].left:
        reports.append(plane.migration.step("orders", 50))
        assert len(reports) < 50
    assert len(reports) > 3
    assert [each.left for each in reports] == sorted((each.left for each in reports), reverse=True)
    gone = before[0][3]
    assert plane.drivers.delete_by_offset("orders", 0, [gone.offset]) == 1
    plane.drivers.append("orders", Record(b"late"), partition=1)
    plane.drivers.delete_records_before("orders", 1, 8)
    moved = plane.migration.finish("orders")

    assert (moved.config.engine, moved.migration, moved.id) == (target, None, topic.id)
    after = [plane.drivers.read("orders", p, plane.drivers.info("orders", p).start_offset).records() for p in (0, 1)]
    assert after[0] == [each for each in before[0] if each != gone]
    assert after[1][:-1] == [each for each in before[1] if each.offset >= 8]
    assert (after[1][-1].value, after[1][-1].offset) == (b"late", infos[1].next_offset)
    assert plane.drivers.info("orders", 0).next_offset == infos[0].next_offset
    assert [each.committed for each in plane.groups.lag("g")] == [7]
    _, append = plane.drivers.append("orders", Record(b"next"), partition=0)
    assert append.base_offset == infos[0].next_offset
    for number in topic.shards:
        assert store.get(Family.SHARDS, b"S" + number.to_bytes(8, "big")) is None
    if target is Engine.MEMORY:
        assert rows(store, Family.STREAM_RECORDS) == {Family.STREAM_RECORDS: []}


@pytest.mark.spec("D5")
def test_writers_and_readers_continue_during_a_migration(plane: StreamPlane) -> None:
    plane.topics.create("orders", TopicConfig(engine=Engine.MEMORY))
    stop = threading.Event()
    written: list[int] = []
    failures: list[BaseException] = []

    def write() -> None:
        try:
            while not stop.is_set():
                _, append = plane.drivers.append("orders", Record(b"%d" % len(written)))
                plane.drivers.wait(append)
                written.append(append.base_offset)
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for engine in (Engine.ROCKSDB, Engine.MEMORY, Engine.ROCKSDB):
            plane.migration.run("orders", engine, Durability.MEMORY)
            plane.drivers.read("orders", 0, 0)
    finally:
        stop.set()
        writer.join(60)
    assert not failures, failures
    assert written == list(range(len(written)))
    at, seen = 0, []
    while at < len(written):
        batch = plane.drivers.read("orders", 0, at)
        seen += [each.value for each in batch.records()]
        at = batch.next_offset
    assert seen == [b"%d" % number for number in range(len(written))]


@pytest.mark.spec("D5")
def test_a_migration_resumes_after_a_restart_and_can_be_cancelled(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    plane = StreamPlane(store, FakeClock())
    plane.topics.create("orders", ROCKSDB)
    plane.topics.create("lasting", TopicConfig(engine=Engine.ROCKSDB, durability=Durability.WRITTEN))
    plane.drivers.append_batch("lasting", [Record(b"%d" % number) for number in range(500)])
    plane.migration.begin("lasting", Engine.MEMORY, Durability.MEMORY)
    plane.migration.step("lasting", 100)
    plane.close()
    store.close()

    store = open_store(tmp_path / "s")
    plane = StreamPlane(store, FakeClock())
    with pytest.raises(InvalidArgumentError, match="is not being migrated"):
        plane.migration.step("orders")
    # The restart loses the copy in memory, so it is behind the source and cannot be finished.
    cancelled = plane.migration.cancel("lasting")
    assert (cancelled.migration, cancelled.config.engine) == (None, Engine.ROCKSDB)
    assert len(values(plane, "lasting")) == 500
    assert [meta.engine for meta in plane.shards.listed()] == [Engine.ROCKSDB, Engine.ROCKSDB]
    plane.close()
    store.close()


@pytest.mark.spec("D5")
@pytest.mark.promise("P2")
def test_a_failed_switch_keeps_the_topic_on_its_engine(plane: StreamPlane, store: GatedStore) -> None:
    plane.topics.create("orders", ROCKSDB)
    for number in range(10):
        plane.drivers.append("orders", Record(b"%d" % number), durability=Durability.WRITTEN)
    plane.migration.begin("orders", Engine.MEMORY, Durability.MEMORY)
    plane.migration.step("orders")
    store.fail_write = StorageError("on purpose")
    with pytest.raises(StorageError):
        plane.migration.finish("orders")
    store.fail_write = None
    plane.drivers.append("orders", Record(b"10"), durability=Durability.WRITTEN)
    assert plane.topics.get("orders").config.engine is Engine.ROCKSDB
    assert plane.migration.finish("orders").config.engine is Engine.MEMORY
    assert values(plane, "orders") == [b"%d" % number for number in range(11)]


@pytest.mark.spec("D5")
def test_metadata_survives_an_export_and_import_as_json(plane: StreamPlane) -> None:
    for number in range(3):
        topic = plane.topics.create(
            f"t{number}", TopicConfig(partitions=number + 1, engine=Engine.ROCKSDB, retention_ms=number or None)
        )
        for _ in range(4 + number):
            plane.drivers.append(f"t{number}", Record(b"x"), partition=0, durability=Durability.WRITTEN)
        plane.offsets.commit("g", {(topic.id, 0): number})
    plane.offsets.commit("ü", {(plane.topics.get("t2").id, 2): 9})
    exported = list(export_metadata(plane.topics, plane.drivers, plane.offsets))
    assert all(line.endswith(b"}\n") for line in exported)

    other = StreamPlane(MemoryStore(), FakeClock())
    done = import_metadata(exported, other.topics, other.offsets)
    assert (done.topics, done.topics_skipped, done.offsets, done.offsets_skipped) == (3, [], 4, 0)
    for number in range(3):
        ours, theirs = plane.topics.get(f"t{number}"), other.topics.get(f"t{number}")
        assert (ours.id, ours.config) == (theirs.id, theirs.config)
    assert other.offsets.of_group("g") == plane.offsets.of_group("g")
    info = other.drivers.info("t1", 0)
    assert (info.start_offset, info.next_offset, info.records) == (5, 5, 0)
    assert other.drivers.append("t1", Record(b"y"), partition=0)[1].base_offset == 5
    again = import_metadata(exported, other.topics, other.offsets)
    assert (again.topics, again.topics_skipped) == (0, ["t0", "t1", "t2"])
    third = StreamPlane(MemoryStore(), FakeClock())
    import_metadata(list(export_metadata(other.topics, other.drivers, other.offsets)), third.topics, third.offsets)
    assert [line for line in export_metadata(third.topics, third.drivers, third.offsets) if b"group" in line] == [
        line for line in exported if b"group" in line
    ]
    other.close()
    third.close()


@pytest.mark.spec("D5")
@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([b'{"basalt":"queues","version":1}'], InvalidArgumentError),
        ([b'{"basalt":"streams","version":2}'], StoreTooNewError),
        ([b"not json"], CorruptionError),
        ([b'{"basalt":"streams","version":1}', b'{"topic":"t"}'], CorruptionError),
        ([b'{"basalt":"streams","version":1}', b"[]"], InvalidArgumentError),
        (
            [b'{"basalt":"streams","version":1}', b'{"group":"g","topic":"t","partition":"0","offset":1}'],
            CorruptionError,
        ),
    ],
)
def test_invalid_metadata_is_refused(
    plane: StreamPlane, store: GatedStore, lines: list[bytes], error: type[BasaltError]
) -> None:
    before = rows(store)
    with pytest.raises(error):
        import_metadata(lines, plane.topics, plane.offsets)
    assert rows(store) == before


@pytest.mark.spec("D1")
def test_a_topic_survives_a_reopen(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    plane = StreamPlane(store, FakeClock())
    topic = plane.topics.create("orders", TopicConfig(partitions=3, engine=Engine.ROCKSDB, compact=True))
    _, append = plane.drivers.append("orders", Record(b"x", key=b"k"))
    plane.drivers.wait(append)
    plane.close()
    plane.close()
    store.close()
    store = open_store(tmp_path / "s")
    plane = StreamPlane(store, FakeClock())
    assert plane.topics.get("orders") == topic
    assert values(plane, "orders", partition_of_key(b"k", 3)) == [b"x"]
    plane.close()
    store.close()
