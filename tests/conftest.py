"""What every test shares: the database of random examples stays out of the tree, and seeds are printed."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis.database import InMemoryExampleDatabase

hypothesis.settings.register_profile(
    "basalt",
    deadline=None,
    database=InMemoryExampleDatabase(),
    print_blob=True,
)
hypothesis.settings.load_profile("basalt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with Spark: its tests are the longest, and whoever is last with them would keep the others waiting."""
    items.sort(key=lambda item: "interop/spark" not in item.nodeid)
