"""The planes after a repair: losses are reported, derived rows are rebuilt, all rows are consistent."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest

import basaltmq
from basaltmq.catalog.configuration import ConfigurationStore
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.record import ConfiguredRecord, decode_value, encode_value
from basaltmq.embedded.database import Basalt
from basaltmq.embedded.reconcile import reconcile_planes
from basaltmq.pipeline.audit.queues import audit_queues
from basaltmq.queues.draft import Draft
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.open import open_store
from basaltmq.store.repair import Repaired, repair
from basaltmq.store.salvage.losses import Gap, Losses
from basaltmq.store.salvage.naming import Loss
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import topic_state

HOUR_MS = 3_600_000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with basaltmq.open(path) as db:
        db.queue("a").enqueue([b"%d" % number for number in range(20)])
        db.queue("late").enqueue([Draft(payload=b"x", delay_ms=HOUR_MS), Draft(payload=b"y", ttl_ms=HOUR_MS)])
        db.queue("b")
        for _ in range(3):
            db.queue_plane.publish(["a", "b"], bytes(8_000))
        db.queue("a").lease(3, visibility_ms=HOUR_MS)
        db.topic("rows", engine="rocksdb", partitions=2).append([b"r"] * 10, partition=1)
        db.topic("frames", partitions=2).append([b"f"] * 10, partition=1)
    return path


def lose(path: Path, family: Family, wanted: Iterable[bytes] | None = None) -> tuple[Losses, list[Loss]]:
    """Delete rows as damage would, repair, and check that all rows are consistent."""
    with closing(open_store(path, create=False)) as store:
        batch = Batch()
        gaps = []
        for key, _ in store.scan(family):
            if wanted is None or key in wanted:
                batch.delete(family, key)
                gaps.append(Gap(family.label, key, key + b"\0", "000001.sst", "a test"))
        assert gaps
        store.write(batch)
        if family is Family.SHARDS:
            wipe = Batch()
            wipe.delete_range(Family.STREAM_INDEX, b"", b"\xff" * 64)
            store.write(wipe)
        losses = Losses(gaps=gaps)
        found = reconcile_planes(store, losses, path)
        assert [each for each in reconcile_planes(store, losses, path) if each not in found] == []
        assert list(audit_queues(store)) == []
    return losses, found


def keys_of(path: Path, family: Family) -> list[bytes]:
    with closing(open_store(path, create=False)) as store:
        return [key for key, _ in store.scan(family)]


@pytest.mark.promise("P7")
def test_lost_shared_body_removes_its_message_from_every_queue(home: Path) -> None:
    body = keys_of(home, Family.MESSAGE_CONTENT)[1]
    _, found = lose(home, Family.MESSAGE_CONTENT, [body])
    assert {queue for loss in found for queue in loss.queues} == {"a", "b"}
    assert sum(len(loss.ids) for loss in found) == 2
    with basaltmq.open(home, create=False) as db:
        assert db.queue("a").stats()["messages"] == 22
        assert len(db.queue("b").lease(10)) == 2


@pytest.mark.promise("P7")
def test_queue_with_lost_configuration_keeps_its_messages(home: Path) -> None:
    _, found = lose(home, Family.QUEUES)
    assert {queue for loss in found for queue in loss.queues} == {"a", "b", "late"}
    with basaltmq.open(home, create=False) as db:
        assert {queue.name for queue in db.queues()} == {"a", "b", "late"}
        assert len(db.queue("a").lease(100)) == 20


@pytest.mark.promise("P10")
def test_rows_of_a_deleted_queue_do_not_restore_it(home: Path) -> None:
    with closing(open_store(home, create=False)) as store:
        batch = Batch()
        batch.delete(Family.QUEUES, queue_keys.queue_key("a"))
        store.write(batch)
        found = reconcile_planes(store, Losses(gaps=[Gap("leases", b"", None, "", "")]), home)
        assert [loss.subject for loss in found if "deleted" in loss.text] == ["queue 'a'"]
        assert list(audit_queues(store)) == []
    with basaltmq.open(home, create=False) as db:
        assert {queue.name for queue in db.queues()} == {"b", "late"}
        assert len(db.queue("b").lease(10)) == 3


@pytest.mark.promise("P6")
@pytest.mark.parametrize(
    "family",
    [
        Family.QUEUE_STATS,
        Family.CONTENT_REFS,
        Family.LEASE_EXPIRY,
        Family.MESSAGE_EXPIRY,
        Family.TIMERS,
        Family.OBJECT_NAMES,
        Family.STREAM_RECORD_INDEX,
    ],
    ids=lambda family: family.label,
)
def test_derived_rows_are_rebuilt(home: Path, family: Family) -> None:
    before = keys_of(home, family)
    _, found = lose(home, family)
    assert found == []
    assert keys_of(home, family) == before


@pytest.mark.promise("P7", "P10")
def test_topics_are_restored_from_shards_and_shards_from_topics(home: Path) -> None:
    for family in (Family.SHARDS, Family.CONFIGURED_OBJECTS):
        _, found = lose(home, family)
        assert {"topic 'rows'", "topic 'frames'"} <= {loss.subject for loss in found}
        with basaltmq.open(home, create=False) as db:
            for name, value in (("rows", b"r"), ("frames", b"f")):
                topic = db.topic(name, create=False)
                assert [record.value for record in topic.read(1)] == [value] * 10
                assert topic.append(b"more", partition=1).offset == 10
                topic.delete_offsets(1, [10])
                assert topic.append(b"more", partition=0).offset == 0
                topic.delete_offsets(0, [0])
            db.delete_topic("rows")
            db.topic("rows", engine="rocksdb", partitions=2).append([b"r"] * 10, partition=1)
            db.delete_topic("frames")
            db.topic("frames", partitions=2).append([b"f"] * 10, partition=1)


def shards_of(db: Basalt) -> dict[str, list[int]]:
    return {topic.name: list(topic.shards) for topic in db.streams.topics.page().topics}


def copies_of(path: Path) -> dict[str, list[int]]:
    """Return the shard numbers in the topic objects."""
    with closing(open_store(path, create=False)) as store:
        found = (decode_value(raw, UUID(int=0)) for _, raw in store.scan(Family.CONFIGURED_OBJECTS))
        return {
            str(each.attributes["name"]): topic_state(each.attributes).numbers()
            for each in found
            if each.type == Kind.TOPIC
        }


@pytest.mark.promise("P7")
def test_topic_object_keeps_its_shard_numbers(home: Path) -> None:
    with basaltmq.open(home, create=False) as db:
        db.streams.topics.alter("rows", partitions=4)
        migration = db.streams.migration
        migration.begin("frames", Engine.ROCKSDB)
        while migration.step("frames").left:
            pass
        migration.finish("frames")
        expected = shards_of(db)
    assert copies_of(home) == expected
    assert len(expected["rows"]) == 4


@pytest.mark.promise("P7", "P10")
def test_repair_updates_the_shard_numbers_of_topic_objects(home: Path) -> None:
    """A topic of an earlier version has no copy. A lost shard gets another number."""
    with closing(open_store(home, create=False)) as store:
        batch = Batch()
        for key, raw in store.scan(Family.CONFIGURED_OBJECTS):
            value = decode_value(raw, catalog_keys.decode_configured_key(key))
            if value.type == Kind.TOPIC:
                attributes = {name: each for name, each in value.attributes.items() if name != "shards"}
                record = ConfiguredRecord(catalog_keys.decode_configured_key(key), Kind.TOPIC, attributes)
                batch.put(Family.CONFIGURED_OBJECTS, key, encode_value(record))
        store.write(batch)
    lose(home, Family.SHARDS)
    with basaltmq.open(home, create=False) as db:
        expected = shards_of(db)
    assert copies_of(home) == expected


@pytest.mark.promise("P7", "P14")
def test_lost_user_loses_its_permissions_and_lost_vhost_is_restored(home: Path) -> None:
    user, vhost = UUID(int=1), UUID(int=2)
    with closing(open_store(home, create=False)) as store:
        catalog = ConfigurationStore(store)
        catalog.open()
        catalog.create(
            ConfiguredRecord(user, Kind.USER, {"name": "ann"}),
            ConfiguredRecord(vhost, Kind.VHOST, {"name": "/shop"}),
            ConfiguredRecord(UUID(int=3), Kind.PERMISSION, {"name": "p"}, {Kind.USER: user}),
            ConfiguredRecord(UUID(int=4), "policy", {"name": "limits"}, {Kind.VHOST: vhost}),
        )
        catalog.close()
    _, found = lose(
        home, Family.CONFIGURED_OBJECTS, [catalog_keys.configured_key(user), catalog_keys.configured_key(vhost)]
    )
    said = {loss.subject: loss.text for loss in found}
    assert "is lost" in said["permission 'p'"]
    assert "'ann'" in said["permission 'p'"]
    assert "default" in said["vhost '/shop'"]
    with closing(open_store(home, create=False)) as store:
        catalog = ConfigurationStore(store)
        catalog.open()
        names = {record.attributes.get("name") for record in catalog.records()}
        assert {"/shop", "limits"} <= names
        assert not {"ann", "p"} & names
        assert catalog.check().faults == []


@pytest.mark.promise("P4", "P7")
def test_lost_counters_never_decrease(home: Path) -> None:
    with basaltmq.open(home, create=False) as db:
        before = db.queue("b").lease(1)[0]
    _, _ = lose(home, Family.VERSION)
    with basaltmq.open(home, create=False) as db:
        after = db.queue("b").lease(1)[0]
        assert after.token > before.token
        db.queue("a").enqueue(b"last")
        assert db.queue("a").peek(100)[-1].payload == b"last"


@pytest.mark.promise("P7")
def test_stream_queue_is_not_restored_as_a_classic_queue(tmp_path: Path) -> None:
    """Its records are in the topic of its name. A new declaration finds them; a classic queue would hide them."""
    path = tmp_path / "store"
    with basaltmq.open(path) as db:
        db.queue("log")
        db.queue("orders").enqueue(b"1")
        db.topic("log", partitions=1).append([b"r"] * 3)
        db.topic("orders", partitions=1).append([b"r"] * 3)
    _, found = lose(path, Family.QUEUES)
    texts = {loss.subject: loss.text for loss in found}
    assert "declare it again: its records are in topic 'log'" in texts["queue 'log'"]
    assert "default settings" in texts["queue 'orders'"]
    assert keys_of(path, Family.QUEUES) == [queue_keys.queue_key("orders")]
    with basaltmq.open(path, create=False) as db:
        assert len(list(db.topic("log", create=False).read(0))) == 3


@pytest.mark.promise("P1", "P7")
@pytest.mark.parametrize(
    ("pattern", "size", "is_brought_back"),
    [("kv/*.blob", 20_000, False), ("kv/*.blob", 20_000, True), ("bodies/*.body", 40_000, True)],
    ids=["rewritten header", "blob file brought back", "body file brought back"],
)
def test_messages_with_readable_bodies_return_from_quarantine(
    tmp_path: Path, pattern: str, size: int, is_brought_back: bool
) -> None:
    """A damaged header hides all values of a blob file. A repair writes the header again."""
    path = tmp_path / "store"
    shared = b"s" * size
    bodies: list[bytes | str | Draft] = [bytes((number,)) * size for number in range(5)]
    with basaltmq.open(path) as db:
        db.queue("large").enqueue(bodies)
        db.queue("copy")
        db.queue_plane.publish(["large", "copy"], shared)
        db.store.flush()
    (file,) = path.glob(pattern)
    intact = file.read_bytes()
    if file.suffix == ".blob":
        file.write_bytes(bytes(30) + intact[30:])
    else:
        file.unlink()
    with basaltmq.open(path, create=False) as db:
        assert (db.queue("large").lease(10), db.queue("copy").lease(10)) == ([], [])
        assert (db.queue("large").stats()["quarantined"], db.queue("copy").stats()["quarantined"]) == (6, 1)
    if is_brought_back:
        file.write_bytes(intact)
    outcome = repair(path, reconcile=reconcile_planes)
    assert outcome.losses == []
    assert "queue 'large': 6 messages returned from quarantine" in "\n".join(outcome.done)
    with basaltmq.open(path, create=False) as db:
        assert [each.payload for each in db.queue("large").lease(10)] == [*bodies, shared]
        assert [each.payload for each in db.queue("copy").lease(10)] == [shared]
        assert (db.queue("large").stats()["quarantined"], db.queue("large").stats()["messages"]) == (0, 6)
        assert list(audit_queues(db.store)) == []
    assert repair(path, reconcile=reconcile_planes) == Repaired()


@pytest.mark.promise("P7")
def test_repair_keeps_the_body_of_a_quarantined_message(tmp_path: Path) -> None:
    """An operator may still export it."""
    path = tmp_path / "store"
    with basaltmq.open(path) as db:
        db.queue("large").enqueue(b"x" * 40_000)
    with closing(open_store(path, create=False)) as store:
        ((key, row),) = store.scan(Family.MESSAGES)
        batch = Batch()
        # Layout of the inner row, after the envelope with the body id.
        batch.put(Family.MESSAGES, key, row[:22] + b"\x7f" + row[23:])
        store.write(batch)
    with basaltmq.open(path, create=False) as db:
        assert db.queue("large").lease(1) == []
    assert repair(path, reconcile=reconcile_planes).losses == []
    with basaltmq.open(path, create=False) as db:
        assert db.queue("large").stats()["quarantined"] == 1
        ((_, body),) = db.store.scan(Family.MESSAGE_CONTENT)
        assert body == b"x" * 40_000
