"""A scan reads the ready messages of a queue in order, each one once, without leasing them.

    seen      per sub-queue the last key read: everything up to it was read
    unread    sub-queues with messages above that key
    again     keys at or below it whose messages became ready later: returned ones, and delayed ones at their old places

A queue notifies its scans of messages that become ready. So a scan that has reached the end costs nothing until then,
and never starts from the head again. A scan is only in memory. If the queue was unloaded meanwhile, it starts over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, Entry
from basaltmq.queues.leases.delivery import PRIORITY, Delivery
from basaltmq.queues.ready.fair_queue import FairQueue
from basaltmq.queues.ready.priority_queue import PriorityQueue

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

AGAIN_MAX: Final = 10_000
"""Maximum keys to read again. Above it, the scan goes back to the lowest of them."""

SUB_QUEUES_MAX: Final = 4096
"""Maximum sub-queues whose position is kept. Above it, the scan starts over."""

_TIME_AND_ID_BYTES: Final = 24
_ID_BYTES: Final = 16


class Scan:
    """The position of one reader of a queue."""

    __slots__ = ("_again", "_queue", "_seen", "_unread")

    def __init__(self) -> None:
        self._queue: Queue | None = None
        self._seen: dict[bytes, bytes] = {}
        self._unread: dict[bytes, None] = {}
        self._again: dict[bytes, None] = {}

    @property
    def is_behind(self) -> bool:
        """Whether there may be messages to read."""
        return self._queue is None or bool(self._unread) or bool(self._again)

    def note(self, entries: Sequence[Entry]) -> None:
        """Note messages that have become ready."""
        for entry in entries:
            prefix = entry.key[:-_TIME_AND_ID_BYTES]
            if prefix in self._seen and entry.key <= self._seen[prefix]:
                self._again[entry.key] = None
            else:
                self._unread[prefix] = None
        if len(self._again) > AGAIN_MAX:
            for key in sorted(self._again, reverse=True):
                prefix = key[:-_TIME_AND_ID_BYTES]
                self._seen[prefix] = key[:-_ID_BYTES]
                self._unread[prefix] = None
            self._again.clear()

    def again(self, delivery: Delivery) -> None:
        """Read a message again, which the reader could not take yet."""
        self._again[delivery.key] = None

    def end(self) -> None:
        """Stop."""
        if self._queue is not None and self in self._queue.scans:
            self._queue.scans.remove(self)

    def read(self, queue: Queue, count: int, size_bytes_max: int, now_ns: int, *, copy: bool) -> list[Delivery]:
        """Return the next messages, up to `count` and to a total size of their bodies, but at least one.

        They are not leased, and have token 0. Bodies apart from their rows are read for a `copy` only. The result may
        be empty although more messages follow.
        """
        queue.unpark_all(now_ns)
        if self._queue is not queue or self not in queue.scans:
            self._start(queue)
        entries = self._next(queue, count)
        if copy:
            entries = self._fit(entries, size_bytes_max)
        entries = [e for e in entries if not e.expires_ns or e.expires_ns > now_ns]
        bodies = queue.bodies(None, [e for e in entries if e.flags & APART]) if copy else {}
        marks = PRIORITY if queue.config.priorities_max else 0
        return [
            Delivery(e.key[-_ID_BYTES:], 0, e.key, e.row, bodies.get(e.key), marks)
            for e in entries
            if not copy or not e.flags & APART or e.key in bodies
        ]

    def _start(self, queue: Queue) -> None:
        self.end()
        self._queue = queue
        queue.scans.append(self)
        self._seen.clear()
        self._again.clear()
        backing = queue.backing
        assert isinstance(backing, FairQueue | PriorityQueue), f"queue {queue.name!r} has no sub-queues"
        self._unread = dict.fromkeys(rows.prefix_of(queue.name, sub) for sub, _, _, _ in backing.sub_queues())

    def _next(self, queue: Queue, count: int) -> list[Entry]:
        if self._again:
            keys = sorted(self._again)[:count]
            for key in keys:
                del self._again[key]
            return queue.backing.pick(keys, leave=True)
        if not self._unread:
            return []
        prefix = next(iter(self._unread))
        if queue.config.priorities_max:
            name_at = queue.prefix_bytes + 2
            prefix = max(self._unread, key=lambda each: rows.split_sub_queue(each[name_at:].decode())[0])
        after = self._seen.get(prefix, prefix)
        entries = [e for e in queue.backing.browse(after, count) if e.key.startswith(prefix)]
        if not entries:
            # A short page is not the end: unreadable messages are left out.
            del self._unread[prefix]
            return []
        if len(self._seen) >= SUB_QUEUES_MAX and prefix not in self._seen:
            self._seen.clear()
        self._seen[prefix] = entries[-1].key
        return entries

    def _fit(self, entries: list[Entry], size_bytes_max: int) -> list[Entry]:
        size_bytes = 0
        for number, entry in enumerate(entries):
            size_bytes += entry.size_bytes
            if number and size_bytes > size_bytes_max:
                self._again.update(dict.fromkeys(e.key for e in entries[number:]))
                return entries[:number]
        return entries
