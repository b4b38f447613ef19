"""The catalog compared with a plain dict, on both stores, with a full comparison at the end."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from basaltmq.catalog import deletion
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import NEVER_AT_TOP, PARENTS, Kind
from basaltmq.catalog.objects import CatalogObject, NewObject
from basaltmq.catalog.record import ROOT
from basaltmq.errors import AlreadyExistsError, NotFoundError
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store

NAMES = st.sampled_from(["a", "b", "", "ä🜁", "a\0", "long" * 30])
ATTRIBUTES = st.dictionaries(st.sampled_from("xyz"), st.none() | st.booleans() | st.integers() | st.lists(st.text()))
KINDS = st.sampled_from(list(Kind))


class CatalogMachine(RuleBasedStateMachine):
    """Objects by id in a dict. Children and names are found by a full scan."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[UUID, CatalogObject] = {}
        self.gone: list[UUID] = []
        self.open_store()

    def open_store(self) -> None:
        self.store: Store = MemoryStore()

    def reopen_store(self) -> None:
        """Reopen the catalog only, because a memory store loses its rows."""

    @initialize()
    def open(self) -> None:
        self.catalog = Catalog(self.store, cache_bytes=4096)
        self.catalog.open()

    def pick(self, data: st.DataObject, kinds: tuple[Kind, ...]) -> UUID | None:
        ids = [each.id for each in self.model.values() if each.kind in kinds]
        return data.draw(st.sampled_from(ids)) if ids else None

    def named(self, kind: Kind, name: str, parent: UUID) -> CatalogObject | None:
        for each in self.model.values():
            if (each.kind, each.name, each.parent) == (kind, name, parent):
                return each
        return None

    def place(self, data: st.DataObject, kind: Kind) -> UUID | None:
        parent = self.pick(data, PARENTS[kind])
        if kind not in NEVER_AT_TOP and (parent is None or data.draw(st.booleans())):
            return ROOT
        return parent

    @rule(data=st.data(), kind=KINDS, name=NAMES, attributes=ATTRIBUTES)
    def create(self, data: st.DataObject, kind: Kind, name: str, attributes: dict[str, Any]) -> None:
        parent = self.place(data, kind)
        if parent is None:
            return
        if self.named(kind, name, parent) is not None:
            with pytest.raises(AlreadyExistsError):
                self.catalog.create(kind, name, parent, attributes)
            return
        made = self.catalog.create(kind, name, parent, attributes)
        assert made.id not in self.model
        self.model[made.id] = CatalogObject(made.id, kind, name, parent, attributes)

    @rule(data=st.data(), kind=KINDS, count=st.integers(1, 12))
    def create_many(self, data: st.DataObject, kind: Kind, count: int) -> None:
        parent = self.place(data, kind)
        if parent is None:
            return
        first = len(self.model) + len(self.gone)
        wanted = [NewObject(kind, f"n{first}-{number}", parent, {"n": number}) for number in range(count)]
        for object_id, each in zip(self.catalog.create_many(wanted), wanted, strict=True):
            self.model[object_id] = CatalogObject(object_id, kind, each.name, parent, each.attributes)

    @rule(data=st.data(), attributes=ATTRIBUTES)
    def update(self, data: st.DataObject, attributes: dict[str, Any]) -> None:
        chosen = self.pick(data, tuple(Kind))
        if chosen is not None:
            old = self.model[chosen]
            self.model[chosen] = CatalogObject(chosen, old.kind, old.name, old.parent, attributes)
            assert self.catalog.update(chosen, attributes) == self.model[chosen]

    @rule(data=st.data(), name=NAMES)
    def rename(self, data: st.DataObject, name: str) -> None:
        chosen = self.pick(data, tuple(Kind))
        if chosen is None:
            return
        old = self.model[chosen]
        holder = self.named(old.kind, name, old.parent)
        if holder is not None and holder.id != chosen:
            with pytest.raises(AlreadyExistsError):
                self.catalog.rename(chosen, name)
            return
        self.model[chosen] = CatalogObject(chosen, old.kind, name, old.parent, old.attributes)
        assert self.catalog.rename(chosen, name) == self.model[chosen]

    def forget(self, object_id: UUID) -> int:
        children = [each.id for each in self.model.values() if each.parent == object_id]
        del self.model[object_id]
        self.gone.append(object_id)
        return 1 + sum(self.forget(child) for child in children)

    @rule(data=st.data(), at_once=st.booleans())
    def delete(self, data: st.DataObject, at_once: bool) -> None:
        chosen = self.pick(data, tuple(Kind))
        if chosen is None:
            return
        under_way = self.catalog.is_purging
        count = self.forget(chosen)
        if at_once:
            removed = self.catalog.delete(chosen)
            assert removed == count or under_way
        else:
            self.catalog.start_delete(chosen)
        with pytest.raises(NotFoundError):
            self.catalog.delete(chosen)

    @rule()
    def purge(self) -> None:
        self.catalog.purge()

    @rule()
    def reopen(self) -> None:
        self.catalog.close()
        self.reopen_store()
        self.catalog = Catalog(self.store, cache_bytes=4096)
        assert self.catalog.open() is False

    @rule()
    def rebuild(self) -> None:
        if not self.catalog.is_purging:
            before = list(self.store.scan(Family.OBJECT_NAMES))
            self.catalog.rebuild_names()
            assert list(self.store.scan(Family.OBJECT_NAMES)) == before

    @rule(data=st.data(), kind=KINDS, name=NAMES)
    def look_up(self, data: st.DataObject, kind: Kind, name: str) -> None:
        parent = self.place(data, kind)
        if parent is not None:
            assert self.catalog.find(kind, name, parent) == self.named(kind, name, parent)
        chosen = self.pick(data, tuple(Kind))
        if chosen is not None:
            assert self.catalog.get(chosen) == self.model[chosen]
        if self.gone:
            assert self.catalog.get(data.draw(st.sampled_from(self.gone))) is None

    @invariant()
    def top_level_is_the_same(self) -> None:
        if hasattr(self, "catalog"):
            listed = {each.id: each for each in self.catalog.children(ROOT)}
            assert listed == {each.id: each for each in self.model.values() if each.parent == ROOT}

    def teardown(self) -> None:
        try:
            if hasattr(self, "catalog"):
                self.reopen()
                self.compare_everything()
        finally:
            self.store.close()

    def compare_everything(self) -> None:
        listed: dict[UUID, CatalogObject] = {}
        waiting = [ROOT]
        while waiting:
            for each in self.catalog.children(waiting.pop()):
                listed[each.id] = each
                waiting.append(each.id)
        assert listed == self.model
        for each in self.model.values():
            assert self.catalog.find(each.kind, each.name, each.parent) == self.catalog.get(each.id) == each
        report = self.catalog.check()
        assert report.faults == []
        assert report.visited == len(self.model)
        assert not any(self.store.scan(Family.DELETED_OBJECTS))
        assert sum(1 for _ in self.store.scan(Family.OBJECT_NAMES)) == len(self.model)


class RocksCatalogMachine(CatalogMachine):
    """The same test on disk. A reopen also closes and opens the database."""

    def open_store(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="basalt-model-"))
        self.store = open_store(self.path / "store")

    def reopen_store(self) -> None:
        self.store.close()
        self.store = open_store(self.path / "store", create=False)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.path)


@pytest.mark.spec("A2", "D1")
@pytest.mark.promise("P2", "P6", "P10")
@pytest.mark.parametrize(("machine", "examples"), [(CatalogMachine, 120), (RocksCatalogMachine, 15)])
def test_the_catalog_matches_a_dict(
    machine: type[CatalogMachine], examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "OBJECTS_PER_BATCH_MAX", 5)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=40, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )
