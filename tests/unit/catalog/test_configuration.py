"""The configuration store: records with parents, one batch per change, every loss reported."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.unit.catalog.stores import CountingStore, rows

from basaltmq.catalog.attributes import ATTRIBUTES_BYTES_MAX
from basaltmq.catalog.configuration import VERSION_NAME, ConfigurationStore
from basaltmq.catalog.faults import FaultKind
from basaltmq.catalog.record import ROOT, ConfiguredRecord
from basaltmq.errors import (
    AlreadyExistsError,
    BasaltError,
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
from basaltmq.store.memory import MemoryStore


def record(kind: str = "queue", name: str | None = None, **parents: UUID) -> ConfiguredRecord:
    return ConfiguredRecord(uuid4(), kind, {} if name is None else {"name": name}, parents)


def loaded(configuration: ConfigurationStore) -> dict[UUID, ConfiguredRecord]:
    found: dict[UUID, ConfiguredRecord] = {}
    report = configuration.reload(lambda each: found.update({each.id: each}))
    assert report.visited == len(found)
    return found


@pytest.mark.spec("A2")
def test_a_record_survives_a_round_trip(configuration: ConfigurationStore) -> None:
    vhost = record("vhost", "/")
    attributes = {"name": "ä|🜁\0", "n": 2**70, "f": 1.5, "none": None, "list": [1, {"x": []}], "": ""}
    queue = ConfiguredRecord(uuid4(), "queue", attributes, {"vhost": vhost.id})
    configuration.create(vhost, queue)
    assert configuration.get(queue.id) == queue
    assert configuration.get(uuid4()) is None
    assert loaded(configuration) == {vhost.id: vhost, queue.id: queue}
    assert list(configuration.records()) == sorted((vhost, queue), key=lambda each: str(each.id))


@pytest.mark.spec("A2")
def test_rows_have_the_documented_layout(configuration: ConfigurationStore, store: Store) -> None:
    vhost, queue = record("vhost", "/"), record("queue", "q")
    queue = ConfiguredRecord(queue.id, "queue", {"name": "q"}, {"vhost": vhost.id})
    configuration.create(vhost, queue)
    assert store.get(Family.CONFIGURED_OBJECTS, str(queue.id).encode()) == (
        b'{"type":"queue","attributes":{"name":"q"}}'
    )
    assert store.get(Family.CONFIGURED_OBJECT_HIERARCHY, f"{queue.id}|vhost".encode()) == str(vhost.id).encode()
    assert store.get(Family.OBJECT_NAMES, catalog_keys.object_name_key(vhost.id, "queue", "q")) == queue.id.bytes
    assert store.get(Family.OBJECT_NAMES, catalog_keys.object_name_key(ROOT, "vhost", "/")) == vhost.id.bytes


@pytest.mark.spec("A2")
def test_only_a_new_store_takes_the_initial_records(store: Store) -> None:
    first, second = record("vhost", "a"), record("vhost", "b")
    configuration = ConfigurationStore(store)
    assert configuration.open([first]) is True
    configuration.close()
    assert configuration.open([second]) is False
    assert list(loaded(configuration)) == [first.id]


@pytest.mark.spec("A2")
@pytest.mark.promise("P2")
def test_a_new_store_and_its_initial_records_are_one_batch(counting: CountingStore) -> None:
    ConfigurationStore(counting).open([record("vhost", "a"), record("vhost", "b")])
    assert len(counting.batches) == 1
    assert counting.syncs == 1


@pytest.mark.spec("A2")
def test_a_new_store_whose_first_batch_failed_is_still_new(counting: CountingStore) -> None:
    counting.fail_at = 0
    configuration = ConfigurationStore(counting)
    with pytest.raises(OSError, match="power"):
        configuration.open([record("vhost", "a")])
    counting.fail_at = None
    assert configuration.open([record("vhost", "a")]) is True
    assert len(loaded(configuration)) == 1


@pytest.mark.spec("A2")
def test_an_emptied_store_is_not_new(store: Store) -> None:
    configuration = ConfigurationStore(store)
    vhost = record("vhost", "a")
    configuration.open([vhost])
    configuration.remove(vhost.id)
    configuration.close()
    assert configuration.open([vhost]) is False
    assert loaded(configuration) == {}


@pytest.mark.spec("A2")
def test_creating_an_existing_record_fails_and_writes_nothing(configuration: ConfigurationStore, store: Store) -> None:
    vhost = record("vhost", "/")
    configuration.create(vhost)
    before = rows(store)
    with pytest.raises(AlreadyExistsError, match=str(vhost.id)):
        configuration.create(record("vhost", "other"), vhost)
    assert rows(store) == before


@pytest.mark.spec("A2")
def test_names_are_unique_per_parent_and_type(configuration: ConfigurationStore, store: Store) -> None:
    one, two = record("vhost", "1"), record("vhost", "2")
    configuration.create(one, two)
    configuration.create(record("queue", "q", vhost=one.id), record("queue", "q", vhost=two.id))
    configuration.create(record("topic", "q", vhost=one.id))
    before = rows(store)
    with pytest.raises(AlreadyExistsError, match="queue named 'q'"):
        configuration.create(record("queue", "fine", vhost=one.id), record("queue", "q", vhost=one.id))
    with pytest.raises(AlreadyExistsError, match="named 'x'"):
        configuration.create(record("queue", "x", vhost=one.id), record("queue", "x", vhost=one.id))
    assert rows(store) == before


@pytest.mark.spec("A2")
def test_records_without_a_name_do_not_collide(configuration: ConfigurationStore) -> None:
    vhost = record("vhost")
    configuration.create(vhost, record("policy", vhost=vhost.id), record("policy", vhost=vhost.id))
    assert configuration.check().faults == []


@pytest.mark.spec("A2")
def test_a_parent_must_exist_and_have_the_given_type(configuration: ConfigurationStore, store: Store) -> None:
    vhost = record("vhost", "/")
    configuration.create(vhost)
    before = rows(store)
    missing = uuid4()
    with pytest.raises(NotFoundError, match=str(missing)):
        configuration.create(record("queue", "q", vhost=missing))
    with pytest.raises(InvalidArgumentError, match="is a vhost, not a exchange"):
        configuration.create(record("binding", "b", exchange=vhost.id))
    assert rows(store) == before


@pytest.mark.spec("A2")
def test_parents_and_children_are_accepted_in_any_order_but_not_in_a_cycle(configuration: ConfigurationStore) -> None:
    top, middle = record("a", "top"), record("b", "middle")
    middle = ConfiguredRecord(middle.id, "b", {"name": "middle"}, {"a": top.id})
    configuration.create(record("c", "leaf", b=middle.id), middle, top)
    assert configuration.check().fault_count == 0
    first, second = uuid4(), uuid4()
    with pytest.raises(InvalidArgumentError, match="parents of each other"):
        configuration.create(
            ConfiguredRecord(first, "a", {}, {"a": second}), ConfiguredRecord(second, "a", {}, {"a": first})
        )


@pytest.mark.spec("A2")
def test_update_replaces_attributes_and_creates_records_only_on_request(configuration: ConfigurationStore) -> None:
    vhost = record("vhost", "/")
    queue = record("queue", "q", vhost=vhost.id)
    configuration.create(vhost, queue)
    other = record("queue", "r", vhost=vhost.id)
    with pytest.raises(NotFoundError, match=str(other.id)):
        configuration.update(False, other)
    changed = ConfiguredRecord(queue.id, "queue", {"name": "renamed", "x": 1})
    configuration.update(True, changed, other)
    found = configuration.get(queue.id)
    assert found == ConfiguredRecord(queue.id, "queue", {"name": "renamed", "x": 1}, {"vhost": vhost.id})
    assert configuration.get(other.id) == other
    assert configuration.check().fault_count == 0
    configuration.create(record("queue", "q", vhost=vhost.id))


@pytest.mark.spec("A2")
def test_update_keeps_type_parents_and_names_unique(configuration: ConfigurationStore, store: Store) -> None:
    one, two = record("vhost", "1"), record("vhost", "2")
    queue, other = record("queue", "q", vhost=one.id), record("queue", "r", vhost=one.id)
    configuration.create(one, two, queue, other)
    before = rows(store)
    with pytest.raises(InvalidArgumentError, match="cannot become a topic"):
        configuration.update(True, ConfiguredRecord(queue.id, "topic", {"name": "q"}))
    with pytest.raises(InvalidArgumentError, match="cannot change its parents"):
        configuration.update(True, ConfiguredRecord(queue.id, "queue", {"name": "q"}, {"vhost": two.id}))
    with pytest.raises(AlreadyExistsError, match="'r'"):
        configuration.update(True, ConfiguredRecord(queue.id, "queue", {"name": "r"}))
    with pytest.raises(AlreadyExistsError, match="'x'"):
        configuration.update(
            True, ConfiguredRecord(queue.id, "queue", {"name": "x"}), record("queue", "x", vhost=one.id)
        )
    assert rows(store) == before


@pytest.mark.spec("A2", "D1")
def test_an_update_that_keeps_the_name_writes_one_row(counting: CountingStore) -> None:
    configuration = ConfigurationStore(counting)
    vhost = record("vhost", "/")
    configuration.open([vhost, record("queue", "q", vhost=vhost.id)])
    configuration.update(False, ConfiguredRecord(vhost.id, "vhost", {"name": "/", "x": 1}))
    assert [(op[1], op[2]) for op in counting.batches[-1].ops] == [
        (Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(vhost.id))
    ]


@pytest.mark.spec("A2")
@pytest.mark.promise("P2")
def test_each_change_is_one_batch_and_one_sync(counting: CountingStore) -> None:
    configuration = ConfigurationStore(counting)
    configuration.open()
    vhost = record("vhost", "/")
    queue = record("queue", "q", vhost=vhost.id)
    for change in (
        lambda: configuration.create(vhost, queue),
        lambda: configuration.update(True, ConfiguredRecord(queue.id, "queue", {"name": "r"})),
        lambda: configuration.remove(queue.id, vhost.id),
    ):
        batches, syncs = len(counting.batches), counting.syncs
        change()
        assert (len(counting.batches), counting.syncs) == (batches + 1, syncs + 1)
    assert rows(counting, Family.CONFIGURED_OBJECTS, Family.CONFIGURED_OBJECT_HIERARCHY, Family.OBJECT_NAMES) == {}


@pytest.mark.spec("A2")
@pytest.mark.promise("P10")
def test_remove_returns_the_removed_ids_and_leaves_no_row(configuration: ConfigurationStore, store: Store) -> None:
    empty = rows(store)
    vhost = record("vhost", "/")
    queue = record("queue", "q", vhost=vhost.id)
    configuration.create(vhost, queue)
    assert configuration.remove(uuid4()) == []
    assert configuration.remove(vhost.id, uuid4(), queue.id, vhost.id) == [vhost.id, queue.id]
    assert rows(store) == empty
    assert configuration.remove(vhost.id) == []


@pytest.mark.spec("A2")
def test_a_record_with_children_is_not_removed_without_them(configuration: ConfigurationStore, store: Store) -> None:
    vhost = record("vhost", "/")
    configuration.create(vhost, record("queue", "q", vhost=vhost.id))
    before = rows(store)
    with pytest.raises(InvalidArgumentError, match="still has the queue 'q'"):
        configuration.remove(vhost.id)
    assert rows(store) == before


@pytest.mark.spec("A2")
def test_a_dangling_parent_is_reported_and_its_child_is_still_loaded(
    configuration: ConfigurationStore, store: Store
) -> None:
    vhost = record("vhost", "/")
    queue = record("queue", "q", vhost=vhost.id)
    configuration.create(vhost, queue)
    batch = Batch()
    batch.delete(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(vhost.id))
    store.write(batch)
    found: list[ConfiguredRecord] = []
    report = configuration.reload(found.append)
    assert found == [queue]
    assert [(fault.kind, fault.object_id) for fault in report.faults] == [(FaultKind.DANGLING_PARENT, queue.id)]
    assert str(vhost.id) in report.faults[0].text


@pytest.mark.spec("A2")
@pytest.mark.promise("P7")
def test_a_damaged_row_loses_only_its_record_and_is_named(configuration: ConfigurationStore, store: Store) -> None:
    good, bad, link = record("vhost", "good"), record("vhost", "bad"), record("vhost", "link")
    configuration.create(good, bad, link)
    orphan = uuid4()
    batch = Batch()
    batch.put(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(bad.id), b'{"type":"vhost","attrib')
    batch.put(Family.CONFIGURED_OBJECTS, b"not a uuid", b"{}")
    batch.put(Family.CONFIGURED_OBJECT_HIERARCHY, catalog_keys.hierarchy_key(link.id, "x"), b"nonsense")
    batch.put(Family.CONFIGURED_OBJECT_HIERARCHY, catalog_keys.hierarchy_key(orphan, "x"), str(good.id).encode())
    batch.put(Family.CONFIGURED_OBJECT_HIERARCHY, b"garbage", b"")
    store.write(batch)
    found: list[ConfiguredRecord] = []
    report = configuration.reload(found.append)
    assert {each.id for each in found} == {good.id, link.id}
    kinds = sorted(fault.kind for fault in report.faults)
    assert kinds == [FaultKind.DAMAGED_ROW] * 4 + [FaultKind.ORPHAN_LINK]
    assert {bad.id, link.id, orphan} <= {fault.object_id for fault in report.faults}
    with pytest.raises(CorruptionError, match=str(bad.id)):
        configuration.get(bad.id)


@pytest.mark.spec("A2")
def test_a_handler_stops_the_walk(configuration: ConfigurationStore) -> None:
    configuration.create(*(record("vhost", str(number)) for number in range(5)))
    seen: list[UUID] = []

    def handler(each: ConfiguredRecord) -> bool:
        seen.append(each.id)
        return len(seen) < 2

    assert configuration.reload(handler).visited == 2
    assert len(seen) == 2


@pytest.mark.spec("A2")
def test_reload_reads_a_snapshot_during_changes_by_the_handler(configuration: ConfigurationStore) -> None:
    first = [record("vhost", str(number)) for number in range(4)]
    configuration.create(*first)
    seen: list[UUID] = []

    def handler(each: ConfiguredRecord) -> None:
        seen.append(each.id)
        configuration.create(record("vhost", f"made while at {each.id}"))

    configuration.reload(handler)
    assert sorted(seen) == sorted(each.id for each in first)


@pytest.mark.spec("A2")
def test_calls_after_close_raise_and_close_is_idempotent(configuration: ConfigurationStore) -> None:
    with pytest.raises(StorageError, match="already open"):
        configuration.open()
    configuration.close()
    configuration.close()
    for call in (
        lambda: configuration.create(record()),
        lambda: configuration.update(True, record()),
        lambda: configuration.remove(uuid4()),
        lambda: configuration.get(uuid4()),
        lambda: configuration.reload(lambda each: None),
        lambda: configuration.rebuild_names(),
        lambda: list(configuration.records()),
    ):
        with pytest.raises(StoreClosedError, match="configuration store is not open"):
            call()


@pytest.mark.spec("A2")
@pytest.mark.promise("P10")
def test_on_delete_leaves_no_row_and_the_next_store_is_new(configuration: ConfigurationStore, store: Store) -> None:
    high = ConfiguredRecord(UUID(int=(1 << 128) - 1), "vhost", {"name": "\U0010ffff" * 9})
    configuration.create(high, record("q" * 255, "q", vhost=high.id))
    configuration.on_delete()
    assert rows(store) == {}
    assert configuration.open() is True
    assert loaded(configuration) == {}


HOSTILE: list[tuple[str, dict[str, Any], type[BasaltError]]] = [
    ("nan", {"x": float("nan")}, InvalidArgumentError),
    ("inf", {"x": [1, float("inf")]}, InvalidArgumentError),
    ("bytes", {"x": b"raw"}, InvalidArgumentError),
    ("tuple", {"x": (1, 2)}, InvalidArgumentError),
    ("set", {"x": {1}}, InvalidArgumentError),
    ("uuid", {"x": uuid4()}, InvalidArgumentError),
    ("object", {"x": object()}, InvalidArgumentError),
    ("int keys", {"x": {1: 2}}, InvalidArgumentError),
    ("surrogate", {"x": "\ud800"}, InvalidArgumentError),
    ("surrogate name", {"name": "\ud800"}, InvalidArgumentError),
    ("surrogate key", {"\udfff": 1}, InvalidArgumentError),
    ("long name", {"name": "é" * 40_000}, InvalidArgumentError),
    ("large", {"x": "x" * ATTRIBUTES_BYTES_MAX}, LimitExceededError),
]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.spec("A2")
@pytest.mark.promise("P8")
@pytest.mark.parametrize(("attributes", "error"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_attributes_that_do_not_survive_a_round_trip_are_refused(
    attributes: dict[str, Any], error: type[BasaltError]
) -> None:
    store = MemoryStore()
    configuration = ConfigurationStore(store)
    configuration.open()
    before = rows(store)
    with pytest.raises(error):
        configuration.create(ConfiguredRecord(uuid4(), "queue", attributes))
    assert rows(store) == before


@pytest.mark.spec("A2")
@pytest.mark.parametrize("depth", [65, 900, 200_000])
def test_attributes_nested_too_deeply_are_refused(depth: int) -> None:
    configuration = ConfigurationStore(MemoryStore())
    configuration.open()
    with pytest.raises((InvalidArgumentError, LimitExceededError)):
        configuration.create(ConfiguredRecord(uuid4(), "queue", {"x": nested(depth)}))
    wide = ConfiguredRecord(uuid4(), "queue", {"x": nested(62), "wide": [[] for _ in range(500)], "text": "[{" * 99})
    configuration.create(wide)
    assert configuration.get(wide.id) == wide


@pytest.mark.spec("A2")
@pytest.mark.parametrize(
    "bad",
    [
        ConfiguredRecord(ROOT, "queue", {}),
        ConfiguredRecord("text", "queue", {}),  # type: ignore[arg-type]
        ConfiguredRecord(UUID(int=4), "", {}),
        ConfiguredRecord(UUID(int=4), "t" * 256, {}),
        ConfiguredRecord(UUID(int=4), 7, {}),  # type: ignore[arg-type]
        ConfiguredRecord(UUID(int=4), "queue", None),  # type: ignore[arg-type]
        ConfiguredRecord(UUID(int=4), "queue", {}, {"vhost": "text"}),  # type: ignore[dict-item]
        ConfiguredRecord(UUID(int=5), "queue", {}, {"queue": UUID(int=5)}),
        "not a record",
    ],
    ids=repr,
)
def test_invalid_records_are_refused(bad: Any) -> None:
    configuration = ConfigurationStore(MemoryStore())
    configuration.open()
    with pytest.raises(InvalidArgumentError):
        configuration.create(bad)
    with pytest.raises(InvalidArgumentError):
        configuration.update(True, bad)


@pytest.mark.spec("A2")
@pytest.mark.promise("P8")
def test_one_call_has_a_limit_on_records_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = ConfigurationStore(MemoryStore())
    configuration.open()
    twice = record()
    with pytest.raises(InvalidArgumentError, match="twice"):
        configuration.create(twice, twice)
    monkeypatch.setattr("basaltmq.catalog.configuration.RECORDS_PER_CHANGE_MAX", 3)
    with pytest.raises(LimitExceededError, match="4 records"):
        configuration.create(*(record() for _ in range(4)))
    monkeypatch.setattr("basaltmq.catalog.configuration.CHANGE_BYTES_MAX", 100)
    with pytest.raises(LimitExceededError, match="100 bytes"):
        configuration.create(record("queue", "x" * 50), record("queue", "y" * 50))
    configuration.create(*(record() for _ in range(2)))


@pytest.mark.spec("A2")
def test_one_of_many_threads_creates_a_name(store: Store) -> None:
    configuration = ConfigurationStore(store)
    configuration.open()
    start = threading.Barrier(8)
    outcomes: list[str] = []

    def attempt() -> None:
        start.wait(10)
        for number in range(20):
            try:
                configuration.create(record("queue", f"q{number}"))
                outcomes.append("created")
            except AlreadyExistsError:
                outcomes.append("refused")

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes.count("created") == 20
    assert outcomes.count("refused") == 140
    assert configuration.check().fault_count == 0


@pytest.mark.spec("A2", "A9")
def test_a_new_store_has_its_version_row(configuration: ConfigurationStore, store: Store) -> None:
    assert store.get(Family.VERSION, VERSION_NAME.encode()) == b"\0\0\0\2"
