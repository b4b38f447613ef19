"""Stores of version 1, with their rows on disk, opened by the current code (SPEC A9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.fixtures import catalog_v1
from tests.fixtures.make_catalog_v1 import contents, unpack
from tests.unit.catalog.stores import CountingStore, rows

from basaltmq.catalog import configuration as configuration_module
from basaltmq.catalog import links as links_module
from basaltmq.catalog import names
from basaltmq.catalog import preferences as preferences_module
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.configuration import ConfigurationStore
from basaltmq.catalog.faults import FaultKind
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.links import Link, LinkStore, Role
from basaltmq.catalog.preferences import Preference, PreferenceStore
from basaltmq.catalog.record import ROOT, ConfiguredRecord
from basaltmq.errors import StoreTooNewError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore

VERSIONS = {
    "configuration-v1": configuration_module.VERSION_NAME,
    "preferences-v1": preferences_module.VERSION_NAME,
    "links-v1": links_module.VERSION_NAME,
}
OPEN: dict[str, Callable[[Store], object]] = {
    "configuration-v1": lambda store: ConfigurationStore(store).open(),
    "preferences-v1": lambda store: PreferenceStore(store).open_and_load(lambda each: None),
    "links-v1": lambda store: LinkStore(store).open_and_load(lambda each: None),
}


@pytest.fixture
def fixture_store(tmp_path: Path) -> Iterator[Callable[[str], RocksStore]]:
    opened: list[RocksStore] = []

    def make(name: str) -> RocksStore:
        opened.append(open_store(unpack(name, tmp_path / name), create=False))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def expected_records() -> dict[UUID, ConfiguredRecord]:
    parents = catalog_v1.parents()
    return {
        object_id: ConfiguredRecord(
            object_id, kind, attributes, dict([parents[object_id]]) if object_id in parents else {}
        )
        for object_id, (kind, attributes) in catalog_v1.objects().items()
    }


@pytest.mark.spec("A9")
@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_the_fixture_equals_the_rows_of_version_1(fixture_store: Callable[[str], RocksStore], name: str) -> None:
    held = rows(fixture_store(name))
    assert held == {(family.label, key): value for family, key, value in contents()[name]}


@pytest.mark.spec("A2", "A9")
def test_configuration_of_version_1_gets_its_name_index(fixture_store: Callable[[str], RocksStore]) -> None:
    store = fixture_store("configuration-v1")
    catalog = Catalog(store)
    assert catalog.open() is False
    assert {record.id: record for record in catalog.configuration.records()} == expected_records()
    report = catalog.check()
    first, second = sorted((catalog_v1.id_of("twin-1"), catalog_v1.id_of("twin-2")))
    assert {(fault.kind, fault.object_id) for fault in report.faults} == {
        (FaultKind.DANGLING_PARENT, catalog_v1.id_of("dangling")),
        (FaultKind.NAME_DUPLICATE, second),
        (FaultKind.UNKNOWN_KIND, catalog_v1.id_of("foreign")),
    }
    vhost = catalog.find(Kind.VHOST, "/")
    assert vhost is not None
    assert vhost.id == catalog_v1.id_of("vhost")
    for number in range(30):
        topic = catalog.find(Kind.TOPIC, f"Thema-{number}-äöü-🜁", vhost.id)
        assert topic is not None
        assert (topic.id, topic.attributes) == (catalog_v1.id_of(f"topic-{number}"), {"partitions": number + 1})
    twin = catalog.find(Kind.TOPIC, "twin", vhost.id)
    assert twin is not None
    assert twin.id == first
    assert {each.id for each in catalog.children(vhost.id, Kind.TOPIC)} >= {first, second}
    assert catalog.find(Kind.TOPIC, str(second), vhost.id) is None
    nameless = catalog.get(catalog_v1.id_of("nameless"))
    assert nameless is not None
    assert nameless.parent == vhost.id
    user = catalog.find(Kind.USER, "ada")
    assert user is not None
    assert user.parent == ROOT


@pytest.mark.spec("A9")
def test_a_duplicate_name_of_version_1_can_be_renamed_or_deleted(fixture_store: Callable[[str], RocksStore]) -> None:
    catalog = Catalog(fixture_store("configuration-v1"))
    catalog.open()
    first, second = sorted((catalog_v1.id_of("twin-1"), catalog_v1.id_of("twin-2")))
    catalog.rename(second, "no twin")
    assert FaultKind.NAME_DUPLICATE not in {fault.kind for fault in catalog.check().faults}
    catalog.delete(first)
    assert catalog.find(Kind.TOPIC, "twin", catalog_v1.id_of("vhost")) is None
    assert catalog.get(second) is not None


@pytest.mark.spec("A3", "A9")
def test_preferences_of_version_1_get_their_fields(fixture_store: Callable[[str], RocksStore]) -> None:
    found: dict[UUID, Preference] = {}
    store = fixture_store("preferences-v1")
    report = PreferenceStore(store).open_and_load(lambda each: found.update({each.id: each}))
    assert report.faults == []
    expected = {}
    for preference_id, flat in catalog_v1.preferences().items():
        odd = preference_id == catalog_v1.id_of("preference-odd")
        expected[preference_id] = Preference(
            preference_id,
            "" if odd else flat["owner"],
            "" if odd else flat["type"],
            "" if odd else flat["name"],
            0 if odd else flat["createdDate"],
            0 if odd else flat["lastUpdatedDate"],
            flat if odd else {"value": flat["value"]},
        )
    assert found == expected


@pytest.mark.spec("A8", "A9")
def test_links_of_version_1_are_rewritten_in_one_batch(fixture_store: Callable[[str], RocksStore]) -> None:
    store = fixture_store("links-v1")
    counted = CountingStore()
    for (label, key), value in rows(store).items():
        copy = Batch()
        copy.put(next(family for family in Family if family.label == label), key, value)
        counted.write(copy)
    before = len(counted.batches)
    for target in (store, counted):
        found: list[Link] = []
        report = LinkStore(target).open_and_load(found.append)
        assert report.faults == []
        expected = [Link(c, n, Role(role), source, goal) for c, n, role, source, goal in catalog_v1.links()]
        assert sorted(found, key=repr) == sorted(expected, key=repr)
        assert {value[0] for value in rows(target, Family.AMQP_1_0_LINKS).values()} == {2}
    assert len(counted.batches) == before + 1


@pytest.mark.spec("A9")
@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_a_second_open_after_the_upgrade_writes_nothing(name: str) -> None:
    store = CountingStore()
    _write(store, contents()[name])
    OPEN[name](store)
    held, batches = rows(store), len(store.batches)
    OPEN[name](store)
    assert (rows(store), len(store.batches)) == (held, batches)


@pytest.mark.spec("A9")
@pytest.mark.promise("P2", "P6")
@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_an_upgrade_interrupted_at_any_write_is_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_ROWS_AT_ONCE", 7)
    monkeypatch.setattr(preferences_module, "_ROWS_AT_ONCE", 3)
    whole = CountingStore()
    _write(whole, contents()[name])
    OPEN[name](whole)
    assert rows(whole)[("version", VERSIONS[name].encode())] == b"\0\0\0\2"
    for written in range(len(whole.batches) - 1):
        store = CountingStore()
        _write(store, contents()[name])
        store.fail_at = 1 + written
        with pytest.raises(OSError, match="power"):
            OPEN[name](store)
        assert rows(store).get(("version", VERSIONS[name].encode())) in (None, b"\0\0\0\1")
        store.fail_at = None
        OPEN[name](store)
        assert rows(store) == rows(whole)


@pytest.mark.spec("A9")
@pytest.mark.parametrize("name", sorted(VERSIONS))
def test_a_newer_version_is_refused_with_both_versions_and_nothing_changes(name: str, store: Store) -> None:
    OPEN[name](store)
    batch = Batch()
    batch.put(Family.VERSION, VERSIONS[name].encode(), b"\0\0\0\x07")
    store.write(batch)
    before = rows(store)
    with pytest.raises(StoreTooNewError, match=rf"{VERSIONS[name]} is at version 7, .* up to version 2"):
        OPEN[name](store)
    assert rows(store) == before


@pytest.mark.spec("A9")
@pytest.mark.promise("P7")
def test_damaged_rows_of_version_1_do_not_prevent_the_upgrade_of_others() -> None:
    store = CountingStore()
    _write(store, [row for rows_of in contents().values() for row in rows_of])
    bad = UUID(int=9)
    _write(
        store,
        [
            (Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(bad), b"{"),
            (Family.PREFERENCES, bad.bytes, b"[]"),
            (Family.AMQP_1_0_LINKS, catalog_keys.link_key("c", "cut", 0), b"\1\xff\xff"),
        ],
    )
    configuration = ConfigurationStore(store)
    configuration.open()
    assert FaultKind.DAMAGED_ROW in {fault.kind for fault in configuration.check().faults}
    preferences = PreferenceStore(store).open_and_load(lambda each: None)
    assert (preferences.visited, preferences.fault_count) == (len(catalog_v1.preferences()), 1)
    links = LinkStore(store).open_and_load(lambda each: None)
    assert (links.visited, links.fault_count) == (len(catalog_v1.links()), 1)
    assert store.get(Family.AMQP_1_0_LINKS, catalog_keys.link_key("c", "cut", 0)) == b"\1\xff\xff"


def _write(store: Store, content: list[tuple[Family, bytes, bytes]]) -> None:
    batch = Batch()
    for family, key, value in content:
        batch.put(family, key, value)
    store.write(batch)
