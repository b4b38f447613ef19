"""The stores that the conformance suite tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from basaltmq.store.api import Store
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.overlay import OverlayStore

StoreMaker: TypeAlias = Callable[[Path], Store]

STORES: dict[str, StoreMaker] = {
    "memory": lambda path: MemoryStore(),
    "overlay": lambda path: OverlayStore(open_store(path)),
    "rocks": open_store,
}


@pytest.fixture(params=sorted(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = STORES[request.param](tmp_path / "store")
    yield opened
    opened.close()
