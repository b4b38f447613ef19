"""Deletion of small subtrees in one batch, and of large ones in steps that survive a crash (P10)."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from tests.unit.catalog.stores import CountingStore, rows

from basaltmq.catalog import deletion
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import Action, Event, NewObject, Page
from basaltmq.catalog.record import ConfiguredRecord
from basaltmq.errors import AlreadyExistsError, CorruptionError, NotFoundError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.memory import MemoryStore

SIZE = 26
"""Number of objects that `tree` creates."""


def tree(catalog: Catalog, name: str = "/") -> UUID:
    """Create a vhost with 25 topics."""
    vhost = uuid4()
    topics = [NewObject(Kind.TOPIC, f"t{number}", vhost) for number in range(SIZE - 1)]
    catalog.create_many([NewObject(Kind.VHOST, name, id=vhost), *topics])
    return vhost


@pytest.mark.promise("P2", "P10")
def test_a_small_subtree_is_deleted_in_one_batch_without_other_objects(counting: CountingStore) -> None:
    catalog = Catalog(counting)
    catalog.open()
    kept = tree(catalog, "kept")
    before = rows(counting)
    vhost = tree(catalog)
    batches, syncs = len(counting.batches), counting.syncs
    assert catalog.delete(vhost) == SIZE
    assert (len(counting.batches), counting.syncs) == (batches + 1, syncs + 1)
    assert rows(counting) == before
    assert catalog.get(kept) is not None


@pytest.mark.promise("P10")
def test_a_large_subtree_is_hidden_at_once_and_deleted_in_steps(
    catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "OBJECTS_PER_BATCH_MAX", 4)
    empty = rows(store)
    vhost = tree(catalog)
    inside = list(catalog.children(vhost))
    topic = inside[0]
    events: list[Event] = []
    catalog.on_change(events.append)
    assert catalog.start_delete(vhost) == 1
    assert bool(catalog.is_purging)
    total = 1
    while catalog.is_purging:
        assert catalog.get(vhost) is None
        assert catalog.find(Kind.VHOST, "/") is None
        for each in inside:
            assert catalog.get(each.id) is None
            assert catalog.find(each.kind, each.name, each.parent) is None
        assert list(catalog.children(vhost)) == []
        assert catalog.page(Kind.TOPIC, vhost).objects == []
        with pytest.raises(NotFoundError):
            catalog.create(Kind.TOPIC, "q", vhost)
        with pytest.raises(NotFoundError):
            catalog.update(topic.id, {})
        removed = catalog.purge()
        assert removed <= 4
        total += removed
    assert total == SIZE
    assert rows(store) == empty
    assert catalog.purge() == 0
    deleted = [event for event in events if event.action is Action.DELETED]
    assert len({event.id for event in deleted}) == len(deleted) == SIZE


@pytest.mark.promise("P10")
@pytest.mark.parametrize("whole_steps", range(8))
def test_an_interrupted_deletion_is_completed_at_the_next_open(
    whole_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "OBJECTS_PER_BATCH_MAX", 4)
    store = CountingStore()
    catalog = Catalog(store)
    catalog.open()
    kept = tree(catalog, "kept")
    expected = rows(store)
    vhost = tree(catalog)
    before = rows(store)
    store.fail_at = len(store.batches) + whole_steps
    with pytest.raises(OSError, match="power"):
        catalog.delete(vhost)
    store.fail_at = None
    if whole_steps == 0:
        assert rows(store) == before
        return
    again = Catalog(store)
    assert again.open() is False
    assert not again.is_purging
    assert rows(store) == expected
    assert again.check().fault_count == 0
    assert again.get(kept) is not None


@pytest.mark.promise("P10")
def test_a_failed_deletion_step_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "OBJECTS_PER_BATCH_MAX", 4)
    store = CountingStore()
    catalog = Catalog(store)
    catalog.open()
    empty = rows(store)
    catalog.start_delete(tree(catalog))
    catalog.purge()
    store.fail_at = 0
    for _ in range(2):
        with pytest.raises(OSError, match="power"):
            catalog.purge()
    store.fail_at = None
    while catalog.is_purging:
        catalog.purge()
    assert rows(store) == empty


@pytest.mark.promise("P10")
def test_an_object_created_again_under_its_name_has_no_children(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "OBJECTS_PER_BATCH_MAX", 4)
    catalog.start_delete(tree(catalog))
    again = catalog.create(Kind.VHOST, "/")
    topic = catalog.create(Kind.TOPIC, "q", again.id)
    assert catalog.find(Kind.TOPIC, "t0", again.id) is None
    while catalog.is_purging:
        assert catalog.find(Kind.VHOST, "/") == again
        assert list(catalog.children(again.id)) == [topic]
        catalog.purge()
    assert list(catalog.children(again.id)) == [topic]
    catalog.rebuild_names()
    assert list(catalog.children(again.id)) == [topic]
    assert catalog.check().fault_count == 0


@pytest.mark.promise("P10")
def test_two_large_deletions_run_one_after_the_other(
    catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "OBJECTS_PER_BATCH_MAX", 4)
    empty = rows(store)
    for vhost in [tree(catalog, "1"), tree(catalog, "2")]:
        catalog.start_delete(vhost)
    assert sum(catalog.purge() for _ in range(20)) == 2 * (SIZE - 1)
    assert rows(store) == empty


@pytest.mark.promise("P10")
def test_objects_of_unknown_kinds_or_with_several_parents_are_deleted_with_an_ancestor(
    catalog: Catalog, store: Store
) -> None:
    other = catalog.create(Kind.VHOST, "other")
    before = rows(store)
    vhost = catalog.create(Kind.VHOST, "/")
    topic = catalog.create(Kind.TOPIC, "q", vhost.id)
    foreign = ConfiguredRecord(uuid4(), "Federation", {"name": "f"}, {"vhost": other.id, "topic": topic.id})
    catalog.configuration.create(foreign)
    assert catalog.get(foreign.id) is None
    catalog.delete(vhost.id)
    assert rows(store) == before


def test_a_cycle_caused_by_damage_does_not_block_a_deletion() -> None:
    store = MemoryStore()
    catalog = Catalog(store)
    catalog.open()
    vhost = catalog.create(Kind.VHOST, "/")
    topic = catalog.create(Kind.TOPIC, "t", vhost.id)
    batch = Batch()
    batch.put(Family.OBJECT_NAMES, catalog_keys.object_name_key(topic.id, Kind.VHOST, "/"), vhost.id.bytes)
    store.write(batch)
    with pytest.raises(CorruptionError, match="nested deeper"):
        catalog.delete(vhost.id)
    catalog.rebuild_names()
    assert catalog.delete(vhost.id) == 2


@pytest.mark.promise("P10")
def test_the_id_of_a_subtree_root_cannot_be_reused_during_its_deletion(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "OBJECTS_PER_BATCH_MAX", 4)
    vhost = tree(catalog)
    inside = [each.id for each in catalog.children(vhost)]
    catalog.start_delete(vhost)
    assert catalog.page(Kind.TOPIC, vhost, limit=1) == Page([], None)
    with pytest.raises(AlreadyExistsError, match=f"{vhost} is still being deleted"):
        catalog.create_many([NewObject(Kind.VHOST, "/", id=vhost)])
    assert [catalog.get(each) for each in inside] == [None] * len(inside)
    while catalog.is_purging:
        catalog.purge()
    catalog.create_many([NewObject(Kind.VHOST, "/", id=vhost)])
    assert list(catalog.children(vhost)) == []
