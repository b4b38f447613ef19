"""The configuration store (SPEC A2): records with attributes and parents, one row each.

The row formats are in `record` and `names`. All rows of one change are one batch; a refused change writes nothing.
Nothing is cached: `reload` and `records` scan. Invariants after every call:

- a record's parents existed with the stated types when it was created, and never change, so there are no cycles;
- names are unique per parent and type;
- a record with children cannot be removed without them.

`reload` and `check` report rows that violate this (written by version 1, or damaged), and never drop them.

Version 1 had no name index and no version row; the upgrade builds the index.

The `stage_*` methods check and fill a change that the caller commits, under the lock of the same `Commits`. The catalog
uses them to add its own rows. The methods without `stage_` are complete changes, durable on return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Final
from uuid import UUID

from basaltmq.catalog import names
from basaltmq.catalog.commits import Change, Commits
from basaltmq.catalog.faults import Fault, FaultKind, LoadReport
from basaltmq.catalog.lifecycle import Lifecycle
from basaltmq.catalog.names import NAMES_END, index_name, name_keys, rows_held
from basaltmq.catalog.record import ConfiguredRecord, StoredValue, decode_value, encode_parent, encode_value
from basaltmq.catalog.walk import Walked, parents_of, walk
from basaltmq.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
)
from basaltmq.ids import ID_BYTES
from basaltmq.store.api import Reader, Snapshot, Store
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.versions import bring_up_to_date, put_version, read_version

VERSION_NAME: Final = "configuration_version"
VERSION: Final = 2

RECORDS_PER_CHANGE_MAX: Final = 10_000
"""Records per call: a batch of a few MiB if they are small, and 0.1 s under the lock."""

CHANGE_BYTES_MAX: Final = 64 << 20
"""Bytes of all records of one call. They are in memory twice during the write."""

_FAMILIES: Final = (Family.CONFIGURED_OBJECTS, Family.CONFIGURED_OBJECT_HIERARCHY, Family.OBJECT_NAMES)
_UPGRADES: Final = {1: names.rebuild}

RecordHandler = Callable[[ConfiguredRecord], bool | None]
"""Called with every record. Returning False stops the scan."""


class ConfigurationStore:
    """Configured records over a store."""

    def __init__(self, store: Store, commits: Commits | None = None) -> None:
        self.commits = commits or Commits(store)
        self._store = store
        self._life = Lifecycle("configuration store")

    def open(self, initial_records: Iterable[ConfiguredRecord] = ()) -> bool:
        """Open and upgrade older rows. Return True if the store is new; it then contains the initial records."""
        self._life.open()
        try:
            if read_version(self._store, VERSION_NAME) is None and self._is_empty():
                with self.commits.change() as change:
                    self.stage_create(change, list(initial_records))
                    put_version(change, VERSION_NAME, VERSION)
                return True
            with self.commits.lock:
                bring_up_to_date(self._store, VERSION_NAME, VERSION, _UPGRADES, _FAMILIES)
            return False
        except BaseException:
            self._life.close()
            raise

    def close(self) -> None:
        """Close. Closing twice is allowed. The underlying store stays open."""
        self._life.close()

    def on_delete(self) -> None:
        """Remove all rows and close. The next open finds a new store."""
        with self.commits.change() as change:
            change.delete_range(Family.CONFIGURED_OBJECTS, b"", b"\xff")
            change.delete_range(Family.CONFIGURED_OBJECT_HIERARCHY, b"", b"\xff")
            change.delete_range(Family.OBJECT_NAMES, b"", NAMES_END)
            change.delete_range(Family.DELETED_OBJECTS, b"", NAMES_END)
            change.delete(Family.VERSION, VERSION_NAME.encode())
        self._life.close()

    def get(self, object_id: UUID) -> ConfiguredRecord | None:
        self._life.require_open()
        value = self._value(object_id)
        if value is None:
            return None
        return ConfiguredRecord(object_id, value.type, value.attributes, parents_of(self._store, object_id))

    def records(self) -> Iterator[ConfiguredRecord]:
        """Yield every sound record of a snapshot, in id order."""
        self._life.require_open()
        with self._snapshot() as reader:
            for walked in walk(reader):
                record = _record(walked)
                if record is not None:
                    yield record

    def reload(self, handler: RecordHandler) -> LoadReport:
        """Call `handler` with every sound record. The report lists damaged rows and dangling parents.

        A record whose parent is missing is passed like the others, with the parent it names.
        """
        self._life.require_open()
        report = LoadReport()
        with self._snapshot() as reader:
            exists = lru_cache(4096)(lambda parent: _exists(reader, parent))
            for walked in walk(reader):
                report.extend(walked.faults)
                report.extend(_dangling(walked, exists))
                record = _record(walked)
                if record is not None:
                    report.visited += 1
                    if handler(record) is False:
                        break
        return report

    def check(self, handler: RecordHandler = lambda record: None) -> LoadReport:
        """Report damaged rows, dangling parents, orphan links and faults of the name index."""
        report = self.reload(handler)
        with self._snapshot() as reader:
            for fault in names.check(reader):
                report.add(fault)
        return report

    def rebuild_names(self) -> None:
        """Rebuild the name index from the objects. Lookups continue meanwhile; changes wait."""
        self._life.require_open()
        with self.commits.lock:
            for batch in names.rebuild(self._store):
                self._store.write(batch)
            self._store.sync()

    def create(self, *records: ConfiguredRecord) -> None:
        """Create all records, or none if one exists, a parent is missing or a name is taken."""
        with self.commits.change() as change:
            self.stage_create(change, records)

    def update(self, create_if_necessary: bool, *records: ConfiguredRecord) -> None:
        """Replace the attributes of each record. Types and parents stay; parents may be omitted."""
        with self.commits.change() as change:
            _require_distinct(records)
            present = self._store.get_many(Family.CONFIGURED_OBJECTS, [_key(record) for record in records])
            missing = [record for record, raw in zip(records, present, strict=True) if raw is None]
            if missing and not create_if_necessary:
                raise NotFoundError(f"{missing[0].type} {missing[0].id} does not exist; create it first")
            self.stage_update(change, [record for record, raw in zip(records, present, strict=True) if raw is not None])
            self.stage_create(change, missing)

    def remove(self, *object_ids: UUID) -> list[UUID]:
        """Remove records. Return the ids of those that existed."""
        with self.commits.change() as change:
            return self.stage_remove(change, object_ids)

    def stage_create(self, change: Change, records: Iterable[ConfiguredRecord]) -> None:
        self._life.require_open()
        records = list(records)
        _require_distinct(records)
        values = _encode_all(records)
        object_keys = [_key(record) for record in records]
        for record, present in zip(records, self._store.get_many(Family.CONFIGURED_OBJECTS, object_keys), strict=True):
            if present is not None:
                raise AlreadyExistsError(f"{record.type} {record.id} exists; update it, or choose another id")
        self._require_parents(records)
        self._claim_names(change, [(r, index_name(r.id, r.attributes), r.parents) for r in records])
        for record, key, value in zip(records, object_keys, values, strict=True):
            change.put(Family.CONFIGURED_OBJECTS, key, value)
            for parent_type, parent in record.parents.items():
                link = catalog_keys.hierarchy_key(record.id, parent_type)
                change.put(Family.CONFIGURED_OBJECT_HIERARCHY, link, encode_parent(parent))

    def stage_update(self, change: Change, records: Iterable[ConfiguredRecord]) -> None:
        self._life.require_open()
        for record in records:
            raw = encode_value(record)
            old = self._value(record.id)
            if old is None:
                raise NotFoundError(f"{record.type} {record.id} does not exist; create it first")
            if old.type != record.type:
                raise InvalidArgumentError(f"object {record.id} is a {old.type} and cannot become a {record.type}")
            self._require_same_parents(record)
            old_name, name = index_name(record.id, old.attributes), index_name(record.id, record.attributes)
            if name != old_name:
                parents = parents_of(self._store, record.id)
                for key in rows_held(self._store, record.id, record.type, old_name, parents):
                    change.delete(Family.OBJECT_NAMES, key)
                self._claim_names(change, [(record, name, parents)])
            change.put(Family.CONFIGURED_OBJECTS, _key(record), raw)

    def stage_remove(self, change: Change, object_ids: Iterable[UUID]) -> list[UUID]:
        self._life.require_open()
        going = dict.fromkeys(object_ids)
        removed = []
        for object_id in going:
            if not isinstance(object_id, UUID):
                raise InvalidArgumentError(f"an id must be a UUID, not {type(object_id).__name__}")
            value = self._value(object_id)
            if value is None:
                continue
            start, end = key_parts.prefix_range(catalog_keys.object_name_prefix(object_id))
            for key, child in self._store.scan(Family.OBJECT_NAMES, start, end):
                if UUID(bytes=child) not in going:
                    _, kind, name = catalog_keys.decode_object_name_key(key)
                    raise InvalidArgumentError(
                        f"{value.type} {object_id} still has the {kind} {name!r:.80}; remove its children with it"
                    )
            self.stage_remove_rows(change, object_id)
            removed.append(object_id)
        return removed

    def stage_remove_rows(self, change: Change, object_id: UUID) -> None:
        """Delete the rows of one record, even if it has children."""
        value = self._value(object_id)
        assert value is not None, f"object {object_id} cannot be removed because it does not exist"
        parents = parents_of(self._store, object_id)
        change.delete(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(object_id))
        for parent_type in parents:
            change.delete(Family.CONFIGURED_OBJECT_HIERARCHY, catalog_keys.hierarchy_key(object_id, parent_type))
        name = index_name(object_id, value.attributes)
        for key in rows_held(self._store, object_id, value.type, name, parents):
            change.delete(Family.OBJECT_NAMES, key)

    def taken(self, kind: str, names: Sequence[str], parent: UUID) -> set[str]:
        """Return those of the names that records of this type under this parent have."""
        keys = [catalog_keys.object_name_key(parent, kind, name) for name in names]
        holders = self._store.get_many(Family.OBJECT_NAMES, keys)
        return {
            name
            for name, holder in zip(names, holders, strict=True)
            if holder is not None and len(holder) == ID_BYTES and _exists(self._store, UUID(bytes=holder))
        }

    def _claim_names(self, change: Change, wanted: list[tuple[ConfiguredRecord, str, dict[str, UUID]]]) -> None:
        """Put the name rows, or raise an error for a taken name."""
        rows = [
            (key, record)
            for record, name, parents in wanted
            for key in name_keys(record.id, record.type, name, parents)
        ]
        holders = self._store.get_many(Family.OBJECT_NAMES, [key for key, _ in rows])
        for (key, record), holder in zip(rows, holders, strict=True):
            if key in change.claimed or (holder is not None and self._is_held(holder, record)):
                _, kind, name = catalog_keys.decode_object_name_key(key)
                raise AlreadyExistsError(f"a {kind} named {name!r:.200} exists; choose another name")
            change.claimed.add(key)
            change.put(Family.OBJECT_NAMES, key, record.id.bytes)

    def _is_held(self, holder: bytes, record: ConfiguredRecord) -> bool:
        """Whether another object has the name. A row of a missing object does not block it."""
        if holder == record.id.bytes or len(holder) != ID_BYTES:
            return False
        return _exists(self._store, UUID(bytes=holder))

    def _require_parents(self, records: list[ConfiguredRecord]) -> None:
        together = {record.id: record for record in records}
        types: dict[UUID, str] = {}
        graph: dict[UUID, list[UUID]] = {}
        for record in records:
            for parent_type, parent in record.parents.items():
                if parent in together:
                    types[parent] = together[parent].type
                    graph.setdefault(record.id, []).append(parent)
                elif parent not in types:
                    value = self._value(parent)
                    if value is None:
                        raise NotFoundError(
                            f"the {parent_type} parent {parent} of {record.type} {record.id} does not exist; "
                            "create it first, or in the same call"
                        )
                    types[parent] = value.type
                if types[parent] != parent_type:
                    raise InvalidArgumentError(f"the parent {parent} is a {types[parent]}, not a {parent_type}")
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            raise InvalidArgumentError(f"the records are parents of each other: {error.args[1]}") from None

    def _require_same_parents(self, record: ConfiguredRecord) -> None:
        for parent_type, parent in record.parents.items():
            link = self._store.get(
                Family.CONFIGURED_OBJECT_HIERARCHY, catalog_keys.hierarchy_key(record.id, parent_type)
            )
            if link != encode_parent(parent):
                raise InvalidArgumentError(
                    f"{record.type} {record.id} cannot change its parents; remove it and create it under {parent}"
                )

    def _value(self, object_id: UUID) -> StoredValue | None:
        raw = self._store.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(object_id))
        return None if raw is None else decode_value(raw, object_id)

    def _is_empty(self) -> bool:
        return not any(next(self._store.scan(family), None) for family in _FAMILIES)

    def _snapshot(self) -> Snapshot:
        return self._store.snapshot(*_FAMILIES)


def _key(record: ConfiguredRecord) -> bytes:
    return catalog_keys.configured_key(record.id)


def _exists(reader: Reader, object_id: UUID) -> bool:
    return reader.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(object_id)) is not None


def _record(walked: Walked) -> ConfiguredRecord | None:
    if walked.id is None or walked.value is None:
        return None
    return ConfiguredRecord(walked.id, walked.value.type, walked.value.attributes, walked.parents)


def _dangling(walked: Walked, exists: Callable[[UUID], bool]) -> list[Fault]:
    return [
        Fault(
            FaultKind.DANGLING_PARENT,
            f"object {walked.id} has the {parent_type} parent {parent}, which does not exist",
            walked.id,
        )
        for parent_type, parent in walked.parents.items()
        if not exists(parent)
    ]


def _encode_all(records: list[ConfiguredRecord]) -> list[bytes]:
    values = []
    size_bytes = 0
    for record in records:
        values.append(encode_value(record))
        size_bytes += len(values[-1])
        if size_bytes > CHANGE_BYTES_MAX:
            raise LimitExceededError(f"the records of one call exceed {CHANGE_BYTES_MAX} bytes; use several calls")
    return values


def _require_distinct(records: Iterable[ConfiguredRecord]) -> None:
    seen: set[UUID] = set()
    for record in records:
        if not isinstance(record, ConfiguredRecord) or not isinstance(record.id, UUID):
            raise InvalidArgumentError("records must be ConfiguredRecord with a UUID as id")
        if record.id in seen:
            raise InvalidArgumentError(f"{record.type} {record.id} occurs twice in one call")
        seen.add(record.id)
    if len(seen) > RECORDS_PER_CHANGE_MAX:
        raise LimitExceededError(
            f"{len(seen)} records in one call exceed the limit of {RECORDS_PER_CHANGE_MAX}; use several calls"
        )
