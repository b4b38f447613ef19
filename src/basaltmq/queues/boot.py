"""State that survives a restart of the queue plane: the last enqueue time, and whether the last shutdown was clean.

    queue_place   | enqueued ns u64 |  upper bound of all enqueue times assigned so far
    queue_clean   | crash ns u64 |     exists from a clean close until the next open; an empty row means 0

The enqueue time in nanoseconds and the message id order the messages of a sub-queue. No enqueue time is assigned twice,
even if the clock jumps back or the broker restarts. The row `queue_place` stays up to `RESERVE_NS` ahead of the
assigned times, so about one batch per second writes it. Each boot starts above the row.

Enqueue times of a boot are therefore above those of all earlier boots. This separates messages that may have been
delivered before a crash from later ones, and the rows of a deleted queue from those of its successor. `queue_clean`
carries `crash ns` forward, so later clean shutdowns do not lose this information.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from basaltmq.queues.change import Change
from basaltmq.queues.entries.quarantine import Suspects
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import TIME_AND_ID_BYTES
from basaltmq.store.versions import bring_up_to_date

CONTENT: Final = "queue_storage"
VERSION: Final = 3
FAMILIES: Final = (Family.MESSAGES, Family.LEASES, Family.LEASE_EXPIRY, Family.QUEUES, Family.STATE)
"""A store without rows in these families has no queue storage yet."""

RESERVE_NS: Final = 1_000_000_000
"""One second: costs one extra row per second while messages arrive. After a crash, enqueue times are at most
this far ahead."""

LAST_ENQUEUED_ROW: Final = b"queue_place"
_CLEAN_ROW: Final = b"queue_clean"
_ENQUEUED: Final = Struct(">Q")
_ENQUEUED_BITS: Final = 63
"""Enqueue times are nanoseconds in 63 bits, which last until the year 2262."""


def encode_enqueued(enqueued_ns: int) -> bytes:
    return _ENQUEUED.pack(enqueued_ns)


def check_version(store: Store) -> None:
    """Raise an error if the store holds another version of the queue storage."""
    bring_up_to_date(store, CONTENT, VERSION, {}, FAMILIES)


class EnqueueClock:
    """Assigns increasing enqueue times to messages."""

    __slots__ = ("_reserved_ns", "crash_ns", "last_ns")

    def __init__(self, last_ns: int, crash_ns: int) -> None:
        self.last_ns = last_ns
        self._reserved_ns = last_ns
        self.crash_ns = crash_ns
        """Messages up to this enqueue time may have been delivered before a crash. 0 if there was no crash."""

    @classmethod
    def open(cls, store: Store, suspects: Suspects, now_ns: int) -> EnqueueClock:
        """Continue after the last boot's times, and delete the row `queue_clean` because the store is now in use.

        If the last time is damaged or ahead of any clock, it is recovered from the message keys. A damaged
        `queue_clean` counts as a crash.
        """
        row = store.get(Family.VERSION, LAST_ENQUEUED_ROW)
        last_ns: int = _ENQUEUED.unpack(row)[0] if row is not None and len(row) == _ENQUEUED.size else 0
        if row is not None and (len(row) != _ENQUEUED.size or last_ns >> _ENQUEUED_BITS):
            last_ns = max(now_ns, last_enqueued_ns(store))
            suspects.note(
                Family.VERSION, LAST_ENQUEUED_ROW, row, f"the last enqueue time is damaged; continuing at {last_ns}"
            )
            return cls(last_ns, last_ns)
        clean = store.get(Family.VERSION, _CLEAN_ROW)
        if clean is None:
            return cls(last_ns, last_ns)
        if len(clean) not in (0, _ENQUEUED.size):
            suspects.note(
                Family.VERSION,
                _CLEAN_ROW,
                clean,
                f"the clean-shutdown row has {len(clean)} bytes, not 0 or {_ENQUEUED.size}",
            )
            return cls(last_ns, last_ns)
        batch = Batch()
        batch.delete(Family.VERSION, _CLEAN_ROW)
        store.write(batch)
        return cls(last_ns, _ENQUEUED.unpack(clean)[0] if clean else 0)

    def next(self, change: Change) -> int:
        """Return the enqueue time of an operation: the current time, or the next free one if the clock is behind."""
        enqueued_ns = self.last_ns = max(change.now_ns, self.last_ns + 1)
        if enqueued_ns > self._reserved_ns:
            self._reserve(change, enqueued_ns + RESERVE_NS)
        return enqueued_ns

    def _reserve(self, change: Change, until_ns: int) -> None:
        before_ns, self._reserved_ns = self._reserved_ns, until_ns
        change.undo(lambda: self._unreserve(before_ns))
        change.batch.put(Family.VERSION, LAST_ENQUEUED_ROW, _ENQUEUED.pack(until_ns))

    def _unreserve(self, before_ns: int) -> None:
        self._reserved_ns = before_ns

    def close(self, batch: Batch) -> None:
        """Add the rows of a clean shutdown to the last batch."""
        batch.put(Family.VERSION, LAST_ENQUEUED_ROW, _ENQUEUED.pack(self.last_ns))
        batch.put(Family.VERSION, _CLEAN_ROW, _ENQUEUED.pack(self.crash_ns))


def last_enqueued_ns(store: Store) -> int:
    """Return the highest enqueue time of any message: one seek per sub-queue, and a scan of the delayed messages."""
    found = [key for key, _ in store.scan(Family.DELAYED)]
    end: bytes | None = None
    while (last := next(iter(store.scan(Family.MESSAGES, b"", end, reverse=True)), None)) is not None:
        found.append(last[0])
        end = last[0][:-TIME_AND_ID_BYTES] or last[0]
    times = [int.from_bytes(key[-TIME_AND_ID_BYTES:-16], "big") for key in found]
    return max((enqueued_ns for enqueued_ns in times if not enqueued_ns >> _ENQUEUED_BITS), default=0)


def wipe_transient(store: Store) -> None:
    """Delete the transient messages that earlier boots paged to disk."""
    first = next(iter(store.scan(Family.TRANSIENT)), None)
    if first is None:
        return
    last = next(iter(store.scan(Family.TRANSIENT, reverse=True)))
    batch = Batch()
    batch.delete_range(Family.TRANSIENT, first[0], last[0] + b"\0")
    store.write(batch)
