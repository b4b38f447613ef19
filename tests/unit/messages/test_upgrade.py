"""A message store of version 1, as found on disk, becomes one of version 2 with all it held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.fixtures.messages_v1_make import (
    ARCHIVE,
    CONTENTS,
    IN_QUEUES,
    NEXT_ID,
    ORPHAN_CONTENT_ID,
    QUEUE_ONE,
    QUEUE_TWO,
    XID,
    rows,
    unpack,
)
from tests.fixtures.messages_world import WatchedStore

from basaltmq.errors import CorruptionError, StoreStalledError, StoreTooNewError
from basaltmq.messages import upgrade
from basaltmq.messages.branches import DEQUEUE, ENQUEUE_SHARED, PREPARED, Action, PreparedBranch, Xid
from basaltmq.messages.quarantine import Quarantine, Reason
from basaltmq.messages.sequence import NEXT_MESSAGE_ID
from basaltmq.messages.store import CONTENT, FAMILIES, VERSION, MessageStore
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.store.versions import put_version, read_version
from basaltmq.transactions.xa import XaBranches


def opened(store: WatchedStore | MemoryStore, check: Callable[[MessageStore], None]) -> None:
    group = GroupCommit(store)
    try:
        check(MessageStore.open(store, group))
    finally:
        group.close()


def has_everything(messages: MessageStore) -> None:
    assert read_version(messages.store, CONTENT) == VERSION
    found: dict[int, bytes] = {}

    def take(message: object) -> None:
        found[message.id] = message.get_content()  # type: ignore[attr-defined]
        assert (message.kind, message.metadata) == (3, f"metadata {message.id}".encode())  # type: ignore[attr-defined]

    messages.visit_messages(take)
    assert found == CONTENTS
    entries: list[object] = []
    messages.visit_message_instances(lambda queue_id, message_id: entries.append((queue_id, message_id)))
    assert entries == sorted(IN_QUEUES)
    branches: list[PreparedBranch] = []
    messages.visit_distributed_transactions(branches.append)
    actions = [Action(ENQUEUE_SHARED, QUEUE_ONE, 9), Action(DEQUEUE, QUEUE_TWO, 5)]
    assert branches == [PreparedBranch(Xid(*XID), PREPARED, 0, actions)]
    (lost,) = Quarantine(messages.store).rows()
    assert (lost.family, lost.key, lost.value, lost.reason) == (
        Family.MESSAGE_CONTENT,
        ORPHAN_CONTENT_ID.to_bytes(8, "big"),
        b"lost its message",
        Reason.UNKNOWN_MESSAGE,
    )
    assert messages.add_message(b"").id == NEXT_ID
    assert messages.store.get(Family.VERSION, upgrade.CURSOR) is None


@pytest.mark.spec("A9")
def test_a_real_store_of_version_1_is_upgraded_with_all_it_held(tmp_path: Path) -> None:
    path = unpack(ARCHIVE, tmp_path)
    for _ in range(2):
        store = WatchedStore(open_store(path, create=False))
        opened(store, has_everything)
        store.close()


@pytest.mark.spec("A9", "A6")
def test_a_branch_prepared_under_version_1_can_be_committed(tmp_path: Path) -> None:
    store = WatchedStore(open_store(unpack(ARCHIVE, tmp_path), create=False))

    def commit(messages: MessageStore) -> None:
        assert XaBranches.open(messages).commit(Xid(*XID)).committed
        assert messages.has_entry(QUEUE_ONE, 9)
        assert not messages.has_entry(QUEUE_TWO, 5)

    opened(store, commit)
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
                opened(store, has_everything)
            except StoreStalledError:
                opened(store, has_everything)
            else:
                break
            fail_at += 1
        assert fail_at > 10


@pytest.mark.spec("A9")
def test_a_store_of_version_1_without_messages_keeps_its_counter() -> None:
    store = MemoryStore()
    batch = Batch()
    batch.put(Family.VERSION, NEXT_MESSAGE_ID, b"77")
    store.write(batch)

    def goes_on(messages: MessageStore) -> None:
        assert messages.add_message(b"").id == 77

    opened(store, goes_on)
    assert read_version(store, CONTENT) == VERSION


@pytest.mark.spec("A9")
def test_a_fresh_store_begins_at_the_current_version() -> None:
    store = MemoryStore()
    opened(store, lambda messages: None)
    assert read_version(store, CONTENT) == VERSION
    assert not any(next(iter(store.scan(family)), None) for family in FAMILIES)


@pytest.mark.spec("A9")
def test_a_later_version_is_refused_by_name_of_both() -> None:
    store = MemoryStore()
    batch = Batch()
    put_version(batch, CONTENT, 3)
    store.write(batch)
    with pytest.raises(StoreTooNewError, match="messages is at version 3, this Basalt knows up to 2"):
        opened(store, lambda messages: None)


@pytest.mark.spec("A9")
def test_a_counter_or_branch_that_cannot_be_read_stops_the_upgrade_by_name() -> None:
    for family, key, value, told in (
        (Family.VERSION, NEXT_MESSAGE_ID, b"many", "nextMessageId"),
        (Family.XIDS, b"h" * 16, b"\1\1\7short", "ends after"),
    ):
        store = MemoryStore()
        batch = Batch()
        batch.put(Family.MESSAGE_METADATA, bytes(8), b"\3m")
        batch.put(family, key, value)
        store.write(batch)
        with pytest.raises(CorruptionError, match=told):
            opened(store, lambda messages: None)
        assert store.get(family, key) == value
