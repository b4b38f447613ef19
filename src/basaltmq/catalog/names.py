"""The name index: maps (parent, type, name) to an object's id. Derived from objects and parent links.

    object_names    | parent uuid | lp(type) | lp(name) |  ->  | child uuid (16) |

Every object has one row per parent, or one under ROOT if it has none. An object without a usable `name` attribute is
indexed under the text of its id. A prefix scan of a parent therefore finds all its children. Names are unique per
parent and type. Version 1 did not enforce that. If stored objects have the same name, the one with the lowest id owns
the name. The others are indexed under their ids.

Check and rebuild compare the index with the objects in two passes with bounded memory: first objects without their row,
then rows without their object. A rebuild writes only differences, so lookups continue to work, and an interrupted
rebuild leaves a better index than before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Final, TypeVar
from uuid import UUID

import msgspec

from basaltmq.catalog.faults import Fault, FaultKind
from basaltmq.catalog.record import NAME, NAME_BYTES_MAX, ROOT, StoredValue, decode_value
from basaltmq.catalog.walk import Walked, parents_of, walk
from basaltmq.errors import CorruptionError
from basaltmq.store.api import Reader, Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys

NAMES_END: Final = b"\xff" * 19
"""Above every key of the index: 16 bytes of id, 2 of length, then UTF-8, which never contains 0xff."""

_ROWS_AT_ONCE: Final = 1000
"""Rows compared together: one multi-get, and a batch of a few hundred KiB."""

_PARENT_TYPES_KEPT: Final = 4096
"""Size of the cache of parent types. Most objects share few parents."""

_T = TypeVar("_T")


def index_name(object_id: UUID, attributes: dict[str, object]) -> str:
    """Return the name under which an object is indexed."""
    name = attributes.get(NAME)
    if isinstance(name, str) and (len(name) * 4 <= NAME_BYTES_MAX or len(name.encode()) <= NAME_BYTES_MAX):
        return name
    return str(object_id)


def name_keys(object_id: UUID, kind: str, name: str, parents: dict[str, UUID]) -> list[bytes]:
    """Return the keys that an object should have in the index."""
    return [catalog_keys.object_name_key(parent, kind, name) for parent in (parents.values() or (ROOT,))]


def rows_held(reader: Reader, object_id: UUID, kind: str, name: str, parents: dict[str, UUID]) -> list[bytes]:
    """Return the keys that an object has: under its name, or under its id if another object owns the name."""
    held = []
    for parent in parents.values() or (ROOT,):
        for listed in (name, str(object_id)):
            key = catalog_keys.object_name_key(parent, kind, listed)
            if reader.get(Family.OBJECT_NAMES, key) == object_id.bytes:
                held.append(key)
                break
    return held


class Difference(msgspec.Struct, frozen=True):
    """A correction of the index: put the row with this id, or delete the row if the id is None."""

    key: bytes
    should_be: bytes | None
    fault: Fault


def rebuild(store: Store) -> Iterator[Batch]:
    """Yield batches that correct the index. The caller writes each before it requests the one after the next."""
    index = _Comparison(store)
    differences = index.differences()
    while chunk := list(islice(differences, _ROWS_AT_ONCE)):
        batch = Batch()
        for difference in chunk:
            if difference.should_be is None:
                batch.delete(Family.OBJECT_NAMES, difference.key)
            elif difference.fault.kind is not FaultKind.NAME_DUPLICATE:
                batch.put(Family.OBJECT_NAMES, difference.key, difference.should_be)
        if len(batch):
            yield batch
            index.forget_old_claims()


def check(reader: Reader) -> Iterator[Fault]:
    """Yield the faults of the index."""
    for difference in _Comparison(reader).differences():
        yield difference.fault


class _Comparison:
    """Compares the index with the objects."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        # Rows of differences that may not be written yet, of this batch and the one before.
        self._claims: dict[bytes, bytes] = {}
        self._older_claims: dict[bytes, bytes] = {}
        self._type_of = lru_cache(_PARENT_TYPES_KEPT)(self._read_type)

    def forget_old_claims(self) -> None:
        self._older_claims, self._claims = self._claims, {}

    def differences(self) -> Iterator[Difference]:
        for chunk in _chunks(walk(self._reader)):
            yield from self._missing(chunk)
        for rows in _chunks(self._reader.scan(Family.OBJECT_NAMES)):
            yield from self._stale(rows)

    def _missing(self, chunk: list[Walked]) -> Iterator[Difference]:
        wanted: list[tuple[bytes, UUID, StoredValue, UUID]] = []
        for walked in chunk:
            if walked.id is None or walked.value is None or len(walked.value.type.encode()) > NAME_BYTES_MAX:
                continue
            name = index_name(walked.id, walked.value.attributes)
            for parent in walked.parents.values() or (ROOT,):
                key = catalog_keys.object_name_key(parent, walked.value.type, name)
                wanted.append((key, walked.id, walked.value, parent))
        holders = self._reader.get_many(Family.OBJECT_NAMES, [row[0] for row in wanted])
        for (key, object_id, value, parent), stored in zip(wanted, holders, strict=True):
            if stored == object_id.bytes and key not in self._claims and key not in self._older_claims:
                continue
            # Rows read in bulk may be older than batches written since.
            holder = self._holder(key)
            if holder == object_id.bytes:
                continue
            if holder is not None and holder < object_id.bytes and self._is_right(key, holder):
                yield from self._duplicate(key, object_id, value, parent)
            else:
                text = f"{value.type} {object_id} is missing in the name index"
                yield self._claim(key, object_id, Fault(FaultKind.NAME_MISSING, text, object_id))

    def _duplicate(self, key: bytes, object_id: UUID, value: StoredValue, parent: UUID) -> Iterator[Difference]:
        """Report a duplicate name, and check that the object with the higher id is indexed under its id."""
        text = f"{value.type} {object_id} has the same name as another one of parent {parent}; rename or delete it"
        yield Difference(key, object_id.bytes, Fault(FaultKind.NAME_DUPLICATE, text, object_id))
        by_id = catalog_keys.object_name_key(parent, value.type, str(object_id))
        if self._holder(by_id) != object_id.bytes:
            text = f"{value.type} {object_id} has a duplicate name and is not indexed under its id"
            yield self._claim(by_id, object_id, Fault(FaultKind.NAME_MISSING, text, object_id))

    def _holder(self, key: bytes) -> bytes | None:
        """Return the id in a row after the differences found so far are written."""
        return self._claims.get(key) or self._older_claims.get(key) or self._reader.get(Family.OBJECT_NAMES, key)

    def _claim(self, key: bytes, object_id: UUID, fault: Fault) -> Difference:
        self._claims[key] = object_id.bytes
        return Difference(key, object_id.bytes, fault)

    def _stale(self, rows: list[tuple[bytes, bytes]]) -> Iterator[Difference]:
        for key, holder in rows:
            if not self._is_right(key, holder) and self._holder(key) == holder:
                text = f"the name row {key[:64].hex()} refers to {holder[:16].hex()}, which does not have that name"
                object_id = UUID(bytes=holder) if len(holder) == 16 else None
                yield Difference(key, None, Fault(FaultKind.NAME_STALE, text, object_id))

    def _is_right(self, key: bytes, holder: bytes) -> bool:
        """Whether an object exists that should have this row."""
        try:
            parent, kind, name = catalog_keys.decode_object_name_key(key)
            object_id = UUID(bytes=holder)
            raw = self._reader.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(object_id))
            if raw is None:
                return False
            value = decode_value(raw, object_id)
            if value.type != kind or not self._is_parent(parent, object_id):
                return False
        except (CorruptionError, ValueError):
            return False
        wanted = index_name(object_id, value.attributes)
        if name == wanted:
            return True
        if name != str(object_id):
            return False
        # A named object is indexed under its id only while another object owns the name.
        owner = self._holder(catalog_keys.object_name_key(parent, kind, wanted))
        return owner is not None and owner != holder

    def _is_parent(self, parent: UUID, child: UUID) -> bool:
        parent_type = None if parent == ROOT else self._type_of(parent)
        if parent_type is None:
            found = parents_of(self._reader, child)
            return parent in found.values() or (parent == ROOT and not found)
        link = self._reader.get(Family.CONFIGURED_OBJECT_HIERARCHY, catalog_keys.hierarchy_key(child, parent_type))
        return link == str(parent).encode()

    def _read_type(self, object_id: UUID) -> str | None:
        raw = self._reader.get(Family.CONFIGURED_OBJECTS, catalog_keys.configured_key(object_id))
        try:
            return None if raw is None else decode_value(raw, object_id).type
        except CorruptionError:
            return None


def _chunks(rows: Iterator[_T]) -> Iterator[list[_T]]:
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        yield chunk
