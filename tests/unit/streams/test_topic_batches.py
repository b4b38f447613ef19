"""Topics created and deleted in batches: one write and one sync, errors per topic, no rows left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.stream_engines import FakeClock, GatedStore
from tests.unit.streams.test_topics import STREAM_FAMILIES, UnpoisonedStore, rows

import basaltmq
from basaltmq.catalog.kinds import Kind
from basaltmq.embedded.database import Basalt
from basaltmq.errors import (
    BasaltError,
    InvalidArgumentError,
    InvalidConfigError,
    StorageError,
    TimedOutError,
    TopicExistsError,
    TopicNotFoundError,
)
from basaltmq.log.batches.record import Record
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.streams import topics as topics_module
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import NewTopic, Topic, TopicConfig, in_batches

ROCKSDB = TopicConfig(engine=Engine.ROCKSDB)


@pytest.fixture
def store() -> GatedStore:
    return UnpoisonedStore(MemoryStore())


@pytest.fixture
def plane(store: GatedStore) -> Iterator[StreamPlane]:
    made = StreamPlane(store, FakeClock())
    made.engines.get(Engine.ROCKSDB)
    yield made
    store.gate.set()
    store.fail_write = store.fail_sync = None
    made.close()


@pytest.fixture
def batches(store: GatedStore) -> list[Batch]:
    """Record the batches written from now on."""
    seen: list[Batch] = []
    write = store.write

    def noted(batch: Batch, **options: Any) -> None:
        seen.append(batch)
        write(batch, **options)

    store.write = noted  # type: ignore[method-assign]
    return seen


def wanted(count: int, config: TopicConfig = ROCKSDB) -> list[NewTopic]:
    return [NewTopic(f"t{number:04}", config) for number in range(count)]


def kinds(results: list[Topic | BasaltError]) -> list[type]:
    return [type(each) for each in results]


@pytest.mark.spec("B8", "D1")
def test_a_hundred_topics_are_one_batch_and_one_sync(
    plane: StreamPlane, store: GatedStore, batches: list[Batch]
) -> None:
    before = store.syncs
    made = plane.topics.create_many(wanted(100, TopicConfig(partitions=2, engine=Engine.ROCKSDB)))
    assert len(batches) == 1
    assert store.syncs - before == 1
    assert [each.name for each in made if isinstance(each, Topic)] == [each.name for each in wanted(100)]
    for each in made:
        assert isinstance(each, Topic)
        assert plane.topics.get(each.name) == each
    batches.clear()
    before = store.syncs
    assert plane.topics.delete_many([each.name for each in wanted(100)]) == [None] * 100
    assert len(batches) == 1
    assert store.syncs - before == 1


@pytest.mark.spec("B8")
@pytest.mark.promise("P2")
def test_a_refused_topic_does_not_affect_the_others(
    plane: StreamPlane, store: GatedStore, batches: list[Batch]
) -> None:
    plane.topics.create("there", ROCKSDB)
    before = rows(store)
    batches.clear()
    results = plane.topics.create_many(
        [
            NewTopic("first", ROCKSDB),
            NewTopic("there", ROCKSDB),
            NewTopic("", ROCKSDB),
            NewTopic("x" * 70_000, ROCKSDB),
            NewTopic("empty", TopicConfig(partitions=0, engine=Engine.ROCKSDB)),
            NewTopic("elsewhere", TopicConfig(engine=Engine.SEGMENT)),
            NewTopic("first", ROCKSDB),
            NewTopic("last", ROCKSDB),
        ]
    )
    assert kinds(results) == [
        Topic,
        TopicExistsError,
        InvalidArgumentError,
        InvalidArgumentError,
        InvalidConfigError,
        InvalidConfigError,
        TopicExistsError,
        Topic,
    ]
    assert len(batches) == 1
    assert [each.name for each in plane.topics.page().topics] == ["first", "last", "there"]
    assert plane.topics.delete_many(["first", "last"]) == [None, None]
    assert rows(store) == before


def test_a_batch_of_refused_topics_writes_nothing(plane: StreamPlane, store: GatedStore, batches: list[Batch]) -> None:
    before = store.syncs
    assert kinds(plane.topics.create_many([NewTopic("", ROCKSDB)])) == [InvalidArgumentError]
    assert plane.topics.create_many([]) == []
    assert (len(batches), store.syncs) == (0, before)


@pytest.mark.spec("B8")
def test_a_dangling_name_index_row_does_not_block_the_name(plane: StreamPlane, store: GatedStore) -> None:
    topic = plane.topics.create("stale", ROCKSDB)
    index = dict(store.scan(Family.OBJECT_NAMES))
    plane.topics.delete("stale")
    batch = Batch()
    for key, row in index.items():
        if row == topic.id.bytes:
            batch.put(Family.OBJECT_NAMES, key, row)
    store.write(batch)
    assert plane.catalog.taken(Kind.TOPIC, ["stale"]) == set()
    assert kinds(plane.topics.create_many([NewTopic("stale", ROCKSDB)])) == [Topic]
    assert plane.catalog.taken(Kind.TOPIC, ["stale", "other"]) == {"stale"}


@pytest.mark.spec("B8")
@pytest.mark.promise("P2")
@pytest.mark.parametrize("step", ["write", "sync", "cache"])
def test_a_batch_that_fails_at_any_step_leaves_no_topic(
    plane: StreamPlane, store: GatedStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows(store)
    failure = StorageError("on purpose")
    if step == "write":
        store.fail_write = failure
    elif step == "sync":
        store.fail_sync = failure
    else:
        kept = plane.topics._cache.put
        calls: list[bytes] = []

        def put(key: bytes, *args: Any) -> None:
            calls.append(key)
            if len(calls) == 3:
                raise failure
            kept(key, *args)

        monkeypatch.setattr(plane.topics._cache, "put", put)
    with pytest.raises(StorageError, match="on purpose"):
        plane.topics.create_many(wanted(5))
    monkeypatch.undo()
    store.fail_write = store.fail_sync = None
    assert rows(store) == before
    assert [plane.topics.find(each.name) for each in wanted(5)] == [None] * 5
    assert kinds(plane.topics.create_many(wanted(5))) == [Topic] * 5


@pytest.mark.spec("B8")
def test_a_batch_over_the_time_limit_is_rolled_back(plane: StreamPlane, store: GatedStore) -> None:
    before = rows(store)
    store.gate.clear()
    with pytest.raises(TimedOutError, match=r"'t0000' and 4 more took longer than 50 ms and was rolled back"):
        plane.topics.create_many(wanted(5), timeout_ms=50)
    assert rows(store) == before
    store.gate.set()
    assert kinds(plane.topics.create_many(wanted(5))) == [Topic] * 5


def test_topics_that_cannot_be_deleted_do_not_affect_the_others(plane: StreamPlane, store: GatedStore) -> None:
    before = rows(store)
    plane.topics.create_many(wanted(3))
    failures = plane.topics.delete_many(["t0000", "missing", "t0000", "t0001", "t0002"])
    assert [type(each) for each in failures] == [
        type(None),
        TopicNotFoundError,
        TopicNotFoundError,
        type(None),
        type(None),
    ]
    assert rows(store) == before


@pytest.mark.promise("P2")
def test_a_delete_that_is_not_written_leaves_all_topics_usable(plane: StreamPlane, store: GatedStore) -> None:
    plane.topics.create_many(wanted(3))
    store.fail_write = StorageError("on purpose")
    with pytest.raises(StorageError, match="on purpose"):
        plane.topics.delete_many([each.name for each in wanted(3)])
    store.fail_write = None
    for each in wanted(3):
        plane.drivers.append(each.name, Record(b"still here"))


def test_batches_are_limited_in_topics_and_partitions(
    plane: StreamPlane, batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics_module, "TOPICS_PER_BATCH", 4)
    monkeypatch.setattr(topics_module, "PARTITIONS_PER_BATCH", 6)
    wide = TopicConfig(partitions=5, engine=Engine.ROCKSDB)
    many = [*wanted(5), NewTopic("wide", wide), NewTopic("wider", wide), NewTopic("end", ROCKSDB)]
    divided = list(in_batches(many))
    assert [[each.name for each in batch] for batch in divided] == [
        ["t0000", "t0001", "t0002", "t0003"],
        ["t0004", "wide"],
        ["wider", "end"],
    ]
    for batch in divided:
        plane.topics.create_many(batch)
    batches.clear()
    assert plane.topics.delete_many([each.name for each in many]) == [None] * 8
    # 4 topics; 1, wide (6 partitions); wider, end (6 partitions).
    assert len(batches) == 3


def _frames(db: Basalt) -> int:
    engine = db.streams.engines.get(Engine.SEGMENT)
    assert isinstance(engine, SegmentEngine)
    return sum(lane.log.end for lane in engine.lanes)


def _rows(db: Basalt) -> dict[Family, list[bytes]]:
    found = {each: [key for key, _ in db.store.scan(each) if key != b"N"] for each in STREAM_FAMILIES}
    return {each: keys for each, keys in found.items() if each is not Family.STREAM_RECORD_INDEX}


@pytest.mark.promise("P10")
def test_topics_that_were_never_written_leave_no_row_and_no_frame(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("other").append(b"x")
        before, log_bytes = _rows(db), _frames(db)
        assert db.create_topics((f"t{number}" for number in range(250)), partitions=2) == 250
        assert db.delete_topics(f"t{number}" for number in range(250)) == 250
        assert _rows(db) == before
        assert _frames(db) == log_bytes


@pytest.mark.promise("P10")
def test_topics_with_records_and_offsets_leave_nothing_after_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "data"
    names = [f"t{number}" for number in range(30)]
    with basaltmq.open(path) as db:
        db.topic("other").append(b"x")
        db.streams.engines.get(Engine.SEGMENT).sync()
    with basaltmq.open(path) as db:
        before = _rows(db)
        db.create_topics(names)
        for name in names[::2]:
            db.topic(name).append([b"a", b"b"])
            with db.topic(name).consume("readers", wait=0) as consumer:
                assert [record.value for record in consumer] == [b"a", b"b"]
        assert db.delete_topics(names) == 30
        assert [topic.name for topic in db.topics()] == ["other"]
    with basaltmq.open(path) as db:
        assert _rows(db) == before
        shards = {meta.number for meta in db.streams.shards.listed()}
        engine = db.streams.engines.get(Engine.SEGMENT)
        assert isinstance(engine, SegmentEngine)
        for number in range(1, 40):
            assert (engine.index.shard_row(number) is None) == (number not in shards)
        assert db.create_topics(names) == 30
        assert [record.value for record in db.topic("t0").read()] == []


def test_create_topics_accepts_existing_topics_with_the_same_settings(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("b", partitions=2)
        assert db.create_topics(["a", "b", "a"], partitions=2) == 1
        with pytest.raises(InvalidConfigError, match="'b' exists with partitions=2, not 1"):
            db.create_topics(["b", "c"], partitions=1)
        assert [topic.name for topic in db.topics()] == ["a", "b", "c"]
        with pytest.raises(InvalidArgumentError, match="needs a name"):
            db.create_topics(["d", ""])
        with pytest.raises(InvalidConfigError, match="the topics: "):
            db.create_topics(["e"], partitions="many")  # type: ignore[arg-type]
        assert db.delete_topics(["a", "nowhere", "b", "c", "d"]) == 4
        assert list(db.topics()) == []
