"""Fan-out of many messages to several queues."""

from __future__ import annotations

from pathlib import Path

import pytest

from basaltmq.errors import QueueFullError
from basaltmq.ids import Ids
from basaltmq.pipeline.audit.queues import audit_queues
from basaltmq.queues.config import Overflow, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit

NAMES = ["a", "b", "c", "d", "e"]


@pytest.fixture
def store() -> Store:
    return MemoryStore()


def opened(store: Store) -> QueuePlane:
    return QueuePlane(store, GroupCommit(store))


def drafts(count: int, size: int = 1024) -> list[Draft]:
    return [Draft(payload=b"%d" % at * size, properties=b"p%d" % at) for at in range(count)]


def rows_of(store: Store, family: Family) -> int:
    return sum(1 for _ in store.scan(family))


@pytest.mark.spec("E4")
def test_fan_out_stores_each_body_once_until_the_last_message_is_acked(store: Store) -> None:
    plane = opened(store)
    for name in NAMES:
        plane.create(QueueConfig(name=name))
    plane.publish_many(NAMES, drafts(7))
    assert rows_of(store, Family.MESSAGE_CONTENT) == 7
    assert rows_of(store, Family.CONTENT_REFS) == 35
    for number, name in enumerate(NAMES, 1):
        found = plane.lease(name, 100)
        assert [(each.payload, each.message().properties) for each in found] == [
            (draft.payload, draft.properties) for draft in drafts(7)
        ]
        plane.ack(name, found[0].token)
        assert rows_of(store, Family.MESSAGE_CONTENT) == (7 if number < len(NAMES) else 0)
    assert rows_of(store, Family.CONTENT_REFS) == 0
    assert plane.stats("a")["messages"] == 0
    assert plane.stats("a")["apart"] == 0


@pytest.mark.spec("E4")
@pytest.mark.parametrize(
    "config",
    [
        QueueConfig(name="c"),
        QueueConfig(name="c", priorities_max=3),
        QueueConfig(name="c", ttl_ms=60_000),
        QueueConfig(name="c", length_max=3),
        QueueConfig(name="c", dedup_window_ms=1000),
    ],
    ids=["plain", "priorities", "ttl", "limit", "dedup"],
)
def test_fan_out_applies_queue_settings_like_single_enqueues(config: QueueConfig) -> None:
    found: list[dict[str, list[tuple[bytes, bytes, bool]]]] = []
    for at_once in (True, False):
        store = MemoryStore()
        plane = opened(store)
        for name in NAMES:
            plane.create(config if name == "c" else QueueConfig(name=name))
        sent = drafts(6)
        if at_once:
            plane.publish_many(NAMES, sent)
        else:
            for draft in sent:
                plane.publish(NAMES, draft)
        held = {name: [(m.payload, m.properties, bool(m.expires_ns)) for m in plane.browse(name)] for name in NAMES}
        found.append(held)
        for name in NAMES:
            for leased in plane.lease(name, 100):
                plane.ack(name, leased.token, [leased.id])
        assert rows_of(store, Family.MESSAGE_CONTENT) == 0
    assert found[0] == found[1]
    assert len(found[0]["c"]) == (3 if config.length_max else 6)


@pytest.mark.promise("P1")
def test_shared_bodies_survive_a_restart(tmp_path: Path) -> None:
    from basaltmq.store.open import open_store

    store = open_store(tmp_path)
    plane = opened(store)
    for name in NAMES:
        plane.create(QueueConfig(name=name))
    plane.publish_many(NAMES, drafts(20))
    plane.close()
    store.close()
    store = open_store(tmp_path)
    plane = opened(store)
    for name in NAMES:
        assert [each.payload for each in plane.lease(name, 100)] == [draft.payload for draft in drafts(20)]
    plane.close()
    store.close()


@pytest.mark.spec("E4", "E7")
@pytest.mark.parametrize(
    ("overflow", "dead_letter_queue"),
    [*((each, "dead") for each in Overflow), (Overflow.DROP_HEAD, None), (Overflow.REJECT_PUBLISH, None)],
)
def test_queue_that_drops_its_copy_keeps_the_body_for_others(
    store: Store, overflow: Overflow, dead_letter_queue: str | None
) -> None:
    plane = opened(store)
    small = QueueConfig(name="small", bytes_max=100, overflow=overflow, dead_letter_queue=dead_letter_queue)
    for config in (small, QueueConfig(name="a"), QueueConfig(name="b")):
        plane.create(config)
    body = b"x" * 9000
    if overflow is not Overflow.DROP_HEAD:
        with pytest.raises(QueueFullError):
            plane.publish(["small", "a"], body)
    kept = overflow is not Overflow.REJECT_PUBLISH
    names = ["small", "a", "b"] if overflow is Overflow.DROP_HEAD else ["a", "b"]
    plane.publish(names, body)
    assert list(audit_queues(store)) == []
    for name in ("a", "b"):
        found = plane.lease(name, 9)
        assert {each.payload for each in found} == {body}
        plane.ack(name, found[0].token)
    if dead_letter_queue is not None and kept:
        found = plane.lease("dead", 9)
        assert [each.payload for each in found] == [body]
        plane.ack("dead", found[0].token)
    assert rows_of(store, Family.MESSAGE_CONTENT) == rows_of(store, Family.CONTENT_REFS) == 0


@pytest.mark.spec("E4")
def test_fan_out_keeps_order_for_all_body_sizes(store: Store) -> None:
    plane = opened(store)
    for name in NAMES:
        plane.create(QueueConfig(name=name))
    sizes = [1, 2000, 2000, 3, 0, 5000, 7]
    sent = [Draft(payload=b"x" * size, properties=b"%d" % at) for at, size in enumerate(sizes)]
    plane.publish_many(NAMES, sent)
    assert rows_of(store, Family.MESSAGE_CONTENT) == 3
    for name in NAMES:
        assert plane.stats(name)["apart"] == 3
        assert plane.stats(name)["size_bytes"] == sum(sizes)
        found = plane.lease(name, 100)
        assert [(each.payload, each.message().properties) for each in found] == [
            (draft.payload, draft.properties) for draft in sent
        ]
        plane.ack(name, found[0].token)
    assert rows_of(store, Family.MESSAGE_CONTENT) == rows_of(store, Family.MESSAGES) == 0


def test_fan_out_builds_rows_and_ids_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = opened(store)
    for name in NAMES:
        plane.create(QueueConfig(name=name))
    calls: list[int] = []
    many = Ids.many

    def counting(ids: Ids, count: int) -> list[bytes]:
        calls.append(count)
        return many(ids, count)

    monkeypatch.setattr(Ids, "many", counting)
    plane.publish_many(NAMES, drafts(1))
    assert calls == [1, len(NAMES)], "one id for the body, and one call for all messages"
