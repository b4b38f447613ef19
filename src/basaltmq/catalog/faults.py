"""What is wrong with rows of the catalog, said one by one. Nothing here is repaired or dropped on the quiet."""

from __future__ import annotations

import enum
from typing import Final
from uuid import UUID

import msgspec

FAULTS_KEPT_MAX: Final = 1000
"""Faults a report keeps in full; past it they are counted, so that a ruined store cannot fill memory with texts."""


class FaultKind(enum.StrEnum):
    DAMAGED_ROW = "damaged_row"
    """A key or value that cannot be decoded."""
    DANGLING_PARENT = "dangling_parent"
    """A parent link to an object that does not exist."""
    ORPHAN_LINK = "orphan_link"
    """A parent link of an object that does not exist."""
    NAME_MISSING = "name_missing"
    """The name index does not lead to the object."""
    NAME_STALE = "name_stale"
    """The name index leads to an object that does not exist or is not called that."""
    NAME_DUPLICATE = "name_duplicate"
    """Two objects of one kind and parent have one name; the one with the lower id is found by it."""
    UNKNOWN_KIND = "unknown_kind"
    """An object of a kind the catalog does not know; it is kept and not shown."""


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    kind: FaultKind
    text: str
    object_id: UUID | None = None


class LoadReport(msgspec.Struct):
    """What a walk over a store's rows met."""

    visited: int = 0
    fault_count: int = 0
    faults: list[Fault] = msgspec.field(default_factory=list)

    def add(self, fault: Fault) -> None:
        self.fault_count += 1
        if len(self.faults) < FAULTS_KEPT_MAX:
            self.faults.append(fault)

    def extend(self, faults: list[Fault]) -> None:
        for fault in faults:
            self.add(fault)
