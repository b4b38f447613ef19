"""The catalog: vhosts, users, permissions and topics by id and by name.

It adds to the configuration store: kinds with their hierarchy, lookups through a bounded cache, paged lists, deletion
with descendants, and change events. A million idle topics cost disk, not memory: opening reads a few rows, a lookup
reads two rows, a change writes the rows of one object.

Invariants:

- an object's name is unique among those of its kind under its parent;
- the cache shows what the store has (see `Cache`), including missing rows;
- once `delete` or `start_delete` returns, an object and its descendants are gone, also after a crash, and do not come
  back when the name is used again (see `deletion`).

Lists are in the key order of the name index. All methods are thread-safe. Changes are written one after the other and
share their fsyncs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple
from uuid import UUID

from basaltmq.catalog.attributes import Attributes
from basaltmq.catalog.cache import Cache
from basaltmq.catalog.commits import Change, Commits
from basaltmq.catalog.configuration import ConfigurationStore
from basaltmq.catalog.deletion import Deletions
from basaltmq.catalog.faults import Fault, FaultKind, LoadReport
from basaltmq.catalog.kinds import BY_LABEL, NEVER_AT_TOP, PARENTS, Kind
from basaltmq.catalog.lifecycle import Lifecycle
from basaltmq.catalog.objects import Action, CatalogObject, Event, NewObject, Page
from basaltmq.catalog.record import NAME, ROOT, ConfiguredRecord, check_name, decode_parent, decode_value
from basaltmq.errors import AlreadyExistsError, CorruptionError, InvalidArgumentError, NotFoundError
from basaltmq.ids import Ids
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.keys import parts as key_parts

CACHE_BYTES: Final = 8 << 20
"""About 9,000 small objects with their names: the working set of a busy broker, small compared to the block cache."""

PAGE_MAX: Final = 10_000
"""Objects in one page."""

_CHILDREN_AT_ONCE: Final = 500

_log: Final = logging.getLogger(__name__)

Listener = Callable[[Event], None]


class _Entry(NamedTuple):
    """A cached object. Its row is not decoded, so that every reader gets its own attributes."""

    id: UUID
    parent: UUID
    raw: bytes


class Catalog:
    """Objects by id and by name, over a store."""

    def __init__(
        self,
        store: Store,
        commits: Commits | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.commits = commits or Commits(store)
        self.configuration = ConfigurationStore(store, self.commits)
        self._store = store
        # Time-ordered ids put objects created together into the same blocks.
        self._ids = Ids()
        self._objects: Cache[_Entry | None] = Cache(cache_bytes // 2)
        self._names: Cache[UUID | None] = Cache(cache_bytes // 2)
        self._deletions = Deletions(store)
        self._listeners: list[Listener] = []
        self._life = Lifecycle("catalog")

    def open(self, initial_objects: Iterable[NewObject] = ()) -> bool:
        """Open, upgrade older rows, and finish deletions that a crash interrupted. Return True if the catalog is
        new."""
        self._life.open()
        try:
            is_new = self.configuration.open(self._initial(initial_objects))
            self._objects.clear()
            self._names.clear()
            self._deletions.load()
            while self._deletions:
                self.purge()
        except BaseException:
            self.close()
            raise
        return is_new

    def close(self) -> None:
        """Close the catalog. Closing twice is allowed. The store stays open."""
        self._life.close()
        self.configuration.close()
        self._deletions.forget()
        self._objects.clear()
        self._names.clear()

    def on_delete(self) -> None:
        """Remove the whole catalog and close."""
        self.configuration.on_delete()
        self.close()

    def on_change(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after every written change. Return a function that stops it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def get(self, object_id: UUID) -> CatalogObject | None:
        """Return the object with this id; None if it does not exist."""
        self._life.require_open()
        _require_id(object_id)
        return self._seen(self._entry(object_id))

    def find(self, kind: Kind, name: str, parent: UUID = ROOT) -> CatalogObject | None:
        """Return the object with this name; None if it does not exist."""
        self._life.require_open()
        _require_kind(kind)
        _require_id(parent)
        check_name(name)
        key = catalog_keys.object_name_key(parent, kind, name)
        cached = self._names.get(key)
        if cached is None:
            epoch = self._names.epoch
            raw = self._store.get(Family.OBJECT_NAMES, key)
            object_id = None if raw is None else _indexed_id(raw)
            self._names.put(key, object_id, 16, epoch)
        else:
            object_id = cached[0]
        if object_id is None:
            return None
        found = self._seen(self._entry(object_id, parent))
        # Objects with a duplicate name are indexed under their ids, which are not their names.
        return found if found is not None and found.name == name else None

    def taken(self, kind: Kind, names: Sequence[str], parent: UUID = ROOT) -> set[str]:
        """Return those of the names that objects have already, as `create` would find them."""
        self._life.require_open()
        return self.configuration.taken(kind, names, parent)

    def page(self, kind: Kind, parent: UUID = ROOT, *, start_after: str | None = None, limit: int = 100) -> Page:
        """Return up to `limit` objects of a kind under a parent, starting after `start_after`."""
        self._life.require_open()
        _require_kind(kind)
        _require_id(parent)
        if not isinstance(limit, int) or not 0 < limit <= PAGE_MAX:
            raise InvalidArgumentError(f"limit of a page must be 1 to {PAGE_MAX}, not {limit!r:.80}")
        if self._deletions and not self._is_reached(parent):
            return Page([], None)
        prefix = catalog_keys.object_name_prefix(parent, kind)
        start, end = key_parts.prefix_range(prefix)
        if start_after is not None:
            check_name(start_after)
            start = catalog_keys.object_name_key(parent, kind, start_after) + b"\0"
        rows = list(islice(self._store.scan(Family.OBJECT_NAMES, start, end), limit + 1))
        objects = self._listed(parent, rows[:limit])
        next_after = catalog_keys.decode_object_name_key(rows[limit - 1][0])[2] if len(rows) > limit else None
        return Page(objects, next_after)

    def children(self, parent: UUID, kind: Kind | None = None) -> Iterator[CatalogObject]:
        """Yield all objects under a parent, read on demand. Concurrent changes may or may not be visible."""
        self._life.require_open()
        if kind is not None:
            _require_kind(kind)
        _require_id(parent)
        start, end = key_parts.prefix_range(catalog_keys.object_name_prefix(parent, kind))
        while rows := list(islice(self._store.scan(Family.OBJECT_NAMES, start, end), _CHILDREN_AT_ONCE)):
            yield from self._listed(parent, rows)
            start = rows[-1][0] + b"\0"

    def create(self, kind: Kind, name: str, parent: UUID = ROOT, attributes: Attributes | None = None) -> CatalogObject:
        """Create an object. Fails if the name is taken or the parent does not exist."""
        object_id = self.create_many([NewObject(kind, name, parent, attributes or {})])[0]
        return CatalogObject(object_id, kind, name, parent, dict(attributes or {}))

    def create_many(
        self, objects: Iterable[NewObject], *, also: Batch | None = None, durable: bool = True
    ) -> list[UUID]:
        """Create all objects in one batch, or none. Return their ids in the given order.

        `also` are rows of other planes for the same batch. Without `durable` the caller waits for the fsync.
        """
        with self.commits.change(durable=durable) as change:
            if also is not None:
                change.extend(also)
            wanted = list(objects)
            records = self._records(wanted)
            self.configuration.stage_create(change, records)
            self._discard_after(change, [record.id for record in records], change.claimed)
            self._notify_after(
                change,
                lambda: [
                    Event(Action.CREATED, record.id, each.kind, each.name, each.parent)
                    for each, record in zip(wanted, records, strict=True)
                ],
            )
        return [record.id for record in records]

    def update(self, object_id: UUID, attributes: Attributes, *, also: Batch | None = None) -> CatalogObject:
        """Replace the attributes of an object. `also` as for `create_many`."""
        with self.commits.change() as change:
            if also is not None:
                change.extend(also)
            old = self._required(object_id)
            record = _record(object_id, old.kind, old.name, attributes, {})
            self.configuration.stage_update(change, [record])
            self._discard_after(change, [object_id], ())
            self._notify_after(change, lambda: [Event(Action.UPDATED, object_id, old.kind, old.name, old.parent)])
        return CatalogObject(object_id, old.kind, old.name, old.parent, dict(attributes))

    def rename(self, object_id: UUID, name: str) -> CatalogObject:
        """Rename an object. Its children stay under it."""
        with self.commits.change() as change:
            old = self._required(object_id)
            record = _record(object_id, old.kind, name, old.attributes, {})
            self.configuration.stage_update(change, [record])
            old_key = catalog_keys.object_name_key(old.parent, old.kind, old.name)
            self._discard_after(change, [object_id], {old_key, *change.claimed})
            self._notify_after(
                change, lambda: [Event(Action.RENAMED, object_id, old.kind, name, old.parent, old_name=old.name)]
            )
        return CatalogObject(object_id, old.kind, name, old.parent, old.attributes)

    def delete(self, object_id: UUID) -> int:
        """Delete an object with its descendants. Return the number of objects deleted."""
        count = self.start_delete(object_id)
        while self.is_purging:
            count += self.purge()
        return count

    def start_delete(self, *object_ids: UUID, also: Batch | None = None, durable: bool = True) -> int:
        """Like `delete`, for several objects in one batch. Of a large subtree it deletes only the root and hides the
        rest for `purge`.

        For callers that must not block: `while catalog.is_purging: catalog.purge()`, with pauses. `also` and `durable`
        as for `create_many`. With `also`, the caller itself deletes what a topic has in other families.
        """
        with self.commits.change(durable=durable) as change:
            if also is not None:
                change.extend(also)
            gone: list[tuple[UUID, str, str, UUID]] = []
            name_keys: list[bytes] = []
            for object_id in object_ids:
                old = self._required(object_id)
                if also is None and old.kind is Kind.TOPIC:
                    self._deletions.stage_orphan(change, object_id)
                to_delete = self._deletions.stage_subtree(change, object_id, old.kind)
                self.configuration.stage_remove_rows(change, object_id)
                name_keys += [each.name_key for each in to_delete]
                name_keys.append(catalog_keys.object_name_key(old.parent, old.kind, old.name))
                gone += [(each.id, each.type, each.name, each.parent) for each in to_delete]
                gone.append((object_id, old.kind, old.name, old.parent))
            self._discard_after(change, [each[0] for each in gone], name_keys)
            self._notify_after(change, lambda: _deleted(gone))
        return len(gone)

    @property
    def is_purging(self) -> bool:
        """Whether `purge` has descendants of deleted objects to remove."""
        return bool(self._deletions)

    def purge(self) -> int:
        """Remove the next part of what `start_delete` has hidden. Return the number of objects removed."""
        self._life.require_open()
        try:
            # No fsync is necessary; see `deletion`.
            with self.commits.change(durable=False) as change:
                if not self._deletions:
                    return 0
                to_delete = self._deletions.stage_step(change)
                self._discard_after(change, [each.id for each in to_delete], [each.name_key for each in to_delete])
                gone = [(each.id, each.type, each.name, each.parent) for each in to_delete]
                self._notify_after(change, lambda: _deleted(gone))
        except BaseException:
            self._deletions.start_over()
            raise
        return len(to_delete)

    def check(self) -> LoadReport:
        """Check all rows of the catalog, including the name index."""
        unknown: list[Fault] = []

        def look(record: ConfiguredRecord) -> None:
            if record.type not in BY_LABEL:
                text = f"object {record.id} is of the unknown kind {record.type!r:.80}; it is kept and not shown"
                unknown.append(Fault(FaultKind.UNKNOWN_KIND, text, record.id))

        report = self.configuration.check(look)
        report.extend(unknown)
        return report

    def rebuild_names(self) -> None:
        """Rebuild the name index."""
        with self.commits.lock:
            self.configuration.rebuild_names()
            self._names.clear()

    def _initial(self, objects: Iterable[NewObject]) -> Iterator[ConfiguredRecord]:
        """Yield the records of the initial objects; evaluated only if the catalog is new."""
        yield from self._records(list(objects))

    def _records(self, objects: list[NewObject]) -> list[ConfiguredRecord]:
        ids = [each.id or UUID(bytes=made) for each, made in zip(objects, self._ids.many(len(objects)), strict=True)]
        for object_id in ids if self._deletions else ():
            if self._deletions.is_root(object_id):
                raise AlreadyExistsError(
                    f"object {object_id} is still being deleted with its descendants; purge first, or choose another id"
                )
        together = {object_id: each.kind for object_id, each in zip(ids, objects, strict=True)}
        records = []
        parents: dict[UUID, dict[str, UUID]] = {ROOT: {}}
        for object_id, each in zip(ids, objects, strict=True):
            kind = each.kind
            _require_kind(kind)
            links = parents.get(each.parent)
            if links is None:
                parent_kind = together.get(each.parent) or self._kind_of(each.parent)
                links = parents[each.parent] = {str(parent_kind): each.parent}
            _require_place(kind, each.name, links)
            records.append(_record(object_id, kind, each.name, each.attributes, links))
        return records

    def _kind_of(self, parent: UUID) -> Kind:
        return self._required(parent).kind

    def _required(self, object_id: UUID) -> CatalogObject:
        found = self.get(object_id)
        if found is None:
            raise NotFoundError(f"object {object_id} does not exist in the catalog")
        return found

    def _entry(self, object_id: UUID, parent: UUID | None = None) -> _Entry | None:
        cached = self._objects.get(object_id.bytes)
        if cached is not None:
            return cached[0]
        epoch = self._objects.epoch
        raw = self._store.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(object_id))
        entry = None
        if raw is not None:
            kind = BY_LABEL.get(decode_value(raw, object_id).type)
            if kind is not None:
                entry = _Entry(object_id, self._parent_of(object_id, kind) if parent is None else parent, raw)
        self._objects.put(object_id.bytes, entry, 0 if raw is None else len(raw), epoch)
        return entry

    def _parent_of(self, object_id: UUID, kind: Kind) -> UUID:
        for parent_kind in PARENTS[kind]:
            raw = self._store.get(
                Family.CONFIGURED_OBJECT_HIERARCHY, catalog_keys.hierarchy_key(object_id, parent_kind)
            )
            if raw is not None:
                return decode_parent(raw, object_id)
        return ROOT

    def _seen(self, entry: _Entry | None) -> CatalogObject | None:
        if entry is None or (self._deletions and not self._is_reached(entry.parent)):
            return None
        return _object(entry)

    def _is_reached(self, parent: UUID) -> bool:
        """Whether every ancestor exists. Needed only during a deletion."""
        while parent != ROOT:
            entry = self._entry(parent)
            if entry is None:
                return False
            parent = entry.parent
        return True

    def _listed(self, parent: UUID, rows: list[tuple[bytes, bytes]]) -> list[CatalogObject]:
        if self._deletions and not self._is_reached(parent):
            return []
        ids = [_indexed_id(raw) for _, raw in rows]
        values = self._store.get_many(Family.CONFIGURED_OBJECTS, [catalog_keys.configured_key(each) for each in ids])
        found = (_object(_Entry(each, parent, raw)) for each, raw in zip(ids, values, strict=True) if raw is not None)
        return [each for each in found if each is not None]

    def _discard_after(self, change: Change, ids: Iterable[UUID], name_keys: Iterable[bytes]) -> None:
        def discard() -> None:
            self._objects.discard(*(object_id.bytes for object_id in ids))
            self._names.discard(*name_keys)

        change.after.append(discard)

    def _notify_after(self, change: Change, events: Callable[[], Iterable[Event]]) -> None:
        def notify() -> None:
            for event in events() if self._listeners else ():
                for listener in tuple(self._listeners):
                    try:
                        listener(event)
                    except Exception:
                        # The change is written. A failing listener must not hide it from the others.
                        _log.exception("catalog: a listener failed on %s", event)

        change.after.append(notify)


def _record(
    object_id: UUID, kind: Kind, name: str, attributes: Attributes, parents: dict[str, UUID]
) -> ConfiguredRecord:
    check_name(name)
    if not isinstance(attributes, dict):
        raise InvalidArgumentError(f"the attributes of {kind} {name!r:.80} must be a dict")
    if NAME in attributes:
        raise InvalidArgumentError(f"{NAME!r} is not an attribute of {kind} {name!r:.80}; rename it instead")
    return ConfiguredRecord(object_id, kind.value, {NAME: name, **attributes}, parents)


def _object(entry: _Entry) -> CatalogObject | None:
    value = decode_value(entry.raw, entry.id)
    kind = BY_LABEL.get(value.type)
    if kind is None:
        return None
    name = value.attributes.pop(NAME, None)
    return CatalogObject(
        entry.id, kind, name if isinstance(name, str) else str(entry.id), entry.parent, value.attributes
    )


def _indexed_id(raw: bytes) -> UUID:
    if len(raw) != 16:
        raise CorruptionError(f"a row of the name index is damaged ({raw[:32].hex()}): rebuild the index")
    return UUID(bytes=raw)


def _require_kind(kind: object) -> None:
    if not isinstance(kind, Kind):
        raise InvalidArgumentError(f"{kind!r:.80} is not a Kind: {', '.join(Kind)}")


def _require_id(object_id: object) -> None:
    if not isinstance(object_id, UUID):
        raise InvalidArgumentError(f"an id must be a UUID, not {type(object_id).__name__}")


def _require_place(kind: Kind, name: str, links: dict[str, UUID]) -> None:
    for parent_kind in links:
        if parent_kind not in PARENTS[kind]:
            allowed = " or ".join(PARENTS[kind]) or "nothing"
            raise InvalidArgumentError(f"{kind} {name!r:.80} cannot have a {parent_kind} as its parent, only {allowed}")
    if not links and kind in NEVER_AT_TOP:
        raise InvalidArgumentError(f"{kind} {name!r:.80} needs a parent: a {' or a '.join(PARENTS[kind])}")


def _deleted(gone: list[tuple[UUID, str, str, UUID]]) -> Iterator[Event]:
    for object_id, type_, name, parent in gone:
        kind = BY_LABEL.get(type_)
        if kind is not None:
            yield Event(Action.DELETED, object_id, kind, name, parent)
