"""Makes the rows of the catalog consistent after a repair that could not read all of them.

    parent links     restored from the name index, which lists every object under its parent
    lost objects     reported with the names in the name index; their links are deleted
    lost parents     a vhost is restored under its name with default settings. Children of other lost parents are
                     removed and reported.
    name index       rebuilt from the objects

Users are never restored: without its password, an account would be open to everyone.
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
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.salvage.losses import Losses
from basaltmq.store.salvage.naming import Loss
from basaltmq.store.versions import put_version, read_version

_VERSIONS: Final = (
    (configuration.VERSION_NAME, configuration.VERSION, Family.CONFIGURED_OBJECTS),
    (preferences.VERSION_NAME, preferences.VERSION, Family.PREFERENCES),
    (links.VERSION_NAME, links.VERSION, Family.AMQP_1_0_LINKS),
)

RESTORED: Final = frozenset({Kind.VHOST})
"""Kinds that are restored under their name. They grant no access."""

ROUNDS_MAX: Final = 8
"""The hierarchy has two levels. Each round may leave dangling links for the next one."""


def reconcile_catalog(store: Store, losses: Losses) -> list[Loss]:
    """Make the rows of the catalog consistent. Return the losses."""
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
    """Return type, name and parent from the name index, for lost objects and objects with a parent."""
    found: dict[UUID, tuple[str, str, UUID]] = {}
    for key, raw in store.scan(Family.OBJECT_NAMES):
        try:
            parent, kind, name = catalog_keys.decode_object_name_key(key)
        except (BasaltError, UnicodeDecodeError):
            continue
        if len(raw) == 16:
            object_id = UUID(bytes=raw)
            if parent != ROOT or store.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(object_id)) is None:
                found[object_id] = (kind, name, parent)
    return found


def _restore_links(store: Store, named: dict[UUID, tuple[str, str, UUID]]) -> None:
    """Restore missing parent links from the name index."""
    batch = Batch()
    for walked in walk(store):
        listed = None if walked.id is None else named.get(walked.id)
        if walked.id is None or walked.value is None or walked.parents or listed is None or listed[2] == ROOT:
            continue
        raw = store.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(listed[2]))
        parent_type = decode_value(raw, listed[2]).type if raw is not None else named.get(listed[2], ("",))[0]
        if parent_type:
            key = catalog_keys.hierarchy_key(walked.id, parent_type)
            batch.put(Family.CONFIGURED_OBJECT_HIERARCHY, key, encode_parent(listed[2]))
    store.write(batch)


def _dangling(store: Store, named: dict[UUID, tuple[str, str, UUID]]) -> list[Loss]:
    """Remove or restore objects with dangling links. Return the losses."""
    batch = Batch()
    found: list[Loss] = []
    restored: set[UUID] = set()
    for walked in walk(store):
        if walked.id is None:
            continue
        if walked.value is None:
            if store.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(walked.id)) is None:
                _delete_links(store, batch, walked.id)
                found.append(_lost(walked.id, named, "is lost"))
            continue
        for parent_type, parent in walked.parents.items():
            if (
                parent in restored
                or store.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(parent)) is not None
            ):
                continue
            kind, name, _ = named.get(parent, (parent_type, "", ROOT))
            if kind in RESTORED and name:
                restored.add(parent)
                record = ConfiguredRecord(parent, kind, {NAME: name})
                batch.put(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(parent), encode_value(record))
                found.append(_lost(parent, named, "lost its settings and has defaults now; set them again"))
                continue
            batch.delete(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(walked.id))
            _delete_links(store, batch, walked.id)
            own = walked.value.attributes.get(NAME)
            named[walked.id] = (walked.value.type, own if isinstance(own, str) else "", parent)
            found.append(_lost(walked.id, named, f"was removed, because its {kind} {name!r} ({parent}) is lost"))
            break
    store.write(batch)
    return found


def _delete_links(store: Store, batch: Batch, object_id: UUID) -> None:
    for key, _ in store.scan(
        Family.CONFIGURED_OBJECT_HIERARCHY, *key_parts.prefix_range(catalog_keys.hierarchy_prefix(object_id))
    ):
        batch.delete(Family.CONFIGURED_OBJECT_HIERARCHY, key)


def _lost(object_id: UUID, named: dict[UUID, tuple[str, str, UUID]], text: str) -> Loss:
    kind, name, _ = named.get(object_id, ("object", str(object_id), ROOT))
    return Loss(
        subject=f"{kind} {name!r}",
        text=f"{object_id} {text}",
        family=Family.CONFIGURED_OBJECTS.label,
        ids=[str(object_id)],
    )
