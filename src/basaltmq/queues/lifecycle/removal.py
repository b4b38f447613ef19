"""Purges and deletes queues (SPEC C13, P10).

Without separate bodies, one batch of range deletes removes everything, whatever the size. Separate bodies must be found
row by row. So a queue with such bodies is purged page by page, and is consistent after each page. Deleting it
takes one batch and leaves its message rows to reclaim.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import TIMED
from basaltmq.queues.leases.table import LeaseCall
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp, prefix_range
from basaltmq.store.keys.queues import queue_key, queue_stats_key, timed_of

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

PAGE: Final = 1000
"""Messages deleted row by row per batch."""

RANGES_MAX: Final = 1000
"""Ranges per batch. Each leased message splits a range in two, and each range tombstone slows later reads a little."""

EXPIRIES_MAX: Final = 10_000
"""Lease expiry rows deleted with a queue. The rows of further leases are deleted when they are due."""

BY_QUEUE: Final = (
    Family.MESSAGES,
    Family.TRANSIENT,
    Family.LEASES,
    Family.DELAYED,
    Family.MESSAGE_EXPIRY,
    Family.DEDUP,
    Family.DEDUP_EXPIRY,
)
"""Families whose keys start with lp(queue)."""


def purge(queue: Queue, change: Change, until_ns: int | None) -> tuple[int, bool]:
    """Delete all ready messages, or a page of them. Return how many, and whether that was all.

    With `until_ns`, delete only messages enqueued until then, page by page. None is for the first page, which may
    delete everything.
    """
    queue.touch(change)
    queue.unpark_all(change.now_ns)
    if until_ns is None and not (queue.stats.apart or queue.stats.transient or len(queue.leases) >= RANGES_MAX):
        count = len(queue)
        _purge_ranges(queue, change)
        return count, True
    until = (queue.shared.enqueue_clock.last_ns if until_ns is None else until_ns).to_bytes(8, "big")
    taken = queue.backing.fetchwhile(lambda entry: entry.key[-24:-16] <= until, PAGE)
    change.undo(lambda: queue.backing.put_back(taken))
    queue.delete(change, taken)
    return len(taken), len(taken) < PAGE


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
    # Otherwise the range contains index rows of delayed messages. Index rows of purged messages are deleted when due.
    queue.stats.messages = len(leased)
    queue.stats.size_bytes = sum(e.size_bytes for e in leased)
    change.after(queue.backing.purge)


def delete_queue(queue: Queue, change: Change) -> None:
    """Delete a queue in one batch. Messages with separate bodies are left to reclaim.py."""
    calls = queue.leases.calls()
    for call in calls[:EXPIRIES_MAX]:
        queue.leases.delete_expiry(change.batch, call)
    change.after(lambda: _forget_leases(queue, calls))
    by_row = (Family.MESSAGES, Family.DELAYED) if queue.stats.apart else ()
    if by_row:
        queue.shared.reclaim.mark_deleted(change, queue.name, queue.shared.enqueue_clock.next(change))
    # A queue without messages has no rows here, and empty range deletes would still slow down reads.
    for family in BY_QUEUE if queue.stats.enqueued or calls else ():
        if family not in by_row:
            change.batch.delete_range(family, *_range(queue))
    change.batch.delete(Family.QUEUES, queue_key(queue.name))
    change.batch.delete(Family.QUEUE_STATS, queue_stats_key(queue.name))


def _forget_leases(queue: Queue, calls: list[LeaseCall]) -> None:
    for call in calls:
        queue.shared.lease_expiry.remove(call.token)


def _range(queue: Queue) -> tuple[bytes, bytes]:
    start, end = prefix_range(lp(queue.name))
    assert end is not None, "a length-prefixed name is never all 0xff"
    return start, end
