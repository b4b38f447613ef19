"""What the catalog hands out and takes in: an object, the wish for one, a page of them, the news of a change."""

from __future__ import annotations

import enum
from uuid import UUID

import msgspec

from basaltmq.catalog.attributes import Attributes
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.record import ROOT


class CatalogObject(msgspec.Struct, frozen=True):
    """An object of the catalog. Its attributes are the holder's own copy; changing them changes nothing else."""

    id: UUID
    kind: Kind
    name: str
    parent: UUID
    """ROOT for what stands at the top."""
    attributes: Attributes


class NewObject(msgspec.Struct, frozen=True):
    """An object to be created. Without an id it gets one."""

    kind: Kind
    name: str
    parent: UUID = ROOT
    attributes: Attributes = {}
    id: UUID | None = None


class Page(msgspec.Struct, frozen=True):
    """Some objects of a list, and where the next page starts."""

    objects: list[CatalogObject]
    next_after: str | None
    """Hand this in as `start_after`; None if this was the last page."""


class Action(enum.StrEnum):
    CREATED = "created"
    UPDATED = "updated"
    RENAMED = "renamed"
    DELETED = "deleted"


class Event(msgspec.Struct, frozen=True):
    """Something changed; told once it is written, in the order of the writes."""

    action: Action
    id: UUID
    kind: Kind
    name: str
    parent: UUID
    old_name: str | None = None
    """Of what was renamed."""
