"""Fixtures: both stores for all tests of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.catalog.stores import CountingStore

from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.configuration import ConfigurationStore
from basaltmq.store.api import Store
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store

STORES: dict[str, Callable[[Path], Store]] = {"memory": lambda path: MemoryStore(), "rocks": open_store}


@pytest.fixture(params=sorted(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = STORES[request.param](tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def configuration(store: Store) -> ConfigurationStore:
    opened = ConfigurationStore(store)
    opened.open()
    return opened


@pytest.fixture
def catalog(store: Store) -> Catalog:
    opened = Catalog(store)
    opened.open()
    return opened


@pytest.fixture
def counting() -> CountingStore:
    return CountingStore()
