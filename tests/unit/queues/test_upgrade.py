"""Queue storage of earlier versions, as found on disk, becomes one of today with all it held."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import pytest
from tests.fixtures.messages_v1_make import unpack
from tests.fixtures.messages_world import WatchedStore
from tests.fixtures.queue_storage_v1_make import ARCHIVE, EXPIRES_NS, MESSAGES, QUEUES, STATE, rows

from basaltmq.errors import StoreStalledError
from basaltmq.queues import upgrade
from basaltmq.queues.config import QueueConfig, default_row, encode_config
from basaltmq.queues.lease import Lease
from basaltmq.queues.lease_v2 import Lease as LeaseV2
from basaltmq.queues.lease_v2 import encode_lease
from basaltmq.queues.message import Message, encode_row
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.quarantine import records
from basaltmq.queues.storage import CONTENT, VERSION, StoreStorage
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.store.versions import put_version, read_version


def expected_messages() -> list[Message]:
    return [
        Message(
            id=UUID(str(each["id"])).bytes,
            queue=str(each["queue_id"]),
            payload=bytes(each["payload"]),  # type: ignore[arg-type]
            enqueued_ns=each["enqueued_at"],  # type: ignore[arg-type]
            fairness_key=str(each["fairness_key"]),
            headers=each["headers"],  # type: ignore[arg-type]
            weight=each["weight"],  # type: ignore[arg-type]
            throttle_keys=tuple(each["throttle_keys"]),  # type: ignore[arg-type]
            attempts=each["attempt_count"],  # type: ignore[arg-type]
            leased_ns=each["leased_at"] or 0,  # type: ignore[arg-type]
        )
        for each in MESSAGES
    ]


def check(store: Store) -> None:
    storage = StoreStorage.open(store)
    assert read_version(store, CONTENT) == VERSION
    messages = expected_messages()
    for queue in QUEUES:
        name = str(queue["name"])
        assert list(storage.list_messages(name)) == [each for each in messages if each.queue == name]
        config = storage.get_queue(name)
        assert config == QueueConfig(
            name=name,
            on_enqueue_script=queue["on_enqueue_script"],  # type: ignore[arg-type]
            visibility_timeout_ms=queue["visibility_timeout_ms"],  # type: ignore[arg-type]
            dead_letter_queue=queue["dlq_queue_id"],  # type: ignore[arg-type]
        )
    leases = list(storage.list_expired(1 << 63))
    assert [(lease.expires_ns, lease.consumer) for lease in leases] == [
        (expires_ns, "consumer-1") for expires_ns in EXPIRES_NS.values()
    ]
    assert [storage.get_messages(list(lease.message_keys)) for lease in leases] == [[messages[at]] for at in EXPIRES_NS]
    assert all(0 < lease.token < 1 << 40 for lease in leases)
    assert dict(storage.list_state()) == STATE
    counts = {family: len(list(store.scan(family))) for family in COUNTED}
    assert counts == dict(zip(COUNTED, (5, 0, 0, 2, 2), strict=True))


COUNTED = (Family.MESSAGES, Family.LEASES, Family.LEASE_EXPIRY, Family.LEASE_CALLS, Family.LEASE_CALL_EXPIRY)


@pytest.mark.spec("A9")
def test_a_real_store_of_version_1_is_upgraded_with_all_it_held(tmp_path: Path) -> None:
    path = unpack(ARCHIVE, tmp_path)
    for _ in range(2):
        store = open_store(path, create=False)
        check(store)
        store.close()
    serve(path)


def serve(path: Path) -> None:
    """What was upgraded is what a plane hands out: the leases of the past lapse, and then everything is delivered."""
    store = open_store(path, create=False)
    commit = GroupCommit(store)
    plane = QueuePlane(store, commit)
    messages = expected_messages()
    for key in STATE:
        # Its throttles hold messages back, which is not what this is about.
        plane.delete_setting(key)
    for queue in QUEUES:
        name = str(queue["name"])
        assert plane.stats(name)["messages"] == len([each for each in messages if each.queue == name])
    while (deadline := plane.run_due(1 << 62)) is not None and deadline <= 1 << 62:
        pass
    found: list[bytes] = []
    for config in plane.configs():
        while held := plane.lease(config.name, 10):
            found += [delivery.payload for delivery in held]
            plane.ack(config.name, held[0].token)
    assert sorted(found) == sorted(each.payload for each in messages)
    plane.close()
    commit.close()
    store.close()


@pytest.mark.spec("A9")
@pytest.mark.promise("P2")
def test_an_upgrade_interrupted_at_any_write_is_finished_by_the_next() -> None:
    with patch.object(upgrade, "BATCH_BYTES", 1):
        fail_at = 0
        while True:
            store = WatchedStore(MemoryStore())
            store.inner.write(rows())
            store.watch(fail_at)
            try:
                check(store)
            except StoreStalledError:
                check(store)
            else:
                break
            fail_at += 1
        assert fail_at > 5


@pytest.mark.spec("A9")
@pytest.mark.parametrize(
    ("family", "value"),
    [
        (Family.MESSAGES, b'{"id": 1}'),
        (Family.MESSAGES, b"{"),
        (Family.QUEUES, b'{"name": "", "visibility_timeout_ms": 1}'),
    ],
)
def test_a_row_that_cannot_be_read_goes_to_quarantine_and_stops_no_upgrade(family: Family, value: bytes) -> None:
    store = MemoryStore()
    batch = Batch()
    batch.put(family, b"key", value)
    store.write(batch)
    StoreStorage.open(store)
    (record,) = records(store)
    assert (record.family, record.key, record.value) == (family.label, b"key", value)
    assert "version 1 cannot be read" in record.reason
    left = store.get(family, b"key")
    assert left == (default_row(b"key") if family is Family.QUEUES else None)


@pytest.mark.spec("A9", "A12")
@pytest.mark.promise("P7")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("damaged", [b"", b"\x09", b"random bytes that are no lease"])
def test_a_damaged_lease_of_an_earlier_version_costs_the_lease_and_no_message(version: int, damaged: bytes) -> None:
    store = MemoryStore()
    batch = Batch()
    if version == 1:
        for _, family, key, value in rows().ops:
            batch.put(family, key, damaged if family is Family.LEASES else value)
    else:
        put_version(batch, CONTENT, 2)
        message = Message(id=bytes(16), queue="q", payload=b"p", enqueued_ns=1)
        batch.put(Family.QUEUES, keys.queue_key("q"), encode_config(QueueConfig(name="q")))
        batch.put(Family.MESSAGES, message.key(), encode_row(message))
        batch.put(Family.LEASES, keys.lease_key("q", message.id), damaged)
    store.write(batch)
    before = len(list(store.scan(Family.MESSAGES)))
    commit = GroupCommit(store)
    try:
        with QueuePlane(store, commit) as plane:
            kept = {record.value for record in plane.damage.records() if record.family == Family.LEASES.label}
            assert kept == {damaged}
            ready = sum(plane.stats(config.name)["ready"] for config in plane.configs())
            assert ready == before, "their messages are ready"
    finally:
        commit.close()


@pytest.mark.spec("A9")
@pytest.mark.promise("P2")
def test_leases_of_version_2_become_calls_wherever_the_upgrade_is_interrupted() -> None:
    messages = [
        Message(id=bytes(15) + bytes([at]), queue=queue, payload=b"p", enqueued_ns=at)
        for at, queue in enumerate("aaabb")
    ]

    def made() -> WatchedStore:
        batch = Batch()
        put_version(batch, CONTENT, 2)
        for name in "ab":
            batch.put(Family.QUEUES, keys.queue_key(name), encode_config(QueueConfig(name=name)))
        for each in messages:
            batch.put(Family.MESSAGES, each.key(), encode_row(each))
            lease = LeaseV2(
                queue=each.queue,
                message_id=each.id,
                consumer="c",
                expires_ns=100 + each.enqueued_ns,
                token=0,
                fairness_key=each.fairness_key,
                enqueued_ns=each.enqueued_ns,
            )
            batch.put(Family.LEASES, keys.lease_key(each.queue, each.id), encode_lease(lease))
            expiry = keys.lease_expiry_key(lease.expires_ns, each.queue, each.id)
            batch.put(Family.LEASE_EXPIRY, expiry, b"")
        batch.delete(Family.MESSAGES, messages[1].key())
        store = WatchedStore(MemoryStore())
        store.inner.write(batch)
        return store

    with patch.object(upgrade, "BATCH_BYTES", 1):
        for fail_at in range(50):
            store = made()
            store.watch(fail_at)
            try:
                storage = StoreStorage.open(store)
                is_whole = True
            except StoreStalledError:
                storage = StoreStorage.open(store)
                is_whole = False
            leases = list(storage.list_expired(1000))
            assert [lease.expires_ns for lease in leases] == [100, 102, 103, 104]
            assert [lease.message_keys for lease in leases] == [(messages[at].key(),) for at in (0, 2, 3, 4)]
            assert len({lease.token for lease in leases}) == 4
            assert isinstance(leases[0], Lease)
            if is_whole:
                break
        assert 3 < fail_at < 49
