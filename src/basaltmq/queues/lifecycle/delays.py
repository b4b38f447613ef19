"""Delayed messages: scheduled ones, and failed ones that wait for their next attempt.

    delayed   | lp(queue) | due ns u64 | lp(sub-queue) | enqueued ns u64 | id (16) |  ->  the message's row

A delayed message leaves `messages` and later returns to the same key, so it keeps its position in the queue. Each
direction is one batch. A timer (timers.py) triggers the return in batches of `RETURN_MAX`, so that a million due
messages do not block other work. Messages that expired in the meantime take the path of expired messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, SPILLED, TRANSIENT, Entry
from basaltmq.queues.lifecycle import reclaim, timers
from basaltmq.queues.lifecycle.ttl import expire
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import prefix_range
from basaltmq.store.keys.queues import (
    decode_timed_message_key,
    message_of,
    timed_message_bound,
    timed_message_prefix,
    timed_of,
)

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

RETURN_MAX: Final = 1000
"""Messages returned per batch: about 10 ms of work."""


def delay(queue: Queue, change: Change, entries: Sequence[tuple[Entry, int]]) -> None:
    """Store messages until their due times. They are nowhere else in the queue, and their rows are in memory."""
    queue.touch(change)
    stats = queue.stats
    earliest_ns = min(due_ns for _, due_ns in entries)
    for entry, due_ns in entries:
        change.batch.put(Family.DELAYED, timed_of(entry.key, due_ns), entry.row)
        # A delayed message is on disk, so it becomes persistent.
        entry.flags &= ~(TRANSIENT | SPILLED)
        queue.shared.timers.set(change, due_ns, timers.DELAYED, queue.name)
        stats.delayed += 1
        stats.delayed_bytes += entry.size_bytes
        stats.apart += bool(entry.flags & APART)
    change.after(lambda: _lower_cursor(queue, earliest_ns))


def _lower_cursor(queue: Queue, due_ns: int) -> None:
    queue.delayed_from = min(queue.delayed_from, timed_message_bound(queue.name, due_ns))


def return_due(queue: Queue, change: Change) -> bool:
    """Return due messages to the queue. Return whether more are due."""
    now_ns = change.now_ns
    start = max(queue.delayed_from, timed_message_bound(queue.name, 0))
    end = timed_message_bound(queue.name, now_ns + 1)
    found = list(islice(queue.shared.store.scan(Family.DELAYED, start, end), RETURN_MAX))
    if not found:
        queue.delayed_from = end
        return False
    queue.touch(change)
    # Rows of a deleted queue with the same name may still exist.
    floor = queue.shared.reclaim.floor_ns(queue.name).to_bytes(8, "big")
    entries: list[Entry] = []
    dead: list[Entry] = []
    for key, row in found:
        entry = _read(queue, key, row)
        if entry is None:
            continue
        change.batch.delete(Family.DELAYED, key)
        if key[-24:-16] < floor:
            dead.append(entry)
            continue
        entries.append(entry)
        uncount(queue, entry)
    reclaim.release(queue.shared.content, change, dead)
    # Continue after the last key, not at its time. Otherwise each batch would skip the rows already returned of that
    # time.
    after = found[-1][0] + b"\0"
    change.after(lambda: _set_cursor(queue, after))
    _return(queue, change, entries)
    return len(found) == RETURN_MAX


def _read(queue: Queue, key: bytes, row: bytes) -> Entry | None:
    """Return the entry of a delayed message; None if unreadable, which is noted for the quarantine."""
    try:
        decode_timed_message_key(key)
        return rows.read_entry(message_of(key)[0], row)
    except CorruptionError as error:
        queue.shared.quarantine.note(Family.DELAYED, key, row, str(error))
        return None


def _set_cursor(queue: Queue, after: bytes) -> None:
    queue.delayed_from = after


def _return(queue: Queue, change: Change, entries: list[Entry]) -> None:
    entries.sort(key=lambda e: e.key)
    expired = [e for e in entries if e.expires_ns and e.expires_ns <= change.now_ns]
    queue.admit(change, [e for e in entries if not e.expires_ns or e.expires_ns > change.now_ns])
    change.after(lambda: queue.shared.check_limits(queue.name))
    if expired:
        queue.count(expired, 1)
        expire(queue, change, expired)


def uncount(queue: Queue, entry: Entry) -> None:
    queue.stats.delayed -= 1
    queue.stats.delayed_bytes -= entry.size_bytes
    queue.stats.apart -= bool(entry.flags & APART)


def delayed(queue: Queue, count: int, after: bytes = b"") -> list[tuple[int, Entry]]:
    """Return up to `count` delayed messages with their due times, in due order, after the delayed key `after`."""
    start, end = prefix_range(timed_message_prefix(queue.name))
    found = islice(queue.shared.store.scan(Family.DELAYED, max(start, after + b"\0"), end), count)
    return [(message_of(key)[1], entry) for key, row in found if (entry := _read(queue, key, row)) is not None]
