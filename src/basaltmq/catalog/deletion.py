"""Deleting an object with everything under it, so that it stays deleted whatever happens (P10).

A small subtree goes in one batch. A large one does not fit, so it goes in steps:

    1  one batch: the object itself is deleted, and a row in `deleted_objects` says that what stood under it is doomed
    2  batches: descendants are deleted, children before their parents, so what is left can always be reached from the
       doomed root through the name index
    3  the last of these batches deletes the row

       deleted_objects    | uuid of the root (16) |  ->  its type

After a crash in between, the row is found at the next open and the steps go on. Until they end, the catalog hides what
stands under a parent that does not exist. An object created under the same name has another id, so nothing of the
old subtree can come back under it.

A topic may have shards, which are not the catalog's. Where one goes with what it stood under, the same batch leaves its
row under `orphaned_topic_key` of family `shards`, and whoever keeps the shards removes them (`streams.orphans`).

Steps need no sync of their own: the log keeps their order, so if the end is durable everything before it is.
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
from basaltmq.store.keys import queues as keys

OBJECTS_PER_BATCH_MAX: Final = 10_000
"""Objects deleted together: about 2 MiB as a batch, and some 50 ms during which no other change gets in."""

DEPTH_MAX: Final = 64
"""Kinds nest four deep. Deeper than this is a circle that only damage can make."""


class Doomed(NamedTuple):
    """An object to be deleted, as its row in the name index shows it."""

    name_key: bytes
    id: UUID
    type: str
    name: str
    parent: UUID
    parent_type: str


class Deletions:
    """Subtrees whose root is deleted and whose rest is not yet."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: dict[UUID, str] = {}
        self._walk: Iterator[Doomed] | None = None

    def __bool__(self) -> bool:
        return bool(self._pending)

    def is_root(self, object_id: UUID) -> bool:
        """Whether what stood under this object is still to be deleted; until then nobody may have its id."""
        return object_id in self._pending

    def load(self) -> None:
        """Find what a crash left unfinished."""
        self._walk = None
        self._pending = {
            keys.decode_deleted_object_key(key): raw.decode() for key, raw in self._store.scan(Family.DELETED_OBJECTS)
        }

    def forget(self) -> None:
        """Let go of the store."""
        self._walk = None
        self._pending = {}

    def stage_subtree(self, change: Change, root: UUID, root_type: str) -> list[Doomed]:
        """Delete all that stands under `root` if it fits this change; otherwise doom it, and return nothing."""
        doomed = list(islice(descendants(self._store, root, root_type), OBJECTS_PER_BATCH_MAX + 1))
        if len(doomed) <= OBJECTS_PER_BATCH_MAX:
            for each in doomed:
                self._stage_rows(change, each)
            return doomed
        change.put(Family.DELETED_OBJECTS, keys.deleted_object_key(root), root_type.encode())
        change.after.append(lambda: self._pending.__setitem__(root, root_type))
        return []

    def stage_step(self, change: Change) -> list[Doomed]:
        """Delete the next part of what is doomed."""
        root, root_type = next(iter(self._pending.items()))
        if self._walk is None:
            self._walk = descendants(self._store, root, root_type)
        doomed = list(islice(self._walk, OBJECTS_PER_BATCH_MAX))
        for each in doomed:
            self._stage_rows(change, each)
        if len(doomed) < OBJECTS_PER_BATCH_MAX:
            change.delete(Family.DELETED_OBJECTS, keys.deleted_object_key(root))
            change.after.append(lambda: self._finish(root))
        return doomed

    def start_over(self) -> None:
        """After a step that was not written: its part is still to be deleted."""
        self._walk = None

    def _finish(self, root: UUID) -> None:
        self._walk = None
        self._pending.pop(root, None)

    def stage_orphan(self, change: Change, topic_id: UUID) -> None:
        """A topic goes without its shards, if it has any: leave word for those who keep them."""
        if next(self._store.scan(Family.SHARDS, *keys.prefix_range(keys.shard_name_prefix(topic_id))), None) is None:
            return
        row = self._store.get(Family.CONFIGURED_OBJECTS, keys.configured_key(topic_id))
        change.put(Family.SHARDS, keys.orphaned_topic_key(topic_id), row or b"")

    def _stage_rows(self, change: Change, doomed: Doomed) -> None:
        if doomed.type == Kind.TOPIC:
            self.stage_orphan(change, doomed.id)
        change.delete(Family.OBJECT_NAMES, doomed.name_key)
        change.delete(Family.CONFIGURED_OBJECTS, keys.configured_key(doomed.id))
        change.delete(Family.CONFIGURED_OBJECT_HIERARCHY, keys.hierarchy_key(doomed.id, doomed.parent_type))
        if doomed.type not in BY_LABEL:
            # Kinds of the catalog have one parent; others may have links to more.
            self._stage_other_parents(change, doomed)

    def _stage_other_parents(self, change: Change, doomed: Doomed) -> None:
        for parent_type, parent in parents_of(self._store, doomed.id).items():
            change.delete(Family.CONFIGURED_OBJECT_HIERARCHY, keys.hierarchy_key(doomed.id, parent_type))
            change.delete(Family.OBJECT_NAMES, keys.object_name_key(parent, doomed.type, doomed.name))


def descendants(store: Store, root: UUID, root_type: str, depth: int = 0) -> Iterator[Doomed]:
    """All that stands under an object, children before their parents."""
    if depth > DEPTH_MAX:
        raise CorruptionError(f"the objects under {root} are nested deeper than {DEPTH_MAX}: check the catalog")
    start, end = keys.prefix_range(keys.object_name_prefix(root))
    for key, raw in store.scan(Family.OBJECT_NAMES, start, end):
        _, kind, name = keys.decode_object_name_key(key)
        if len(raw) != 16:
            raise CorruptionError(f"the name row of {kind} {name!r:.80} is damaged: rebuild the name index")
        child = UUID(bytes=raw)
        yield from descendants(store, child, kind, depth + 1)
        yield Doomed(key, child, kind, name, root, root_type)
