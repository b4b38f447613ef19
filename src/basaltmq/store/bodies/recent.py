"""A cache of recently written bodies. Consumers without a backlog get them without a read and a check of the file."""

from __future__ import annotations

from typing import Final

RECENT_BYTES_MAX: Final = 16 << 20
"""Four leases of large messages (broker/consumers/queue.py)."""


class RecentBodies:
    """The newest bodies of a store. Changed with the store's lock held, read without it."""

    __slots__ = ("_bodies", "_size_bytes")

    def __init__(self) -> None:
        self._bodies: dict[bytes, bytes] = {}
        self._size_bytes = 0

    def get(self, key: bytes) -> bytes | None:
        return self._bodies.get(key)

    def add(self, key: bytes, body: bytes) -> None:
        """Add a written body, and evict the oldest ones."""
        self.drop(key)
        self._bodies[key] = body
        self._size_bytes += len(body)
        while self._size_bytes > RECENT_BYTES_MAX:
            self.drop(next(iter(self._bodies)))

    def drop(self, key: bytes) -> None:
        self._size_bytes -= len(self._bodies.pop(key, b""))
