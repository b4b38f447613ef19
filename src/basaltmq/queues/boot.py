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

from basaltmq.queues.change import Change
from basaltmq.queues.quarantine import Suspects
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

RESERVE_NS: Final = 1_000_000_000
"""A second: one more row a second while messages come in, and places at most that far ahead after a crash."""

PLACE_ROW: Final = b"queue_place"
_CLEAN_ROW: Final = b"queue_clean"
_PLACE: Final = Struct(">Q")
_PLACE_BITS: Final = 63
"""Places are nanoseconds; with this many bits they last until the year 2262."""

_PLACE_AND_ID_BYTES: Final = 24
"""The end of a message's key."""


def encode_place(place_ns: int) -> bytes:
    return _PLACE.pack(place_ns)


class Places:
    """Gives out places."""

    __slots__ = ("_reserved_ns", "crash_ns", "last_ns")

    def __init__(self, last_ns: int, crash_ns: int) -> None:
        self.last_ns = last_ns
        self._reserved_ns = last_ns
        self.crash_ns = crash_ns
        """Messages up to this place may have been delivered before a crash; 0 if there was none."""

    @classmethod
    def open(cls, store: Store, suspects: Suspects, now_ns: int) -> Places:
        """Go on where the last boot ended; from here on the store is in use.

        A place that cannot be read, or that is further ahead than any clock, is found again from the messages. A clean
        row that cannot be read is no clean end.
        """
        row = store.get(Family.VERSION, PLACE_ROW)
        last_ns: int = _PLACE.unpack(row)[0] if row is not None and len(row) == _PLACE.size else 0
        if row is not None and (len(row) != _PLACE.size or last_ns >> _PLACE_BITS):
            last_ns = max(now_ns, last_place_ns(store))
            suspects.note(Family.VERSION, PLACE_ROW, row, f"the last place is damaged; places go on at {last_ns}")
            return cls(last_ns, last_ns)
        clean = store.get(Family.VERSION, _CLEAN_ROW)
        if clean is None:
            return cls(last_ns, last_ns)
        if len(clean) not in (0, _PLACE.size):
            suspects.note(Family.VERSION, _CLEAN_ROW, clean, f"the row of the clean end has {len(clean)} bytes")
            return cls(last_ns, last_ns)
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
        change.batch.put(Family.VERSION, PLACE_ROW, _PLACE.pack(until_ns))

    def _unreserve(self, before_ns: int) -> None:
        self._reserved_ns = before_ns

    def close(self, batch: Batch) -> None:
        """Say in the last batch that it is the last."""
        batch.put(Family.VERSION, PLACE_ROW, _PLACE.pack(self.last_ns))
        batch.put(Family.VERSION, _CLEAN_ROW, _PLACE.pack(self.crash_ns))


def last_place_ns(store: Store) -> int:
    """The highest place of any message, by one seek per sub-queue and a look at every delayed one."""
    found = [key for key, _ in store.scan(Family.DELAYED)]
    end: bytes | None = None
    while (last := next(iter(store.scan(Family.MESSAGES, b"", end, reverse=True)), None)) is not None:
        found.append(last[0])
        end = last[0][:-_PLACE_AND_ID_BYTES] or last[0]
    places = [int.from_bytes(key[-_PLACE_AND_ID_BYTES:-16], "big") for key in found]
    return max((place_ns for place_ns in places if not place_ns >> _PLACE_BITS), default=0)


def wipe_transient(store: Store) -> None:
    """Delete what transient messages of earlier boots were paged to."""
    first = next(iter(store.scan(Family.TRANSIENT)), None)
    if first is None:
        return
    last = next(iter(store.scan(Family.TRANSIENT, reverse=True)))
    batch = Batch()
    batch.delete_range(Family.TRANSIENT, first[0], last[0] + b"\0")
    store.write(batch)
