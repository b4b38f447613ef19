"""The catalog: objects by id and by name, lists, events, and refused input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.unit.catalog.stores import CountingStore, rows

from basaltmq.catalog.catalog import PAGE_MAX, Catalog
from basaltmq.catalog.kinds import NEVER_AT_TOP, PARENTS, Kind
from basaltmq.catalog.objects import Action, CatalogObject, Event, NewObject
from basaltmq.catalog.record import ROOT
from basaltmq.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    StorageError,
    StoreClosedError,
)
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys


@pytest.mark.spec("D1")
def test_an_object_is_found_by_id_and_by_name(catalog: Catalog) -> None:
    vhost = catalog.create(Kind.VHOST, "/")
    topic = catalog.create(Kind.TOPIC, "orders", vhost.id, {"partitions": 3})
    assert topic == CatalogObject(topic.id, Kind.TOPIC, "orders", vhost.id, {"partitions": 3})
    for _ in range(2):
        assert catalog.get(topic.id) == topic
        assert catalog.find(Kind.TOPIC, "orders", vhost.id) == topic
        assert catalog.find(Kind.VHOST, "/") == vhost
        assert catalog.find(Kind.USER, "orders", vhost.id) is None
        assert catalog.find(Kind.TOPIC, "orders") is None
        assert catalog.find(Kind.TOPIC, "orders", uuid4()) is None
        assert catalog.get(uuid4()) is None


@pytest.mark.parametrize("name", ["", "\0", "a|b", "ä🜁", "x" * 65_535, "\U0010ffff"])
def test_any_text_is_a_valid_name(catalog: Catalog, name: str) -> None:
    made = catalog.create(Kind.TOPIC, name)
    assert catalog.find(Kind.TOPIC, name) == made
    assert catalog.page(Kind.TOPIC).objects == [made]


@pytest.mark.spec("D1")
@pytest.mark.promise("P2")
def test_many_are_created_in_one_batch_or_not_at_all(counting: CountingStore) -> None:
    catalog = Catalog(counting)
    catalog.open()
    vhost = catalog.create(Kind.VHOST, "/").id
    batches, syncs = len(counting.batches), counting.syncs
    ids = catalog.create_many(NewObject(Kind.TOPIC, f"t{number}", vhost) for number in range(100))
    assert (len(counting.batches), counting.syncs) == (batches + 1, syncs + 1)
    assert [catalog.find(Kind.TOPIC, f"t{number}", vhost) for number in range(100)] == [
        CatalogObject(object_id, Kind.TOPIC, f"t{number}", vhost, {}) for number, object_id in enumerate(ids)
    ]
    before = rows(counting)
    with pytest.raises(AlreadyExistsError, match="'t7'"):
        catalog.create_many([NewObject(Kind.TOPIC, "fine", vhost), NewObject(Kind.TOPIC, "t7", vhost)])
    assert rows(counting) == before
    assert catalog.find(Kind.TOPIC, "fine", vhost) is None


def test_a_tree_is_created_in_one_call(catalog: Catalog) -> None:
    vhost, user = uuid4(), uuid4()
    catalog.create_many(
        [
            NewObject(Kind.TOPIC, "t", vhost),
            NewObject(Kind.PERMISSION, "p", user),
            NewObject(Kind.USER, "u", id=user),
            NewObject(Kind.VHOST, "/", id=vhost),
        ]
    )
    for kind, name, parent in ((Kind.TOPIC, "t", vhost), (Kind.PERMISSION, "p", user)):
        child = catalog.find(kind, name, parent)
        assert child is not None
        found = catalog.get(child.id)
        assert found is not None
        assert found.parent == parent
    assert catalog.check().fault_count == 0


@pytest.mark.spec("D1")
def test_update_writes_one_row_and_replaces_the_attributes(counting: CountingStore) -> None:
    catalog = Catalog(counting)
    catalog.open()
    vhost = catalog.create(Kind.VHOST, "/")
    topic = catalog.create(Kind.TOPIC, "orders", vhost.id, {"partitions": 3})
    changed = catalog.update(topic.id, {"retention_ms": 5})
    assert len(counting.batches[-1]) == 1
    assert catalog.get(topic.id) == catalog.find(Kind.TOPIC, "orders", vhost.id) == changed
    assert changed.attributes == {"retention_ms": 5}


def test_rename_frees_the_old_name_and_keeps_the_children(catalog: Catalog) -> None:
    vhost = catalog.create(Kind.VHOST, "old")
    queue = catalog.create(Kind.TOPIC, "q", vhost.id)
    assert catalog.find(Kind.VHOST, "old") is not None
    assert catalog.find(Kind.VHOST, "other") is None
    renamed = catalog.rename(vhost.id, "other")
    assert catalog.find(Kind.VHOST, "old") is None
    assert catalog.find(Kind.VHOST, "other") == catalog.get(vhost.id) == renamed
    assert catalog.find(Kind.TOPIC, "q", vhost.id) == queue
    again = catalog.create(Kind.VHOST, "old")
    with pytest.raises(AlreadyExistsError):
        catalog.rename(again.id, "other")
    assert catalog.rename(again.id, "old") == again
    assert catalog.check().fault_count == 0


def test_returned_objects_are_copies(catalog: Catalog) -> None:
    wish: dict[str, Any] = {"list": [1]}
    made = catalog.create(Kind.TOPIC, "q", attributes=wish)
    for _ in range(2):
        found = catalog.get(made.id)
        assert found is not None
        found.attributes["list"].append(2)
        found.attributes["more"] = True
    wish["list"].append(3)
    again = catalog.find(Kind.TOPIC, "q")
    assert again is not None
    assert again.attributes == {"list": [1]}


@pytest.mark.promise("P8")
def test_lists_come_in_pages_without_gaps_or_repeats(catalog: Catalog) -> None:
    vhost, other = catalog.create(Kind.VHOST, "/"), catalog.create(Kind.VHOST, "other")
    wanted = [f"{'x' * (number % 3)}{number}" for number in range(57)]
    catalog.create_many([NewObject(Kind.TOPIC, name, vhost.id) for name in wanted])
    catalog.create(Kind.USER, "not a topic")
    catalog.create(Kind.TOPIC, "elsewhere", other.id)
    order = sorted(wanted, key=lambda name: catalog_keys.object_name_key(vhost.id, Kind.TOPIC, name))
    for limit in (1, 10, 56, 57, 58):
        names: list[str] = []
        page = catalog.page(Kind.TOPIC, vhost.id, limit=limit)
        while True:
            assert len(page.objects) <= limit
            names += [each.name for each in page.objects]
            if page.next_after is None:
                break
            page = catalog.page(Kind.TOPIC, vhost.id, start_after=page.next_after, limit=limit)
        assert names == order
    assert catalog.page(Kind.TOPIC, uuid4()).objects == []
    wrong: list[Any] = [0, -1, PAGE_MAX + 1, 1.5, None]
    for bad in wrong:
        with pytest.raises(InvalidArgumentError, match="limit of a page"):
            catalog.page(Kind.TOPIC, vhost.id, limit=bad)


def test_children_can_be_listed_by_kind(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("basaltmq.catalog.catalog._CHILDREN_AT_ONCE", 3)
    kinds = (Kind.USER, Kind.VHOST)
    made = [catalog.create(kind, f"{kind}-{number}") for kind in kinds for number in range(5)]
    topic = catalog.create(Kind.TOPIC, "t", made[5].id)
    assert sorted(catalog.children(ROOT), key=lambda each: each.name) == made
    assert list(catalog.children(ROOT, Kind.VHOST)) == made[5:]
    assert list(catalog.children(made[5].id)) == [topic]
    assert list(catalog.children(made[0].id)) == []


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_requires_an_allowed_parent(catalog: Catalog, kind: Kind) -> None:
    vhost = catalog.create(Kind.VHOST, "v").id
    places = {
        Kind.VHOST: vhost,
        Kind.USER: catalog.create(Kind.USER, "u").id,
        Kind.TOPIC: catalog.create(Kind.TOPIC, "t", vhost).id,
    }
    for parent_kind, parent in places.items():
        if parent_kind in PARENTS[kind]:
            made = catalog.create(kind, "x", parent)
            catalog.close()
            catalog.open()
            assert catalog.get(made.id) == made
        else:
            with pytest.raises(InvalidArgumentError, match=f"cannot have a {parent_kind}"):
                catalog.create(kind, "x", parent)
    if kind in NEVER_AT_TOP:
        with pytest.raises(InvalidArgumentError, match="needs a parent"):
            catalog.create(kind, "x")
    else:
        assert catalog.create(kind, "x").parent == ROOT
    assert catalog.check().fault_count == 0


def test_invalid_input_is_refused_and_writes_nothing(catalog: Catalog, store: Store) -> None:
    made = catalog.create(Kind.TOPIC, "q")
    before = rows(store)
    refused: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: catalog.create("queue", "x"), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.create(Kind.TOPIC, None), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.create(Kind.TOPIC, "x" * 65_536), InvalidArgumentError),
        (lambda: catalog.create(Kind.TOPIC, "\ud800"), InvalidArgumentError),
        (lambda: catalog.create(Kind.TOPIC, "x", "text"), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.create(Kind.TOPIC, "x", uuid4()), NotFoundError),
        (lambda: catalog.create(Kind.TOPIC, "x", attributes={"name": "y"}), InvalidArgumentError),
        (lambda: catalog.create(Kind.TOPIC, "x", attributes={"x": b""}), InvalidArgumentError),
        (lambda: catalog.create(Kind.TOPIC, "x", attributes={"x": "y" * (1 << 20)}), LimitExceededError),
        (lambda: catalog.create(Kind.TOPIC, "x", attributes=[1]), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.create_many([NewObject(Kind.TOPIC, "x", id=made.id)]), AlreadyExistsError),
        (lambda: catalog.create_many([NewObject(Kind.TOPIC, str(n)) for n in range(10_001)]), LimitExceededError),
        (lambda: catalog.update(made.id, {"name": "r"}), InvalidArgumentError),
        (lambda: catalog.update(made.id, None), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.update(uuid4(), {}), NotFoundError),
        (lambda: catalog.rename(made.id, "\udfff"), InvalidArgumentError),
        (lambda: catalog.rename(uuid4(), "x"), NotFoundError),
        (lambda: catalog.delete(uuid4()), NotFoundError),
        (lambda: catalog.delete(ROOT), NotFoundError),
        (lambda: catalog.delete("q"), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.get("q"), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.find("queue", "q"), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.find(Kind.TOPIC, 7), InvalidArgumentError),  # type: ignore[arg-type]
        (lambda: catalog.find(Kind.TOPIC, "q", None), InvalidArgumentError),  # type: ignore[arg-type]
    ]
    for number, (call, error) in enumerate(refused):
        with pytest.raises(error):
            pytest.fail(f"call {number} was taken: {call()}")
    assert rows(store) == before
    assert catalog.get(made.id) == made


def test_every_change_sends_one_event_in_order_after_its_write(catalog: Catalog) -> None:
    events: list[Event] = []
    seen: list[CatalogObject | None] = []

    def listen(event: Event) -> None:
        events.append(event)
        seen.append(catalog.get(event.id))

    end = catalog.on_change(listen)
    vhost = catalog.create(Kind.VHOST, "/")
    queue = catalog.create(Kind.TOPIC, "q", vhost.id)
    updated = catalog.update(queue.id, {"x": 1})
    renamed = catalog.rename(queue.id, "r")
    with pytest.raises(AlreadyExistsError):
        catalog.create(Kind.TOPIC, "r", vhost.id)
    catalog.delete(vhost.id)
    end()
    catalog.create(Kind.VHOST, "not told")
    assert events == [
        Event(Action.CREATED, vhost.id, Kind.VHOST, "/", ROOT),
        Event(Action.CREATED, queue.id, Kind.TOPIC, "q", vhost.id),
        Event(Action.UPDATED, queue.id, Kind.TOPIC, "q", vhost.id),
        Event(Action.RENAMED, queue.id, Kind.TOPIC, "r", vhost.id, old_name="q"),
        Event(Action.DELETED, queue.id, Kind.TOPIC, "r", vhost.id),
        Event(Action.DELETED, vhost.id, Kind.VHOST, "/", ROOT),
    ]
    assert seen == [vhost, queue, updated, renamed, None, None]


def test_a_failing_listener_affects_neither_the_change_nor_other_listeners(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[UUID] = []

    def fail(event: Event) -> None:
        raise RuntimeError("my bug")

    catalog.on_change(fail)
    catalog.on_change(lambda event: reported.append(event.id))
    made = catalog.create(Kind.TOPIC, "q")
    assert reported == [made.id]
    assert catalog.get(made.id) == made
    assert "my bug" in caplog.text


@pytest.mark.promise("P2")
def test_a_failed_write_is_not_visible(counting: CountingStore) -> None:
    catalog = Catalog(counting)
    catalog.open()
    events: list[Event] = []
    catalog.on_change(events.append)
    made = catalog.create(Kind.TOPIC, "q")
    before = rows(counting)
    counting.fail_at = 0
    for call in (
        lambda: catalog.create(Kind.TOPIC, "r"),
        lambda: catalog.update(made.id, {"x": 1}),
        lambda: catalog.rename(made.id, "r"),
        lambda: catalog.delete(made.id),
    ):
        with pytest.raises(OSError, match="power"):
            call()
    assert rows(counting) == before
    assert catalog.get(made.id) == catalog.find(Kind.TOPIC, "q") == made
    assert catalog.find(Kind.TOPIC, "r") is None
    assert len(events) == 1


@pytest.mark.promise("P9")
def test_the_cost_of_open_does_not_grow_with_the_number_of_objects(counting: CountingStore) -> None:
    catalog = Catalog(counting)
    catalog.open()
    catalog.close()
    reads = counting.reads
    catalog.open()
    with_none = counting.reads - reads
    catalog.create_many([NewObject(Kind.TOPIC, f"t{number}") for number in range(2000)])
    catalog.close()
    reads = counting.reads
    catalog.open()
    assert counting.reads - reads == with_none


def test_a_catalog_can_be_closed_and_opened_again(store: Store) -> None:
    catalog = Catalog(store)
    vhost = uuid4()
    assert catalog.open([NewObject(Kind.VHOST, "/", id=vhost), NewObject(Kind.TOPIC, "q", vhost)]) is True
    with pytest.raises(StorageError, match="catalog is already open"):
        catalog.open()
    catalog.close()
    catalog.close()
    for call in (
        lambda: catalog.get(vhost),
        lambda: catalog.find(Kind.VHOST, "/"),
        lambda: catalog.page(Kind.VHOST),
        lambda: list(catalog.children(vhost)),
        lambda: catalog.create(Kind.VHOST, "x"),
        lambda: catalog.update(vhost, {}),
        lambda: catalog.delete(vhost),
        lambda: catalog.purge(),
    ):
        with pytest.raises(StoreClosedError, match="is not open"):
            call()
    assert catalog.open([NewObject(Kind.PERMISSION, "never looked at", uuid4())]) is False
    assert [each.name for each in catalog.children(vhost)] == ["q"]


@pytest.mark.promise("P10")
def test_on_delete_leaves_no_row(catalog: Catalog, store: Store) -> None:
    vhost = catalog.create(Kind.VHOST, "/")
    catalog.create(Kind.TOPIC, "q", vhost.id)
    catalog.on_delete()
    assert rows(store) == {}
    assert catalog.open() is True
    assert catalog.find(Kind.VHOST, "/") is None


@pytest.mark.promise("P7")
def test_a_damaged_object_is_named_and_the_others_are_served(catalog: Catalog, store: Store) -> None:
    good, bad = catalog.create(Kind.TOPIC, "good"), catalog.create(Kind.TOPIC, "bad")
    torn = catalog.create(Kind.TOPIC, "torn")
    batch = Batch()
    batch.put(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(bad.id), b"\xff\xfe")
    batch.put(Family.OBJECT_NAMES, catalog_keys.object_name_key(ROOT, Kind.TOPIC, "torn"), b"short")
    store.write(batch)
    with pytest.raises(CorruptionError, match=str(bad.id)):
        catalog.find(Kind.TOPIC, "bad")
    with pytest.raises(CorruptionError, match="rebuild"):
        catalog.find(Kind.TOPIC, "torn")
    assert catalog.find(Kind.TOPIC, "good") == good
    catalog.rebuild_names()
    assert catalog.find(Kind.TOPIC, "torn") == torn
