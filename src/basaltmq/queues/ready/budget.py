"""Memory limits for messages, per queue and per plane."""

from __future__ import annotations

from dataclasses import dataclass

from basaltmq.store.families import MIB


@dataclass(frozen=True, slots=True)
class PagingLimits:
    """How much of one queue is in memory."""

    resident_max: int = 8192
    """Messages: enough for the busiest consumer between two reads, few enough that thousands of queues fit."""
    resident_bytes_max: int = 4 * MIB
    """A smaller queue is served from memory."""
    read_ahead: int = 1023
    """Rows per scan. Amortizes the cost of a scan and blocks the event loop for a few milliseconds. A store that reads
    in chunks of 1, 2, 4 .. 256 rows reads no row too many."""
    read_ahead_bytes: int = MIB


class MemoryBudget:
    """One memory limit for all queues of a plane, with an account per queue."""

    __slots__ = ("_parent", "limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int = 128 * MIB, parent: MemoryBudget | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._parent = parent

    def account(self) -> MemoryBudget:
        """Return a sub-account that counts what one queue uses."""
        return MemoryBudget(self.limit_bytes, self)

    def charge(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        if self._parent is not None:
            self._parent.charge(size_bytes)

    def room_bytes(self) -> int:
        """Bytes left of the whole budget; negative when overdrawn."""
        return self.limit_bytes - self.used_bytes if self._parent is None else self._parent.room_bytes()
