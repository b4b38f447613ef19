"""What a plane carries from one boot to the next: the last place given out, and whether the last one closed cleanly.

    place row   | place ns u64 |     no message has a place above it
    clean row   | crash ns u64 |     there from a clean close to the next open; empty is 0

A place (enqueue time) is never given out twice, whatever the clock does and over restarts too: the row is kept
`RESERVE_NS` ahead of what is given out, so it is part of about one batch a second, and a boot begins above it. So the
places of a boot are above those of all earlier ones, which is what tells messages that may have been delivered before a
crash from those that cannot, and the rows of a deleted queue from those of its successor. What a crash left unknown
stays unknown over any number of clean ends: the place is handed on with the clean row.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

RESERVE_NS: Final = 1_000_000_000
"""A second: one more row a second while messages come in, and places at most that far ahead after a crash."""

_PLACE_ROW: Final = b"queue_place"
_CLEAN_ROW: Final = b"queue_clean"
_PLACE: Final = Struct(">Q")


class Places:
    """Gives out places."""

    __slots__ = ("_reserved_ns", "crash_ns", "last_ns")

    def __init__(self, last_ns: int, crash_ns: int) -> None:
        self.last_ns = last_ns
        self._reserved_ns = last_ns
        self.crash_ns = crash_ns
        """Messages up to this place may have been delivered before a crash; 0 if there was none."""

    @classmethod
    def open(cls, store: Store) -> Places:
        """Go on where the last boot ended; from here on the store is in use."""
        row = store.get(Family.VERSION, _PLACE_ROW)
        if row is not None and len(row) != _PLACE.size:
            raise CorruptionError(f"the last place of the queues is damaged ({len(row)} bytes)")
        last_ns: int = 0 if row is None else _PLACE.unpack(row)[0]
        clean = store.get(Family.VERSION, _CLEAN_ROW)
        if clean is None:
            return cls(last_ns, last_ns)
        if len(clean) not in (0, _PLACE.size):
            raise CorruptionError(f"the row of the queues' clean end is damaged ({len(clean)} bytes)")
        batch = Batch()
        batch.delete(Family.VERSION, _CLEAN_ROW)
        store.write(batch)
        return cls(last_ns, _PLACE.unpack(clean)[0] if clean else 0)

    def next(self, change: Change) -> int:
        """The place of a call: the clock's time, but never one that was given out."""
        place_ns = self.last_ns = max(change.now_ns, self.last_ns + 1)
        if place_ns > self._reserved_ns:
            self._reserve(change, place_ns + RESERVE_NS)
        return place_ns

    def _reserve(self, change: Change, until_ns: int) -> None:
        before_ns, self._reserved_ns = self._reserved_ns, until_ns
        change.undo(lambda: self._unreserve(before_ns))
        change.batch.put(Family.VERSION, _PLACE_ROW, _PLACE.pack(until_ns))

    def _unreserve(self, before_ns: int) -> None:
        self._reserved_ns = before_ns

    def close(self, batch: Batch) -> None:
        """Say in the last batch that it is the last."""
        batch.put(Family.VERSION, _PLACE_ROW, _PLACE.pack(self.last_ns))
        batch.put(Family.VERSION, _CLEAN_ROW, _PLACE.pack(self.crash_ns))
