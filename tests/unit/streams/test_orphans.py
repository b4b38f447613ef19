"""Topics deleted with their parent leave no rows."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.stream_engines import FakeClock

from basaltmq.catalog import deletion
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import NewObject
from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, StorageError
from basaltmq.log.batches.record import Record
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.memory import MemoryStore
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import SHADOW, Engine, ShardConfig, ShardSpec
from basaltmq.streams.topics import MigrationState, TopicConfig, Topics

FAMILIES = (
    Family.SHARDS,
    Family.STREAM_RECORDS,
    Family.STREAM_RECORD_INDEX,
    Family.CONSUMER_OFFSETS,
    Family.TOPIC_GROUPS,
    Family.CONFIGURED_OBJECTS,
    Family.OBJECT_NAMES,
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def plane(store: MemoryStore) -> Iterator[StreamPlane]:
    made = StreamPlane(store, FakeClock())
    yield made
    made.close()


def rows(store: MemoryStore) -> dict[Family, list[tuple[bytes, bytes]]]:
    """Return all rows except the shard counter, which never goes back."""
    return {each: [row for row in store.scan(each) if row[0] != b"N"] for each in FAMILIES}


def fill(plane: StreamPlane, name: str, topics: int = 3) -> tuple[UUID, Topics]:
    """Create a virtual host with topics, records and offsets of a group."""
    vhost = plane.catalog.create_many([NewObject(Kind.VHOST, name)])[0]
    made = Topics(plane.catalog, plane.shards, plane.offsets, plane.watermarks.group, plane.engines.get, parent=vhost)
    for number in range(topics):
        engine = Engine.ROCKSDB if number % 2 else Engine.MEMORY
        topic = made.create(f"t{number}", TopicConfig(engine=engine, partitions=2))
        adapter = plane.engines.get(engine)
        for shard in topic.shards:
            adapter.wait(adapter.write(shard, Record(b"v", b"k", tags=(b"t",))))
            adapter.commit_offset("group", {shard: 1})
    return vhost, made


@given(st.uuids())
def test_the_key_of_an_orphaned_topic_survives_a_round_trip_and_others_are_refused(topic_id: UUID) -> None:
    key = stream_keys.orphaned_topic_key(topic_id)
    assert stream_keys.decode_orphaned_topic_key(key) == topic_id
    for other in (key[:-1], key + b"x", stream_keys.shard_name_prefix(topic_id)):
        with pytest.raises(CorruptionError):
            stream_keys.decode_orphaned_topic_key(other)


@pytest.mark.promise("P10")
@pytest.mark.parametrize("in_steps", [False, True])
def test_the_topics_of_a_deleted_vhost_leave_no_rows(
    store: MemoryStore, plane: StreamPlane, in_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_steps:
        monkeypatch.setattr(deletion, "OBJECTS_PER_BATCH_MAX", 2)
    fill(plane, "kept")
    before = rows(store)
    vhost, topics = fill(plane, "going", topics=5)
    plane.catalog.delete(vhost)
    assert topics.find("t1") is None
    assert plane.engines.retain(0) == 5
    assert rows(store) == before
    assert plane.engines.retain(0) == 0


@pytest.mark.promise("P10")
def test_orphans_left_by_a_crash_are_removed_by_the_next_process(store: MemoryStore) -> None:
    first = StreamPlane(store, FakeClock())
    before = rows(store)
    vhost, _ = fill(first, "going")
    first.catalog.delete(vhost)
    first.close()
    again = StreamPlane(store, FakeClock())
    again.engines.retain(0)
    assert rows(store) == before
    again.close()


@pytest.mark.promise("P10")
def test_copies_of_a_running_migration_are_deleted_too(store: MemoryStore, plane: StreamPlane) -> None:
    before = rows(store)
    vhost, topics = fill(plane, "going", topics=2)
    topic = topics.get("t1")
    config = ShardConfig(durability=Durability.MEMORY)
    copies = plane.shards.create([ShardSpec(topic.id, at, Engine.MEMORY, config, flags=SHADOW) for at in range(2)])
    topics.update_state(topic, topic.config, MigrationState(Engine.MEMORY, [each.number for each in copies]), Batch())
    plane.catalog.delete(vhost)
    plane.engines.retain(0)
    assert rows(store) == before


@pytest.mark.promise("P10")
def test_a_topic_deleted_through_the_catalog_loses_its_shards_and_one_deleted_by_name_has_no_orphan_row(
    store: MemoryStore, plane: StreamPlane
) -> None:
    before = rows(store)
    one = plane.topics.create("one", TopicConfig(engine=Engine.ROCKSDB))
    plane.catalog.delete(one.id)
    assert rows(store) != before
    plane.engines.retain(0)
    assert rows(store) == before
    plane.topics.create("two", TopicConfig(engine=Engine.ROCKSDB))
    plane.topics.delete("two")
    assert rows(store) == before


@pytest.mark.promise("P10")
def test_a_failed_step_is_repeated(store: MemoryStore, plane: StreamPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(store)
    vhost, _ = fill(plane, "going", topics=1)
    plane.catalog.delete(vhost)
    real = store.write

    def full(batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        raise StorageError("full")

    monkeypatch.setattr(store, "write", full)
    with pytest.raises(StorageError):
        plane.engines.retain(0)
    monkeypatch.setattr(store, "write", real)
    assert plane.engines.retain(0) == 1
    assert rows(store) == before
