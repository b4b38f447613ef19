"""Statistics per key: ready messages per fairness key, tokens per throttle key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from basaltmq.queues.entries.rows import split_sub_queue
from basaltmq.queues.ready.fair_queue import FairQueue
from basaltmq.queues.ready.priority_queue import PriorityQueue
from basaltmq.queues.throttle.token_buckets import TokenBuckets

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

KEYS_MAX: Final = 1_000
"""Maximum number of keys in one answer; the rest are left out."""

ROWS_MAX: Final = 20_000
"""Rows to scan on disk for one answer: some tens of milliseconds. A count that needs more rows is a lower bound."""


class FairnessKey(NamedTuple):
    """A fairness key with ready messages."""

    key: str
    pending: int
    deficit: int
    weight: int


class ThrottleKey(NamedTuple):
    """A throttle and its current number of whole tokens."""

    key: str
    tokens: int
    rate_per_s: float
    burst: int


def fairness_keys(queue: Queue, now_ns: int) -> tuple[int, list[FairnessKey]]:
    """Return how many keys have ready messages, and the first `KEYS_MAX` of them ordered by name."""
    queue.unpark_all(now_ns)
    found: dict[str, FairnessKey] = {}
    rows_left = ROWS_MAX
    backing = queue.backing
    assert isinstance(backing, FairQueue | PriorityQueue), f"queue {queue.name!r} has no sub-queues"
    subs = sorted(backing.sub_queues(), key=lambda each: each[0])
    names = {split_sub_queue(sub)[1] if queue.config.priorities_max else sub for sub, _, _, _ in subs}
    shown = set(sorted(names)[:KEYS_MAX])
    for sub, waiting, weight, deficit in subs:
        key = split_sub_queue(sub)[1] if queue.config.priorities_max else sub
        if key not in shown:
            continue
        resident = waiting.resident_len()
        pending = waiting.pending(resident + rows_left)
        rows_left -= pending - resident
        before = found.get(key)
        if before is not None:
            pending += before.pending
            deficit += before.deficit
        found[key] = FairnessKey(key, pending, deficit, weight)
    return len(names), sorted(found.values())


def throttle_keys(buckets: TokenBuckets, keys: Iterable[str], now_ns: int) -> list[ThrottleKey]:
    """Return the first `KEYS_MAX` throttles ordered by name."""
    found: list[ThrottleKey] = []
    for key in sorted(keys)[:KEYS_MAX]:
        limit = buckets.limit(key)
        if limit is not None:
            found.append(ThrottleKey(key, buckets.available(key, now_ns), limit.rate, limit.burst))
    return found
