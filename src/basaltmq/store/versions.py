"""Versions of what is kept in a store, and the way from each older one to today's (SPEC A9).

Every kind of content has a row of its own in the `version` family: its name -> u32. A content that is empty begins at
the current version. One that has rows but no version row was written before it had one, and is version 1. A newer
one is refused by name of both versions. An older one is upgraded step by step; a step yields batches, of which all
but the last may be seen half done after a crash and are made again, and the last one carries the version row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Final, TypeAlias

from basaltmq.errors import CorruptionError, StoreTooNewError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

_VERSION: Final = Struct(">I")

Upgrade: TypeAlias = Callable[[Store], Iterator[Batch]]
"""Brings content from the version it is registered under to the next."""


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
    """Upgrade the content `name`, kept in `families`, to `current`. True if the content is new. Durable on return."""
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
            f"{name} is at version {version}, this Basalt knows up to {current}: open the store with a newer Basalt"
        )
    for step in range(version, current):
        last = Batch()
        for batch in upgrades[step](store):
            if len(last):
                store.write(last)
            last = batch
        put_version(last, name, step + 1)
        store.write(last)
        store.sync()
    return False
