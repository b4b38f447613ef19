"""Readers of queues: consumers that browse, and consumers that choose messages by more than their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from basaltmq.queues.browsing.scan import Scan
from basaltmq.queues.change import Change
from basaltmq.queues.change_runner import ChangeRunner
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.leases import granting
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.message import Message
from basaltmq.queues.queue import Queue


class Readers:
    """Reads and picks ready messages anywhere in the queues of a plane. Thread-safe."""

    def __init__(
        self,
        changes: ChangeRunner,
        find: Callable[[str], Queue],
        was_read: Callable[[Queue], None],
        clock_ns: Callable[[], int],
    ) -> None:
        self._changes = changes
        self._find = find
        self._was_read = was_read
        self._clock_ns = clock_ns

    def read(self, name: str, scan: Scan, count: int, size_bytes_max: int, *, copy: bool) -> list[Delivery]:
        """Return the next messages of a scan. It is at the end if `scan.is_behind` is not set afterwards."""
        with self._changes.lock:
            queue = self._find(name)
            found = scan.read(queue, count, size_bytes_max, self._clock_ns(), copy=copy)
            self._was_read(queue)
            return found

    def lease(self, name: str, keys: Sequence[bytes], size_bytes_max: int, *, visibility_ms: int) -> list[Delivery]:
        """Lease the messages with these keys that are still ready: the first, and those after it that fit.

        The scans of the queue read the others again.
        """
        return self._changes.do(lambda change: _pick(self._find(name), change, keys, size_bytes_max, visibility_ms))

    def page(self, name: str, count: int, after: bytes) -> tuple[list[Message], bytes]:
        """Return ready messages in key order, unchanged, and the key to continue after."""
        with self._changes.lock:
            queue = self._find(name)
            queue.unpark_all(queue.used_ns)
            found: list[Message] = []
            while not found and (entries := queue.backing.browse(after, count)):
                after = entries[-1].key
                bodies = queue.bodies(None, [e for e in entries if e.flags & APART])
                found = [queue.open(e, bodies.get(e.key)) for e in entries if not e.flags & APART or e.key in bodies]
            self._was_read(queue)
            return found, after

    def end(self, scan: Scan) -> None:
        with self._changes.lock:
            scan.end()


def _pick(
    queue: Queue, change: Change, keys: Sequence[bytes], size_bytes_max: int, visibility_ms: int | None
) -> list[Delivery]:
    """Lease the messages with these keys that are ready: the first, and those after it that fit."""
    change.at = queue.name
    picked = queue.backing.pick(keys[: queue.leases.room()], leave=False)
    sizes = accumulate([e.size_bytes for e in picked])
    entries = [
        e for number, (e, size) in enumerate(zip(picked, sizes, strict=True)) if not number or size <= size_bytes_max
    ]
    if len(entries) < len(picked):
        rest = picked[len(entries) :]
        queue.backing.put_back(rest)
        for scan in queue.scans:
            scan.note(rest)
    change.undo(lambda: queue.backing.put_back(entries))
    chosen = queue.without_expired(change, entries)
    bodies = queue.bodies(change, [e for e in chosen if e.flags & APART])
    chosen = [e for e in chosen if not e.flags & APART or e.key in bodies]
    return granting.grant(queue, change, chosen, "", visibility_ms, bodies) if chosen else []
