"""How far a write must have come before it counts (promise P1).

A level is the least that is promised: an engine may give more (the RocksDB engine logs every write, so its `memory` is
`written`), never less. It is set per topic and may be given per write.
"""

from __future__ import annotations

import enum

from basaltmq.errors import InvalidArgumentError


class Durability(enum.StrEnum):
    """The levels, weakest first."""

    MEMORY = "memory"
    """In this process. Lost when it ends."""
    WRITTEN = "written"
    """After write(2): survives a crash of the process, not one of the machine."""
    SYNCED = "synced"
    """After fdatasync or a WAL sync: survives a power loss."""


def parse_durability(text: str) -> Durability:
    try:
        return Durability(text)
    except ValueError:
        known = ", ".join(level.value for level in Durability)
        raise InvalidArgumentError(f"{text!r} is not a durability level; one of {known}") from None
