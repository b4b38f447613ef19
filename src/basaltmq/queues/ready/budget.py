"""How much memory queues may take for messages: each of them, and all of a plane together."""

from __future__ import annotations

from dataclasses import dataclass

from basaltmq.store.families import MIB


@dataclass(frozen=True, slots=True)
class PagingLimits:
    """How much of one queue is in memory."""

    resident_max: int = 8192
    """Messages: enough for the busiest consumer between two reads, small enough that thousands of queues fit."""
    resident_bytes_max: int = 4 * MIB
    """A queue shorter than this is served from memory."""
    read_ahead: int = 1023
    """Rows per scan: its own cost is spread thin, the loop is held for a few milliseconds, and a store that reads in
    chunks of 1, 2, 4 .. 256 rows reads none in vain."""
    read_ahead_bytes: int = MIB


class MemoryBudget:
    """One limit for the windows of all queues of a plane, with an account for each of them."""

    __slots__ = ("_parent", "limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int = 128 * MIB, parent: MemoryBudget | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._parent = parent

    def account(self) -> MemoryBudget:
        """A part of this budget that says how much of it one queue uses."""
        return MemoryBudget(self.limit_bytes, self)

    def charge(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        if self._parent is not None:
            self._parent.charge(size_bytes)

    def room_bytes(self) -> int:
        """What is left of the whole; negative when it is overdrawn."""
        return self.limit_bytes - self.used_bytes if self._parent is None else self._parent.room_bytes()
