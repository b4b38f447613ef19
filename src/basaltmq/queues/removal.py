"""Emptying and deleting queues (SPEC C13, P10).

What has no bodies apart goes by ranges, whatever its size, in one batch. Bodies apart are found row by row, so a queue
that has some is emptied in batches, each of which leaves a queue that is right: after a crash in the middle it has
fewer messages, and the operation, which was not confirmed, is made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

from basaltmq.queues import rows
from basaltmq.queues.backing import APART, TIMED, Entry
from basaltmq.queues.change import Change
from basaltmq.queues.leases import LeaseCall
from basaltmq.store.families import Family
from basaltmq.store.keys import lp, message_of, prefix_range, queue_key, queue_stats_key, timed_of

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

PAGE: Final = 1000
"""Messages taken row by row in one batch."""

RANGES_MAX: Final = 1000
"""Ranges in one batch: every leased message parts one in two, and every range deleted costs later reads a little."""

BY_QUEUE: Final = (
    Family.MESSAGES,
    Family.TRANSIENT,
    Family.LEASE_CALLS,
    Family.DELAYED,
    Family.MESSAGE_EXPIRY,
    Family.DEDUP,
    Family.DEDUP_EXPIRY,
)
"""Families whose keys begin with lp(queue)."""


def purge(queue: Queue, change: Change) -> bool:
    """Delete what is ready, or a page of it; True when nothing is left."""
    queue.touch(change)
    queue.settle_down(change.now_ns)
    if queue.stats.apart or len(queue.leases) >= RANGES_MAX or queue.stats.transient:
        taken = queue.backing.fetch(PAGE)
        change.undo(lambda: queue.backing.put_back(taken))
        queue.delete(change, taken)
        return len(taken) < PAGE
    _purge_ranges(queue, change)
    return True


def _purge_ranges(queue: Queue, change: Change) -> None:
    leased = [e for call in queue.leases.calls() for e in call.entries.values()]
    start, end = _range(queue)
    for key in sorted(e.key for e in leased):
        change.batch.delete_range(Family.MESSAGES, start, key)
        start = key + b"\0"
    change.batch.delete_range(Family.MESSAGES, start, end)
    if not queue.stats.delayed:
        change.batch.delete_range(Family.MESSAGE_EXPIRY, *_range(queue))
        for entry in leased:
            if entry.flags & TIMED:
                change.batch.put(Family.MESSAGE_EXPIRY, timed_of(entry.key, entry.expires_ns), b"")
    # Otherwise index rows of delayed messages are among them; those of purged ones go when their time comes.
    queue.stats.messages = len(leased)
    queue.stats.size_bytes = sum(e.size_bytes for e in leased)
    change.after(queue.backing.purge)


def end_leases(queue: Queue, change: Change) -> None:
    """Every lease of the queue is over; its tokens are refused from here on."""
    queue.settle_down(change.now_ns)
    queue.leases.delete_rows(change.batch)
    entries: list[Entry] = []
    for call in queue.leases.calls():
        entries += _end_lease(queue, change, call)
    queue.backing.requeue(change, entries)


def _end_lease(queue: Queue, change: Change, call: LeaseCall) -> list[Entry]:
    _, taken = queue.leases.take(call.token, None)
    change.undo(lambda: queue.leases.restore(call, taken))
    change.after(lambda: queue.shared.lease_expiry.remove(call.token))
    return list(taken.values())


def delete_bodies(queue: Queue, change: Change, after: bytes) -> bytes | None:
    """Delete the messages of a page that have bodies apart, with their bodies; where to go on, None at the end."""
    queue.touch(change)
    start, end = _range(queue)
    page = list(islice(queue.shared.store.scan(Family.MESSAGES, max(start, after + b"\0"), end), PAGE))
    entries = [rows.read_entry(key, row) for key, row in page]
    queue.remove(change, [e for e in entries if e.flags & APART], keep_bodies=False)
    if len(page) == PAGE:
        return page[-1][0]
    waiting = list(islice(((key, e) for key, e in _delayed(queue) if e.flags & APART), PAGE))
    for key, _ in waiting:
        change.batch.delete(Family.DELAYED, key)
    queue.shared.content.release(change, [(rows.body_of(e.row), e.key[-16:], e.flags) for _, e in waiting])
    queue.stats.apart -= len(waiting)
    queue.stats.delayed -= len(waiting)
    queue.stats.delayed_bytes -= sum(e.size_bytes for _, e in waiting)
    return end if len(waiting) == PAGE else None


def _delayed(queue: Queue) -> Iterator[tuple[bytes, Entry]]:
    for key, row in queue.shared.store.scan(Family.DELAYED, *_range(queue)):
        yield key, rows.read_entry(message_of(key)[0], row)


def delete_queue(queue: Queue, change: Change) -> None:
    """Delete every row of a queue that has neither leases nor bodies apart."""
    assert not len(queue.leases), "leases end before their queue"
    for family in BY_QUEUE:
        change.batch.delete_range(family, *_range(queue))
    change.batch.delete(Family.QUEUES, queue_key(queue.name))
    change.batch.delete(Family.QUEUE_STATS, queue_stats_key(queue.name))


def _range(queue: Queue) -> tuple[bytes, bytes]:
    start, end = prefix_range(lp(queue.name))
    assert end is not None, "a length-prefixed name is never all 0xff"
    return start, end
