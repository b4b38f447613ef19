"""The rows of the catalog brought in line with each other, after a repair that could not read all of them.

    parent links     made again from the name index, which lists every object under its parent
    lost objects     named by the name index; their own links go
    lost parents     a virtual host comes back under its name, with default settings; of any other kind, what stood
                     under it goes with it, and is named
    name index       made again from the objects

A user is never made again: without its password it would be open to anybody.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from basaltmq.catalog import configuration, links, names, preferences
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.record import (
    NAME,
    ROOT,
    ConfiguredRecord,
    decode_value,
    encode_parent,
    encode_value,
)
from basaltmq.catalog.walk import walk
from basaltmq.errors import BasaltError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.salvage.losses import Losses
from basaltmq.store.salvage.naming import Loss
from basaltmq.store.versions import put_version, read_version

_VERSIONS: Final = (
    (configuration.VERSION_NAME, configuration.VERSION, Family.CONFIGURED_OBJECTS),
    (preferences.VERSION_NAME, preferences.VERSION, Family.PREFERENCES),
    (links.VERSION_NAME, links.VERSION, Family.AMQP_1_0_LINKS),
)

RESTORED: Final = frozenset({Kind.VHOST})
"""Kinds whose objects come back under their name: nothing they had beside it lets anybody in."""

ROUNDS_MAX: Final = 8
"""The hierarchy has three levels; what is removed in one may leave something dangling in the next."""


def mend_catalog(store: Store, losses: Losses) -> list[Loss]:
    """Bring the rows of the catalog in line; what that cost."""
    _versions(store, losses)
    named = _named(store)
    found: list[Loss] = []
    if losses.hit(Family.CONFIGURED_OBJECT_HIERARCHY):
        _restore_links(store, named)
    for _ in range(ROUNDS_MAX):
        more = _dangling(store, named)
        if not more:
            break
        found += more
    for batch in names.rebuild(store):
        store.write(batch)
    return found


def _versions(store: Store, losses: Losses) -> None:
    if not losses.hit(Family.VERSION):
        return
    batch = Batch()
    for name, version, family in _VERSIONS:
        if read_version(store, name) is None and next(iter(store.scan(family)), None) is not None:
            put_version(batch, name, version)
    store.write(batch)


def _named(store: Store) -> dict[UUID, tuple[str, str, UUID]]:
    """Type, name and parent of objects that are gone, or stand under somebody, as the name index has them."""
    found: dict[UUID, tuple[str, str, UUID]] = {}
    for key, raw in store.scan(Family.OBJECT_NAMES):
        try:
            parent, kind, name = keys.decode_object_name_key(key)
        except (BasaltError, UnicodeDecodeError):
            continue
        if len(raw) == 16:
            object_id = UUID(bytes=raw)
            if parent != ROOT or store.get(Family.CONFIGURED_OBJECTS, keys.configured_key(object_id)) is None:
                found[object_id] = (kind, name, parent)
    return found


def _restore_links(store: Store, named: dict[UUID, tuple[str, str, UUID]]) -> None:
    """An object without a link that the name index lists under a parent stands under it."""
    batch = Batch()
    for walked in walk(store):
        listed = None if walked.id is None else named.get(walked.id)
        if walked.id is None or walked.value is None or walked.parents or listed is None or listed[2] == ROOT:
            continue
        raw = store.get(Family.CONFIGURED_OBJECTS, keys.configured_key(listed[2]))
        parent_type = decode_value(raw, listed[2]).type if raw is not None else named.get(listed[2], ("",))[0]
        if parent_type:
            key = keys.hierarchy_key(walked.id, parent_type)
            batch.put(Family.CONFIGURED_OBJECT_HIERARCHY, key, encode_parent(listed[2]))
    store.write(batch)


def _dangling(store: Store, named: dict[UUID, tuple[str, str, UUID]]) -> list[Loss]:
    """Links that lead nowhere, on either side."""
    batch = Batch()
    found: list[Loss] = []
    restored: set[UUID] = set()
    for walked in walk(store):
        if walked.id is None:
            continue
        if walked.value is None:
            if store.get(Family.CONFIGURED_OBJECTS, keys.configured_key(walked.id)) is None:
                _delete_links(store, batch, walked.id)
                found.append(_lost(walked.id, named, "is lost"))
            continue
        for parent_type, parent in walked.parents.items():
            if parent in restored or store.get(Family.CONFIGURED_OBJECTS, keys.configured_key(parent)) is not None:
                continue
            kind, name, _ = named.get(parent, (parent_type, "", ROOT))
            if kind in RESTORED and name:
                restored.add(parent)
                record = ConfiguredRecord(parent, kind, {NAME: name})
                batch.put(Family.CONFIGURED_OBJECTS, keys.configured_key(parent), encode_value(record))
                found.append(_lost(parent, named, "lost its settings and has default ones now; set them again"))
                continue
            batch.delete(Family.CONFIGURED_OBJECTS, keys.configured_key(walked.id))
            _delete_links(store, batch, walked.id)
            own = walked.value.attributes.get(NAME)
            named[walked.id] = (walked.value.type, own if isinstance(own, str) else "", parent)
            found.append(_lost(walked.id, named, f"was removed, because its {kind} {name!r} ({parent}) is lost"))
            break
    store.write(batch)
    return found


def _delete_links(store: Store, batch: Batch, object_id: UUID) -> None:
    for key, _ in store.scan(Family.CONFIGURED_OBJECT_HIERARCHY, *keys.prefix_range(keys.hierarchy_prefix(object_id))):
        batch.delete(Family.CONFIGURED_OBJECT_HIERARCHY, key)


def _lost(object_id: UUID, named: dict[UUID, tuple[str, str, UUID]], text: str) -> Loss:
    kind, name, _ = named.get(object_id, ("object", str(object_id), ROOT))
    return Loss(
        subject=f"{kind} {name!r}",
        text=f"{object_id} {text}",
        family=Family.CONFIGURED_OBJECTS.label,
        ids=[str(object_id)],
    )
