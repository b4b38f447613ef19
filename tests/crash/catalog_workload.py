"""Workload of a child on a catalog until it is killed. It reports each change before and after."""

from __future__ import annotations

import random
from pathlib import Path
from uuid import uuid4

from tests.crash.harness import Emit

from basaltmq.catalog import deletion
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import NewObject
from basaltmq.catalog.record import ROOT
from basaltmq.store.open import open_store

OPERATIONS_MAX = 400
STEP = 4
"""Objects deleted per batch, so that most trees need several."""


def run(emit: Emit, path: str, seed: int) -> None:
    """Change the catalog. Report each change before it starts (`?`) and after it is confirmed (`+`)."""
    deletion.OBJECTS_PER_BATCH_MAX = STEP  # type: ignore[misc]
    rng = random.Random(seed)
    catalog = Catalog(open_store(Path(path)))
    catalog.open()
    for number in range(OPERATIONS_MAX):
        present = list(catalog.children(ROOT, Kind.VHOST))
        choice = rng.random()
        if not present or (choice < 0.4 and len(present) < 12):
            name, topics = f"{seed}-{number}", rng.randint(0, 20)
            emit(f"? create {name} {topics}")
            _create(catalog, name, topics)
            emit(f"+ create {name} {topics}")
            continue
        chosen = rng.choice(present)
        if choice < 0.7:
            emit(f"? update {chosen.name} {number}")
            catalog.update(chosen.id, {**chosen.attributes, "value": number})
            emit(f"+ update {chosen.name} {number}")
        else:
            emit(f"? delete {chosen.name} 0")
            catalog.delete(chosen.id)
            emit(f"+ delete {chosen.name} 0")


def _create(catalog: Catalog, name: str, topics: int) -> None:
    """Create a vhost with topics. Its attributes contain their number."""
    vhost = uuid4()
    objects = [NewObject(Kind.VHOST, name, attributes={"topics": topics, "value": -1}, id=vhost)]
    objects += [NewObject(Kind.TOPIC, f"t{number}", vhost) for number in range(topics)]
    catalog.create_many(objects)
