"""Settings of all tests: the database of random examples is outside of the tree, and seeds are printed."""

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest tests: Spark's in the first worker, the soak in the second.

    `--dist worksteal` gives each worker a run of consecutive tests, all of about the same length, and a worker begins
    with the first of its run. So the first test of the second run is the first one of the second worker.
    """
    items.sort(key=lambda item: "interop/spark" not in item.nodeid)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    place = len(items) // workers if workers > 1 else 0
    for soak in [item for item in items if item.nodeid.partition("::")[0].endswith("soak/test_soak.py")]:
        items.remove(soak)
        items.insert(place, soak)
