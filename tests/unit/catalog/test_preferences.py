"""The preference store: one row each, replaced together, versioned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from tests.unit.catalog.stores import CountingStore, rows

from basaltmq.catalog.faults import FaultKind
from basaltmq.catalog.preferences import TEXT_BYTES_MAX, VERSION_NAME, Preference, PreferenceStore
from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    StorageError,
    StoreClosedError,
)
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore


def preference(name: str = "n", **attributes: object) -> Preference:
    return Preference(uuid4(), "ada", "X-query", name, 1, 2, attributes)


def opened(store: Store) -> tuple[PreferenceStore, dict[UUID, Preference]]:
    found: dict[UUID, Preference] = {}
    preferences = PreferenceStore(store)
    report = preferences.open_and_load(lambda each: found.update({each.id: each}))
    assert report.visited == len(found)
    return preferences, found


@pytest.mark.spec("A3")
def test_preferences_survive_a_round_trip(store: Store) -> None:
    preferences, found = opened(store)
    assert found == {}
    one, two = preference("ä🜁", value={"limit": [1, None]}), preference(value="x")
    preferences.update_or_create([one, two])
    changed = Preference(one.id, "bob", "other", "", 3, 4, {})
    preferences.update_or_create([changed])
    assert preferences.get(one.id) == changed
    assert preferences.get(uuid4()) is None
    preferences.close()
    assert opened(store)[1] == {one.id: changed, two.id: two}


@pytest.mark.spec("A3")
@pytest.mark.promise("P2")
def test_replace_is_one_batch(counting: CountingStore) -> None:
    preferences, _ = opened(counting)
    old = [preference(str(number)) for number in range(3)]
    preferences.update_or_create(old)
    batches, syncs = len(counting.batches), counting.syncs
    again = Preference(old[0].id, "ada", "t", "kept under its id", 5, 6, {})
    added = preference("added")
    preferences.replace({old[0].id, old[1].id, uuid4()}, [again, added])
    assert (len(counting.batches), counting.syncs) == (batches + 1, syncs + 1)
    preferences.close()
    assert opened(counting)[1] == {again.id: again, added.id: added, old[2].id: old[2]}


@pytest.mark.spec("A3")
def test_a_refused_call_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    preferences, _ = opened(store)
    kept = preference()
    preferences.update_or_create([kept])
    before = rows(store)
    with pytest.raises(InvalidArgumentError, match="'x'"):
        preferences.replace([kept.id], [preference(), preference(x=float("nan"))])
    with pytest.raises(InvalidArgumentError, match="twice"):
        preferences.update_or_create([kept, kept])
    with pytest.raises(InvalidArgumentError, match="UUID"):
        preferences.replace(["text"], [])  # type: ignore[list-item]
    monkeypatch.setattr("basaltmq.catalog.preferences.PREFERENCES_PER_CHANGE_MAX", 2)
    with pytest.raises(LimitExceededError, match="several calls"):
        preferences.update_or_create([preference() for _ in range(3)])
    assert rows(store) == before


@pytest.mark.spec("A3")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "text"),
        ("owner", None),
        ("owner", "x" * (TEXT_BYTES_MAX + 1)),
        ("type", b"bytes"),
        ("name", "\ud800"),
        ("created_ms", -1),
        ("created_ms", True),
        ("updated_ms", 1 << 63),
        ("updated_ms", 1.5),
        ("attributes", []),
    ],
)
def test_invalid_preferences_are_refused(field: str, value: Any) -> None:
    preferences, _ = opened(MemoryStore())
    with pytest.raises(InvalidArgumentError):
        preferences.update_or_create([msgspec.structs.replace(preference(), **{field: value})])
    with pytest.raises(InvalidArgumentError):
        preferences.update_or_create(["not one"])  # type: ignore[list-item]


@pytest.mark.spec("A3")
def test_a_second_open_fails_and_close_is_idempotent(store: Store) -> None:
    preferences, _ = opened(store)
    with pytest.raises(StorageError, match="already open"):
        preferences.open_and_load(lambda each: None)
    preferences.close()
    preferences.close()
    calls: list[Callable[[], object]] = [
        lambda: preferences.update_or_create([preference()]),
        lambda: preferences.replace([], []),
        lambda: preferences.get(uuid4()),
    ]
    for call in calls:
        with pytest.raises(StoreClosedError, match="preference store is not open"):
            call()


@pytest.mark.spec("A3")
@pytest.mark.promise("P10")
def test_on_delete_leaves_no_row(store: Store) -> None:
    preferences, _ = opened(store)
    high = Preference(UUID(int=(1 << 128) - 1), "o", "t", "n", 0, 0, {})
    preferences.update_or_create([high, preference()])
    preferences.on_delete()
    assert rows(store) == {}
    assert opened(store)[1] == {}


@pytest.mark.spec("A3")
@pytest.mark.promise("P7")
def test_a_damaged_row_is_reported_and_not_changed(store: Store) -> None:
    preferences, _ = opened(store)
    good, bad = preference(), preference()
    preferences.update_or_create([good, bad])
    preferences.close()
    batch = Batch()
    batch.put(Family.PREFERENCES, bad.id.bytes, b'{"owner":"ada"')
    batch.put(Family.PREFERENCES, b"short", b"{}")
    store.write(batch)
    before = rows(store)
    found: list[Preference] = []
    report = preferences.open_and_load(found.append)
    assert found == [good]
    assert [fault.kind for fault in report.faults] == [FaultKind.DAMAGED_ROW] * 2
    assert bad.id in {fault.object_id for fault in report.faults}
    with pytest.raises(CorruptionError, match=str(bad.id)):
        preferences.get(bad.id)
    assert rows(store) == before


@pytest.mark.spec("A3")
def test_a_handler_stops_the_load(store: Store) -> None:
    preferences, _ = opened(store)
    preferences.update_or_create([preference() for _ in range(5)])
    preferences.close()
    assert preferences.open_and_load(lambda each: False).visited == 1


@pytest.mark.spec("A3", "A9")
def test_a_new_store_has_its_version_row(store: Store) -> None:
    opened(store)
    assert store.get(Family.VERSION, VERSION_NAME.encode()) == b"\0\0\0\2"
