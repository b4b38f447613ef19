"""Emptying and deleting queues (SPEC C13, P10).

What has no bodies apart goes by ranges, whatever its size, in one batch. Bodies apart are found row by row. So a queue
that has some is purged page by page, each of which leaves a queue that is right; and deleted at once, with the rows of
its messages left to reclaim.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from basaltmq.queues.change import Change
from basaltmq.queues.leases.table import LeaseCall
from basaltmq.queues.ready.backing import TIMED
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import lp, prefix_range, queue_key, queue_stats_key, timed_of

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

PAGE: Final = 1000
"""Messages taken row by row in one batch."""

RANGES_MAX: Final = 1000
"""Ranges in one batch: every leased message parts one in two, and every range deleted costs later reads a little."""

EXPIRIES_MAX: Final = 10_000
"""Rows of the lease expiry deleted with a queue. Those of more leases go when their time comes: they lead nowhere."""

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


def purge(queue: Queue, change: Change, until_ns: int | None) -> tuple[int, bool]:
    """Delete what is ready, or a page of it; how many, and whether that was all.

    With `until_ns` only messages up to that place, page by page; None is for the first page, which may be everything.
    """
    queue.touch(change)
    queue.settle_down(change.now_ns)
    if until_ns is None and not (queue.stats.apart or queue.stats.transient or len(queue.leases) >= RANGES_MAX):
        count = len(queue)
        _purge_ranges(queue, change)
        return count, True
    until = (queue.shared.places.last_ns if until_ns is None else until_ns).to_bytes(8, "big")
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
    # Otherwise index rows of delayed messages are among them; those of purged ones go when their time comes.
    queue.stats.messages = len(leased)
    queue.stats.size_bytes = sum(e.size_bytes for e in leased)
    change.after(queue.backing.purge)


def delete_queue(queue: Queue, change: Change) -> None:
    """A queue is gone, for everyone and in one batch. What has bodies apart is left to be reclaimed."""
    calls = queue.leases.calls()
    for call in calls[:EXPIRIES_MAX]:
        queue.leases.delete_expiry(change.batch, call)
    change.after(lambda: _forget_leases(queue, calls))
    by_row = (Family.MESSAGES, Family.DELAYED) if queue.stats.apart else ()
    if by_row:
        queue.shared.reclaim.bury(change, queue.name, queue.shared.places.next(change))
    # A queue that never had a message has no rows in these; ranges that delete nothing would still slow reads down.
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
