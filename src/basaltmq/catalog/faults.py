"""Faults of catalog rows. They are reported, and never repaired or dropped silently."""

from __future__ import annotations

import enum
from typing import Final
from uuid import UUID

import msgspec

FAULTS_KEPT_MAX: Final = 1000
"""Faults that a report keeps in full. Further ones are only counted, so that a badly damaged store cannot fill
memory."""


class FaultKind(enum.StrEnum):
    DAMAGED_ROW = "damaged_row"
    """A key or value that cannot be decoded."""
    DANGLING_PARENT = "dangling_parent"
    """A parent link to an object that does not exist."""
    ORPHAN_LINK = "orphan_link"
    """A parent link of an object that does not exist."""
    NAME_MISSING = "name_missing"
    """The name index has no row for the object."""
    NAME_STALE = "name_stale"
    """The name index refers to an object that does not exist or has another name."""
    NAME_DUPLICATE = "name_duplicate"
    """Two objects of one kind and parent have the same name. Lookups find the one with the lower id."""
    UNKNOWN_KIND = "unknown_kind"
    """An object of an unknown kind. It is kept and not shown."""


class Fault(msgspec.Struct, frozen=True):
    """One fault."""

    kind: FaultKind
    text: str
    object_id: UUID | None = None


class LoadReport(msgspec.Struct):
    """The result of a scan over a store's rows."""

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
