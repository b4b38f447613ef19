"""Scans all configured objects with their parent links, in id order and bounded memory.

Objects and links are sorted by the same text (the child's id), so two parallel scans pair every object with its links.
A row that cannot be decoded becomes a fault of its object, and the scan continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from uuid import UUID

import msgspec

from basaltmq.catalog.faults import Fault, FaultKind
from basaltmq.catalog.record import StoredValue, decode_parent, decode_value
from basaltmq.errors import CorruptionError
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.keys import parts as key_parts

_ID_TEXT_BYTES: Final = 36


class Walked(msgspec.Struct):
    """One object with its links. `value` is None if the object row is missing or damaged."""

    id: UUID | None
    value: StoredValue | None
    parents: dict[str, UUID]
    faults: list[Fault]


def walk(reader: Reader) -> Iterator[Walked]:
    """Yield every object in id order. The reader must be a snapshot, or writers must be excluded."""
    links = reader.scan(Family.CONFIGURED_OBJECT_HIERARCHY)
    link = next(links, None)
    for key, raw in reader.scan(Family.CONFIGURED_OBJECTS):
        while link is not None and link[0][:_ID_TEXT_BYTES] < key:
            yield _orphan(*link)
            link = next(links, None)
        walked = _object(key, raw)
        while link is not None and link[0][:_ID_TEXT_BYTES] == key:
            _add_link(walked, *link)
            link = next(links, None)
        yield walked
    while link is not None:
        yield _orphan(*link)
        link = next(links, None)


def parents_of(reader: Reader, object_id: UUID) -> dict[str, UUID]:
    """Return the parent links of one object."""
    start, end = key_parts.prefix_range(catalog_keys.hierarchy_prefix(object_id))
    found = {}
    for key, raw in reader.scan(Family.CONFIGURED_OBJECT_HIERARCHY, start, end):
        _, parent_type = catalog_keys.decode_hierarchy_key(key)
        found[parent_type] = decode_parent(raw, object_id)
    return found


def _object(key: bytes, raw: bytes) -> Walked:
    walked = Walked(None, None, {}, [])
    try:
        walked.id = catalog_keys.decode_configured_key(key)
        walked.value = decode_value(raw, walked.id)
    except CorruptionError as error:
        walked.faults.append(Fault(FaultKind.DAMAGED_ROW, str(error), walked.id))
    return walked


def _add_link(walked: Walked, key: bytes, raw: bytes) -> None:
    try:
        child, parent_type = catalog_keys.decode_hierarchy_key(key)
        walked.parents[parent_type] = decode_parent(raw, child)
    except CorruptionError as error:
        walked.faults.append(Fault(FaultKind.DAMAGED_ROW, str(error), walked.id))


def _orphan(key: bytes, raw: bytes) -> Walked:
    try:
        child, parent_type = catalog_keys.decode_hierarchy_key(key)
        parent = decode_parent(raw, child)
    except CorruptionError as error:
        return Walked(None, None, {}, [Fault(FaultKind.DAMAGED_ROW, str(error))])
    text = f"object {child} does not exist but has the {parent_type} parent {parent}"
    return Walked(child, None, {}, [Fault(FaultKind.ORPHAN_LINK, text, child)])
