"""Versions of the contents of a store, and upgrades between them (SPEC A9).

Each kind of content has a row in the `version` family: its name -> u32. Empty content starts at the current version.
Content with rows but no version row predates version rows and is version 1. A newer version is refused with an error
that names both versions. An older one is upgraded step by step. A step yields batches. A crash may leave all but the
last applied, so a step must be repeatable. The last batch carries the version row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Final, TypeAlias

from basaltmq.errors import CorruptionError, StoreTooNewError, StoreTooOldError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

_VERSION: Final = Struct(">I")

Upgrade: TypeAlias = Callable[[Store], Iterator[Batch]]
"""Upgrades content from the version it is registered under to the next."""


def read_version(store: Store, name: str) -> int | None:
    raw = store.get(Family.VERSION, name.encode())
    if raw is None:
        return None
    if len(raw) != _VERSION.size:
        raise CorruptionError(f"the version row {name!r} has {len(raw)} bytes, not {_VERSION.size}")
    version: int = _VERSION.unpack(raw)[0]
    return version


def put_version(batch: Batch, name: str, version: int) -> None:
    batch.put(Family.VERSION, name.encode(), _VERSION.pack(version))


def bring_up_to_date(
    store: Store, name: str, current: int, upgrades: Mapping[int, Upgrade], families: tuple[Family, ...]
) -> bool:
    """Upgrade the content `name` in `families` to `current`, durably. Return True if the content is new."""
    found = read_version(store, name)
    is_new = found is None and not any(next(store.scan(family), None) for family in families)
    if is_new:
        batch = Batch()
        put_version(batch, name, current)
        store.write(batch)
        store.sync()
        return True
    version = 1 if found is None else found
    if version < 1:
        raise CorruptionError(f"the version row {name!r} says {version}; versions begin at 1")
    if version > current:
        raise StoreTooNewError(
            f"{name} is at version {version}, but this Basalt reads up to version {current}; use a newer Basalt"
        )
    for step in range(version, current):
        if step not in upgrades:
            raise StoreTooOldError(
                f"{name} is at version {step}; this Basalt reads version {current} and cannot upgrade from {step}. "
                "Export the data with the Basalt that wrote it and import it again"
            )
        last = Batch()
        for batch in upgrades[step](store):
            if len(last):
                store.write(last)
            last = batch
        put_version(last, name, step + 1)
        store.write(last)
        store.sync()
    return False
