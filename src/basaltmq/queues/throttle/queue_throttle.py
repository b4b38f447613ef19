"""Throttling of one queue (SPEC C11): decides which fetched messages may be delivered, and parks the others.

token_buckets.py holds the tokens, gate.py the order of waiting messages. A parked message is off the backing queue and
in memory without its row, but still counts as ready. When a sub-queue has as many parked messages as the gate allows,
the backing queue skips it until one of them is delivered.

Only the gate knows parked messages. So operations on the whole queue (browse, purge, expiry, limits, moves, unloading)
put them back first. They are parked again when they are fetched again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from basaltmq.queues.change import Change
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import SPILLED, TRANSIENT, Entry
from basaltmq.queues.ready.byte_limit import Room
from basaltmq.queues.throttle.gate import ThrottleGate
from basaltmq.queues.throttle.token_buckets import TokenBuckets

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue


class QueueThrottle:
    """The parked messages of one queue."""

    __slots__ = ("_buckets", "_gate", "_queue", "_subs")

    def __init__(self, queue: Queue, buckets: TokenBuckets) -> None:
        self._queue = queue
        self._buckets = buckets
        self._gate: ThrottleGate[Entry] = ThrottleGate(buckets)
        self._subs: set[str] = set()

    def __len__(self) -> int:
        return len(self._gate)

    def woken(self, change: Change, count: int, room_bytes: int | None = None) -> tuple[list[Entry], int | None]:
        """Take up to `count` parked messages that have tokens now, with their rows loaded.

        The first message always fits; the others must fit into `room_bytes`. Return the messages and the bytes left, 0
        if one did not fit.
        """
        gate, now_ns = self._gate, change.now_ns
        ready: list[Entry] = []
        room = Room(room_bytes)
        for sub in gate.wake(now_ns):
            while len(ready) < count:
                popped = gate.pop(sub, now_ns, room.fits)
                if popped is None:
                    break
                entry, keys = popped
                room.take(entry)
                ready.append(entry)
                self._undo_take(change, keys)
            gate.stay_awake(sub)
            self._unblock_if_room(sub)
        ready = self._queue.load_rows(ready)
        if ready:
            change.undo(lambda: self._queue.backing.put_back(ready))
        if len(gate):
            self._queue.shared.parked[self._queue.name] = None
        return ready, room.left_bytes

    def admit(self, change: Change, entries: list[Entry]) -> list[Entry]:
        """Return the fetched messages that have tokens, and park the others."""
        admitted: list[Entry] = []
        for entry in entries:
            keys = rows.throttle_keys_of(entry.key, entry.row)
            if not keys:
                admitted.append(entry)
                continue
            sub = rows.sub_of(entry.key, self._queue.prefix_bytes)
            if self._gate.admit(sub, entry, keys, change.now_ns):
                self._undo_take(change, keys)
                admitted.append(entry)
                continue
            if entry.flags & (TRANSIENT | SPILLED) != TRANSIENT:
                entry.row = b""
            self._subs.add(sub)
            self._queue.shared.parked[self._queue.name] = None
            if not self._gate.can_fetch(sub):
                self._queue.backing.block(sub)
        return admitted

    def _undo_take(self, change: Change, keys: tuple[str, ...]) -> None:
        change.undo(lambda: self._buckets.give_back(keys, change.now_ns))

    def _unblock_if_room(self, sub: str) -> None:
        if self._gate.can_fetch(sub):
            self._queue.backing.unblock(sub)

    def unpark(self, now_ns: int) -> None:
        """Put all parked messages back into the queue."""
        for sub in self._subs:
            self._queue.backing.unblock(sub)
            self._queue.backing.put_back(self._gate.drop(sub, now_ns))
        self._subs.clear()

    def limit_changed(self, key: str, now_ns: int) -> None:
        self._gate.limit_changed(key, now_ns)

    def next_wake_ns(self) -> int | None:
        """Return when the next token arrives that a parked message waits for."""
        return self._gate.next_wake_ns() if len(self._gate) else None
