"""Queue storage of version 1, as found on disk, becomes one of version 2 with all it held."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import pytest
from tests.fixtures.messages_v1_make import unpack
from tests.fixtures.messages_world import WatchedStore
from tests.fixtures.queue_storage_v1_make import ARCHIVE, EXPIRES_NS, MESSAGES, QUEUES, STATE, rows

from basaltmq.errors import CorruptionError, StoreStalledError
from basaltmq.queues import upgrade
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.lease import Lease
from basaltmq.queues.message import Message
from basaltmq.queues.storage import CONTENT, VERSION, StoreStorage
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.versions import read_version


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
    leases = [
        Lease(
            queue=messages[at].queue,
            message_id=messages[at].id,
            consumer="consumer-1",
            expires_ns=expires_ns,
            token=0,
            fairness_key=messages[at].fairness_key,
            enqueued_ns=messages[at].enqueued_ns,
        )
        for at, expires_ns in EXPIRES_NS.items()
    ]
    assert list(storage.list_expired(1 << 63)) == leases
    assert [storage.get_message(lease.message_key()) for lease in leases] == [messages[at] for at in EXPIRES_NS]
    assert dict(storage.list_state()) == STATE
    counts = {family: len(list(store.scan(family))) for family in (Family.MESSAGES, Family.LEASES, Family.LEASE_EXPIRY)}
    assert counts == {Family.MESSAGES: 5, Family.LEASES: 2, Family.LEASE_EXPIRY: 2}


@pytest.mark.spec("A9")
def test_a_real_store_of_version_1_is_upgraded_with_all_it_held(tmp_path: Path) -> None:
    path = unpack(ARCHIVE, tmp_path)
    for _ in range(2):
        store = open_store(path, create=False)
        check(store)
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
def test_a_row_that_cannot_be_read_stops_the_upgrade_by_name(family: Family, value: bytes) -> None:
    store = MemoryStore()
    batch = Batch()
    batch.put(family, b"key", value)
    store.write(batch)
    with pytest.raises(CorruptionError, match="version 1 cannot be read"):
        StoreStorage.open(store)
    assert store.get(family, b"key") == value
