"""How much of what was fetched one call hands out.

A lease is for a number of messages, and bodies kept apart are read when they are handed out: a thousand of a mebibyte
each would have all of them in memory at once. So a call hands out those that fit into a number of bytes, and the first
in any case; whoever says nothing has those of `LEASE_BYTES_MAX`.
"""

from __future__ import annotations

from typing import Final

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.ready.backing import BackingQueue, Entry

LEASE_BYTES_MAX: Final = 64 << 20
"""Bodies of one lease: what a single message may have, so that a lease of many takes no more memory than one of one."""


def lease_bytes(asked: int | None) -> int:
    """What a call may hand out at most."""
    if asked is None:
        return LEASE_BYTES_MAX
    if type(asked) is not int or asked < 0:
        raise InvalidArgumentError(f"a lease is for 0 bytes or more of bodies, not {asked!r:.80}")
    return min(asked, LEASE_BYTES_MAX)


def fit(backing: BackingQueue, fetched: list[Entry], room_bytes: int, *, is_first: bool) -> tuple[list[Entry], int]:
    """Those of the fetched messages that fit, and the room left behind them: none if some did not.

    The others go back to their places. With `is_first` the first of them fits whatever its size.
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
    """The same one by one: what is left for the bodies of a call. The first fits whatever its size."""

    __slots__ = ("_is_first", "left_bytes")

    def __init__(self, left_bytes: int | None) -> None:
        self.left_bytes = left_bytes
        """None: nobody asks. 0: there is none, or something did not fit."""
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
