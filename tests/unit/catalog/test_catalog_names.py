"""The name index is derived: it can be checked, and rebuilt identically after loss or damage (P6)."""

from __future__ import annotations

import random
from uuid import UUID, uuid4

import pytest
from tests.unit.catalog.stores import rows

from basaltmq.catalog import names
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.faults import FaultKind
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import NewObject
from basaltmq.catalog.record import ROOT
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_ROWS_AT_ONCE", 3)


def filled(catalog: Catalog) -> UUID:
    vhost = catalog.create(Kind.VHOST, "/").id
    catalog.create_many([NewObject(Kind.TOPIC, f"t{number}", vhost) for number in range(20)])
    catalog.create_many([NewObject(Kind.TOPIC, f"q{number}") for number in range(20)])
    return vhost


@pytest.mark.promise("P6")
def test_a_lost_index_is_rebuilt_identically(catalog: Catalog, store: Store) -> None:
    vhost = filled(catalog)
    before = rows(store)
    batch = Batch()
    batch.delete_range(Family.OBJECT_NAMES, b"", names.NAMES_END)
    store.write(batch)
    report = catalog.check()
    assert {fault.kind for fault in report.faults} == {FaultKind.NAME_MISSING}
    assert report.fault_count == 41
    assert catalog.find(Kind.TOPIC, "t3", vhost) is None
    catalog.rebuild_names()
    assert rows(store) == before
    assert catalog.find(Kind.TOPIC, "t3", vhost) is not None
    assert catalog.check().fault_count == 0


@pytest.mark.promise("P6")
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_index_is_rebuilt_identically(catalog: Catalog, store: Store, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    filled(catalog)
    before = rows(store)
    index = [key for key, _ in store.scan(Family.OBJECT_NAMES)]
    ids = [value for _, value in store.scan(Family.OBJECT_NAMES)]
    batch = Batch()
    for key in chance.sample(index, 12):
        damage = chance.randrange(4)
        if damage == 0:
            batch.delete(Family.OBJECT_NAMES, key)
        elif damage == 1:
            others = [value for value in ids if value != store.get(Family.OBJECT_NAMES, key)]
            batch.put(Family.OBJECT_NAMES, key, chance.choice(others))
        elif damage == 2:
            batch.put(Family.OBJECT_NAMES, key, b"short")
        else:
            batch.put(Family.OBJECT_NAMES, key, uuid4().bytes)
    for value in chance.sample(ids, 5):
        batch.put(Family.OBJECT_NAMES, catalog_keys.object_name_key(ROOT, Kind.TOPIC, f"stale {value.hex()}"), value)
        batch.put(Family.OBJECT_NAMES, catalog_keys.object_name_key(ROOT, Kind.TOPIC, str(UUID(bytes=value))), value)
    batch.put(Family.OBJECT_NAMES, b"garbage", b"")
    store.write(batch)
    faults = catalog.check()
    assert faults.fault_count >= 12 + 11
    catalog.rebuild_names()
    assert rows(store) == before
    assert catalog.check().fault_count == 0


@pytest.mark.promise("P6")
def test_rebuilding_an_intact_index_writes_nothing(catalog: Catalog, store: Store) -> None:
    filled(catalog)
    assert list(names.rebuild(store)) == []


def test_a_dangling_index_row_does_not_reserve_its_name(catalog: Catalog, store: Store) -> None:
    batch = Batch()
    batch.put(Family.OBJECT_NAMES, catalog_keys.object_name_key(ROOT, Kind.TOPIC, "q"), uuid4().bytes)
    store.write(batch)
    assert catalog.find(Kind.TOPIC, "q") is None
    made = catalog.create(Kind.TOPIC, "q")
    assert catalog.find(Kind.TOPIC, "q") == made
    assert catalog.check().fault_count == 0


@pytest.mark.spec("A9")
@pytest.mark.promise("P6")
def test_the_lowest_id_keeps_a_duplicate_name(store: Store) -> None:
    ids = [UUID(int=number) for number in range(1, 41)]
    batch = Batch()
    for object_id in ids:
        batch.put(
            Family.CONFIGURED_OBJECTS,
            catalog_keys.configured_key(object_id),
            b'{"type":"topic","attributes":{"name":"q"}}',
        )
    store.write(batch)
    catalog = Catalog(store)
    catalog.open()
    found = catalog.find(Kind.TOPIC, "q")
    assert found is not None
    assert found.id == ids[0]
    assert {each.id for each in catalog.children(ROOT)} == set(ids)
    assert [fault.kind for fault in catalog.check().faults] == [FaultKind.NAME_DUPLICATE] * 39
    before = rows(store)
    batch = Batch()
    batch.put(Family.OBJECT_NAMES, catalog_keys.object_name_key(ROOT, "topic", "q"), ids[20].bytes)
    batch.delete(Family.OBJECT_NAMES, catalog_keys.object_name_key(ROOT, "topic", str(ids[20])))
    store.write(batch)
    catalog.rebuild_names()
    assert rows(store) == before
