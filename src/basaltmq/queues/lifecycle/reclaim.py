"""Reclaims the rows of deleted queues in the background (SPEC C13, promises P8, P10).

Deleting a queue is one batch. If no message has a separate body, DeleteRange removes everything. Separate
bodies must be found row by row, and there may be millions. In that case the batch writes a tombstone:

    deleted queue   | queue name |  ->  | floor ns u64 |

Every message of this queue name enqueued before the floor is dead. A new queue with the same name starts at the floor
(QueueStats.floor_ns), so it is empty and never sees those messages. The rows are deleted page by page, between other
work and after restarts. The tombstone goes with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from struct import Struct
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.content import Content
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, Entry
from basaltmq.queues.entries.quarantine import Quarantine
from basaltmq.store.api import Reader, Store
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp, prefix_range
from basaltmq.store.keys.queues import TIME_AND_ID_BYTES, decode_deleted_queue_key, deleted_queue_key, message_of

PAGE: Final = 500
"""Rows deleted per batch: a few milliseconds of work."""

_FLOOR: Final = Struct(">Q")


class Reclaim:
    """Deletes the rows of deleted queues. Not thread-safe: the plane's lock protects every call."""

    def __init__(self, store: Store, content: Content, quarantine: Quarantine, last_ns: Callable[[], int]) -> None:
        """`last_ns` returns the last enqueue time assigned."""
        self._last_ns = last_ns
        self._store = store
        self._quarantine = quarantine
        self._content = content
        self._after: dict[tuple[str, Family], bytes] = {}
        self.is_pending = next(iter(store.scan(Family.DELETED_QUEUES)), None) is not None
        """Whether there are rows to reclaim."""

    def floor_ns(self, queue: str) -> int:
        """Return the enqueue time below which rows of this name are dead; 0 without a tombstone."""
        row = self._store.get(Family.DELETED_QUEUES, deleted_queue_key(queue)) if self.is_pending else None
        if row is None:
            return 0
        try:
            return decode_floor(queue, row)
        except CorruptionError as error:
            # The floor of the new queue still hides the rows of the deleted one, but they are not reclaimed.
            self._quarantine.note(Family.DELETED_QUEUES, deleted_queue_key(queue), row, str(error))
            return 0

    def mark_deleted(self, change: Change, queue: str, floor_ns: int) -> None:
        """Write a tombstone: messages of this name enqueued before the floor are dead."""
        change.batch.put(Family.DELETED_QUEUES, deleted_queue_key(queue), _FLOOR.pack(floor_ns))
        change.after(lambda: self._restart(queue))

    def _restart(self, queue: str) -> None:
        self.is_pending = True
        for family in (Family.MESSAGES, Family.DELAYED):
            self._after.pop((queue, family), None)

    def step(self, change: Change) -> None:
        """Delete a page of rows."""
        first = next(iter(self._store.scan(Family.DELETED_QUEUES)), None)
        if first is None:
            self.is_pending = False
            return
        try:
            queue = decode_deleted_queue_key(first[0])
            floor_ns = decode_floor(queue, first[1])
        except CorruptionError as error:
            self._quarantine.note(
                Family.DELETED_QUEUES, *first, str(error), replacement=self._rebuild_tombstone(first[0])
            )
            return
        for family in (Family.MESSAGES, Family.DELAYED):
            if self._page(change, queue, family, floor_ns):
                return
        change.batch.delete(Family.DELETED_QUEUES, first[0])
        change.after(lambda: self._restart(queue))

    def _rebuild_tombstone(self, key: bytes) -> bytes | None:
        """Return a replacement for an unreadable tombstone.

        Without a queue of this name, all its rows are dead. If there is one, it is unknown which rows are dead, and
        they stay.
        """
        if self._store.get(Family.QUEUES, key) is not None:
            return None
        return _FLOOR.pack(self._last_ns() + 1)

    def _page(self, change: Change, queue: str, family: Family, floor_ns: int) -> bool:
        """Delete a page of a family. Return False if there is none."""
        start, end = prefix_range(lp(queue))
        start = max(start, self._after.get((queue, family), b""))
        page = list(islice(self._store.scan(family, start, end), PAGE))
        if not page:
            return False
        floor = floor_ns.to_bytes(8, "big")
        dead: list[Entry] = []
        keys: list[bytes] = []
        after = page[-1][0] + b"\0"
        for key, row in page:
            if key[-TIME_AND_ID_BYTES:-16] < floor:
                entry = self._read(family, key, row)
                if entry is not None:
                    keys.append(key)
                    dead.append(entry)
            elif family is Family.MESSAGES:
                # Within a sub-queue, live rows follow dead rows: skip to the next sub-queue.
                following = prefix_range(key[:-TIME_AND_ID_BYTES])[1]
                assert following is not None, "a length-prefixed name is never all 0xff"
                after = following
                break
        if len(keys) == len(page):
            change.batch.delete_range(family, page[0][0], after)
        else:
            for key in keys:
                change.batch.delete(family, key)
        release(self._content, change, dead)
        change.after(lambda: self._set_cursor(queue, family, after))
        return True

    def _read(self, family: Family, key: bytes, row: bytes) -> Entry | None:
        """Return the entry of a dead message; None if unreadable, which is noted for the quarantine."""
        try:
            return rows.read_entry(message_of(key)[0] if family is Family.DELAYED else key, row)
        except CorruptionError as error:
            self._quarantine.note(family, key, row, str(error), is_counted=False)
            return None

    def _set_cursor(self, queue: str, family: Family, after: bytes) -> None:
        self._after[queue, family] = after


def release(content: Content, change: Change, dead: list[Entry]) -> None:
    """Release the bodies of dead messages. Shared bodies stay while other messages use them."""
    content.release(change, [(rows.body_of(e.row), e.key[-16:], e.flags) for e in dead if e.flags & APART])


def encode_floor(floor_ns: int) -> bytes:
    return _FLOOR.pack(floor_ns)


def floors(store: Reader) -> dict[str, int]:
    """Map each deleted queue name to the enqueue time below which its rows are dead."""
    return {
        queue: decode_floor(queue, row)
        for key, row in store.scan(Family.DELETED_QUEUES)
        for queue in [decode_deleted_queue_key(key)]
    }


def decode_floor(queue: str, row: bytes) -> int:
    if len(row) != _FLOOR.size:
        raise CorruptionError(f"the tombstone of queue {queue!r} is damaged ({len(row)} bytes)")
    floor_ns: int = _FLOOR.unpack(row)[0]
    return floor_ns
