"""Limits how many bytes one lease call delivers.

Separate bodies are read when they are delivered: 1,000 bodies of 1 MiB would all be in memory at once. So a call
delivers the first message, and further messages while they fit into a number of bytes. The default is
`LEASE_BYTES_MAX`.
"""

from __future__ import annotations

from typing import Final

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.entries.backing import BackingQueue, Entry

LEASE_BYTES_MAX: Final = 64 << 20
"""Bytes of bodies per lease: the size of the largest message, so that many messages take no more memory than one."""


def lease_bytes(requested: int | None) -> int:
    """Return the byte limit of a call."""
    if requested is None:
        return LEASE_BYTES_MAX
    if type(requested) is not int or requested < 0:
        raise InvalidArgumentError(f"the byte limit of a lease must be 0 or more, got {requested!r:.80}")
    return min(requested, LEASE_BYTES_MAX)


def fit(backing: BackingQueue, fetched: list[Entry], room_bytes: int, *, is_first: bool) -> tuple[list[Entry], int]:
    """Return the fetched messages that fit, and the bytes left: 0 if some did not fit.

    The others go back to their places. With `is_first`, the first message fits whatever its size.
    """
    all_bytes = sum([entry.size_bytes for entry in fetched])
    if all_bytes < room_bytes:
        return fetched, room_bytes - all_bytes
    for number, entry in enumerate(fetched):
        if entry.size_bytes > room_bytes and (number or not is_first):
            backing.put_back(fetched[number:])
            return fetched[:number], 0
        room_bytes = max(0, room_bytes - entry.size_bytes)
    return fetched, room_bytes


class Room:
    """The same limit, applied one message at a time. The first fits whatever its size."""

    __slots__ = ("_is_first", "left_bytes")

    def __init__(self, left_bytes: int | None) -> None:
        self.left_bytes = left_bytes
        """None: unlimited. 0: nothing left, or a message did not fit."""
        self._is_first = True

    def fits(self, entry: Entry) -> bool:
        if self.left_bytes is None or self._is_first or entry.size_bytes <= self.left_bytes:
            return True
        self.left_bytes = 0
        return False

    def take(self, entry: Entry) -> None:
        self._is_first = False
        if self.left_bytes is not None:
            self.left_bytes = max(0, self.left_bytes - entry.size_bytes)
