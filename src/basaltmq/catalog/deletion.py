"""Crash-safe deletion of an object with its descendants (P10).

A small subtree is deleted in one batch. A large one is deleted in steps:

    1  one batch deletes the object itself, and puts a row in `deleted_objects` that marks its descendants for deletion
    2  batches delete descendants, children before parents, so that the rest stays reachable from the deleted root
       through the name index
    3  the last of these batches deletes the row

       deleted_objects    | uuid of the root (16) |  ->  its type

After a crash in between, the next open finds the row and continues. Until the deletion ends, the catalog hides objects
whose parent does not exist. A new object with the same name has another id, so it inherits nothing of the old subtree.

Shards of a topic are not rows of the catalog. If a topic is deleted with its parent, the same batch puts its row under
`orphaned_topic_key` of family `shards`, and the stream plane removes the shards (`streams.orphans`).

The steps need no fsync. The WAL keeps their order, so a durable end implies durable steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple
from uuid import UUID

from basaltmq.catalog.commits import Change
from basaltmq.catalog.kinds import BY_LABEL, Kind
from basaltmq.catalog.walk import parents_of
from basaltmq.errors import CorruptionError
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys

OBJECTS_PER_BATCH_MAX: Final = 10_000
"""Objects deleted per batch: about 2 MiB, and some 50 ms during which other changes wait."""

DEPTH_MAX: Final = 64
"""Kinds nest two deep. More than this is a cycle caused by damage."""


class ToDelete(NamedTuple):
    """An object to delete, as listed in the name index."""

    name_key: bytes
    id: UUID
    type: str
    name: str
    parent: UUID
    parent_type: str


class Deletions:
    """Subtrees whose root is deleted and whose descendants are not yet."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: dict[UUID, str] = {}
        self._walk: Iterator[ToDelete] | None = None

    def __bool__(self) -> bool:
        return bool(self._pending)

    def is_root(self, object_id: UUID) -> bool:
        """Whether descendants of this deleted object remain. Its id must not be reused until then."""
        return object_id in self._pending

    def load(self) -> None:
        """Load deletions that a crash interrupted."""
        self._walk = None
        self._pending = {
            catalog_keys.decode_deleted_object_key(key): raw.decode()
            for key, raw in self._store.scan(Family.DELETED_OBJECTS)
        }

    def forget(self) -> None:
        """Release the store."""
        self._walk = None
        self._pending = {}

    def stage_subtree(self, change: Change, root: UUID, root_type: str) -> list[ToDelete]:
        """Delete all descendants of `root` if they fit this change. Otherwise mark them for deletion and return
        an empty list."""
        to_delete = list(islice(descendants(self._store, root, root_type), OBJECTS_PER_BATCH_MAX + 1))
        if len(to_delete) <= OBJECTS_PER_BATCH_MAX:
            for each in to_delete:
                self._stage_rows(change, each)
            return to_delete
        change.put(Family.DELETED_OBJECTS, catalog_keys.deleted_object_key(root), root_type.encode())
        change.after.append(lambda: self._pending.__setitem__(root, root_type))
        return []

    def stage_step(self, change: Change) -> list[ToDelete]:
        """Delete the next part of the objects that are marked for deletion."""
        root, root_type = next(iter(self._pending.items()))
        if self._walk is None:
            self._walk = descendants(self._store, root, root_type)
        to_delete = list(islice(self._walk, OBJECTS_PER_BATCH_MAX))
        for each in to_delete:
            self._stage_rows(change, each)
        if len(to_delete) < OBJECTS_PER_BATCH_MAX:
            change.delete(Family.DELETED_OBJECTS, catalog_keys.deleted_object_key(root))
            change.after.append(lambda: self._finish(root))
        return to_delete

    def start_over(self) -> None:
        """Restart the scan after a step that was not written."""
        self._walk = None

    def _finish(self, root: UUID) -> None:
        self._walk = None
        self._pending.pop(root, None)

    def stage_orphan(self, change: Change, topic_id: UUID) -> None:
        """Record a topic that is deleted without its shards, so that the stream plane removes them."""
        if (
            next(
                self._store.scan(Family.SHARDS, *key_parts.prefix_range(stream_keys.shard_name_prefix(topic_id))), None
            )
            is None
        ):
            return
        row = self._store.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(topic_id))
        change.put(Family.SHARDS, stream_keys.orphaned_topic_key(topic_id), row or b"")

    def _stage_rows(self, change: Change, to_delete: ToDelete) -> None:
        if to_delete.type == Kind.TOPIC:
            self.stage_orphan(change, to_delete.id)
        change.delete(Family.OBJECT_NAMES, to_delete.name_key)
        change.delete(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(to_delete.id))
        change.delete(
            Family.CONFIGURED_OBJECT_HIERARCHY, catalog_keys.hierarchy_key(to_delete.id, to_delete.parent_type)
        )
        if to_delete.type not in BY_LABEL:
            # Known kinds have one parent; others may have several.
            self._stage_other_parents(change, to_delete)

    def _stage_other_parents(self, change: Change, to_delete: ToDelete) -> None:
        for parent_type, parent in parents_of(self._store, to_delete.id).items():
            change.delete(Family.CONFIGURED_OBJECT_HIERARCHY, catalog_keys.hierarchy_key(to_delete.id, parent_type))
            change.delete(Family.OBJECT_NAMES, catalog_keys.object_name_key(parent, to_delete.type, to_delete.name))


def descendants(store: Store, root: UUID, root_type: str, depth: int = 0) -> Iterator[ToDelete]:
    """Yield all descendants of an object, children before parents."""
    if depth > DEPTH_MAX:
        raise CorruptionError(f"the objects under {root} are nested deeper than {DEPTH_MAX}; check the catalog")
    start, end = key_parts.prefix_range(catalog_keys.object_name_prefix(root))
    for key, raw in store.scan(Family.OBJECT_NAMES, start, end):
        _, kind, name = catalog_keys.decode_object_name_key(key)
        if len(raw) != 16:
            raise CorruptionError(f"the name row of {kind} {name!r:.80} is damaged; rebuild the name index")
        child = UUID(bytes=raw)
        yield from descendants(store, child, kind, depth + 1)
        yield ToDelete(key, child, kind, name, root, root_type)
