"""What every test shares: the database of random examples stays out of the tree, and seeds are printed."""

from __future__ import annotations

import hypothesis
from hypothesis.database import InMemoryExampleDatabase

hypothesis.settings.register_profile(
    "basalt",
    deadline=None,
    database=InMemoryExampleDatabase(),
    print_blob=True,
)
hypothesis.settings.load_profile("basalt")
