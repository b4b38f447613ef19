"""Data types of the catalog's API: objects, objects to create, pages and change events."""

from __future__ import annotations

import enum
from uuid import UUID

import msgspec

from basaltmq.catalog.attributes import Attributes
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.record import ROOT


class CatalogObject(msgspec.Struct, frozen=True):
    """An object of the catalog. The attributes are a private copy."""

    id: UUID
    kind: Kind
    name: str
    parent: UUID
    """ROOT for objects at the top."""
    attributes: Attributes


class NewObject(msgspec.Struct, frozen=True):
    """An object to create. Without an id it gets a new one."""

    kind: Kind
    name: str
    parent: UUID = ROOT
    attributes: Attributes = {}
    id: UUID | None = None


class Page(msgspec.Struct, frozen=True):
    """Some objects of a list, and where the next page starts."""

    objects: list[CatalogObject]
    next_after: str | None
    """Pass this as `start_after`; None on the last page."""


class Action(enum.StrEnum):
    CREATED = "created"
    UPDATED = "updated"
    RENAMED = "renamed"
    DELETED = "deleted"


class Event(msgspec.Struct, frozen=True):
    """A change, reported after its write and in write order."""

    action: Action
    id: UUID
    kind: Kind
    name: str
    parent: UUID
    old_name: str | None = None
    """The previous name of a renamed object."""
