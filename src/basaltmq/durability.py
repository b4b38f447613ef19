"""Durability levels: what must happen before a write is confirmed (promise P1).

Queues and topics use the same levels. A level is a minimum; an engine may exceed it: the RocksDB engine writes
everything to the WAL, so its `memory` is `written`. The level is set per queue or topic and may be set per write.
In a queue, `memory` makes messages transient: they are not logged. Delayed ones wait on disk.
"""

from __future__ import annotations

import enum

from basaltmq.errors import InvalidArgumentError


class Durability(enum.StrEnum):
    """Durability levels, weakest first."""

    MEMORY = "memory"
    """In process memory. Lost when the process ends."""
    WRITTEN = "written"
    """After write(2). Survives a process crash, but not a machine crash."""
    SYNCED = "synced"
    """After fdatasync or a WAL sync. Survives a power loss."""


def parse_durability(text: str) -> Durability:
    try:
        return Durability(text)
    except ValueError:
        known = ", ".join(Durability)
        raise InvalidArgumentError(f"{text!r:.80} is not a durability level; use one of {known}") from None
