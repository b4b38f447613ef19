"""Message TTL: expires messages on time, wherever they are in the queue (SPEC E7).

    message expiry   | lp(queue) | expires ns u64 | lp(sub-queue) | enqueued ns u64 | id (16) |  ->  nothing

Messages with only the queue's TTL expire in arrival order, so checking the head is enough and they need no index row. A
message with its own TTL, or in its own sub-queue, has an index row and expires on time behind messages with a longer
TTL. A timer (timers.py) triggers the check. A leased message does not expire; it is checked when it returns. A
transient message has no index row: it expires on time only at the head, and is never delivered late.

Expired messages go to the dead-letter queue, or are dropped if there is none.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import Entry
from basaltmq.queues.lifecycle import timers
from basaltmq.queues.lifecycle.dead_letters import EXPIRED, dead_letter
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import decode_timed_message_key, message_of, timed_message_bound

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

EXPIRE_MAX: Final = 100
"""Messages expired per batch: 1 ms of work, 10 ms if an exchange dead-letters them."""


def watch(queue: Queue, change: Change, expires_ns: int) -> None:
    """Set a timer for a message that expires at `expires_ns`."""
    queue.shared.timers.set(change, expires_ns, timers.EXPIRY, queue.name)
    change.after(lambda: _lower_cursor(queue, expires_ns))


def _lower_cursor(queue: Queue, expires_ns: int) -> None:
    queue.expiry_from = min(queue.expiry_from, timed_message_bound(queue.name, expires_ns))


def expire(queue: Queue, change: Change, entries: list[Entry]) -> None:
    """Expire messages that were taken off the queue. Their rows are in memory."""
    queue.touch(change)
    queue.stats.expired += len(entries)
    dead_letter(queue, change, entries, EXPIRED)


def expire_due(queue: Queue, change: Change) -> bool:
    """Expire due messages. Return whether there are more."""
    now_ns = change.now_ns
    queue.unpark_all(now_ns)
    head = queue.backing.fetchwhile(
        lambda e: bool(e.expires_ns) and e.expires_ns <= now_ns, EXPIRE_MAX, sub=FAIRNESS_KEY_DEFAULT
    )
    if head:
        change.undo(lambda: queue.backing.put_back(head))
        expire(queue, change, head)
    taken = {e.key for e in head}
    start = max(queue.expiry_from, timed_message_bound(queue.name, 0))
    end = timed_message_bound(queue.name, now_ns + 1)
    index = [key for key, _ in islice(queue.shared.store.scan(Family.MESSAGE_EXPIRY, start, end), EXPIRE_MAX)]
    readable = [key for key in index if _is_readable(queue, key)]
    message_keys = [message_of(key)[0] for key in readable]
    found = queue.shared.store.get_many(Family.MESSAGES, message_keys)
    waiting: list[Entry] = []
    for key, message_key, row in zip(readable, message_keys, found, strict=True):
        change.batch.delete(Family.MESSAGE_EXPIRY, key)
        if row is None or message_key in taken or queue.leases.has_key(message_key):
            continue
        try:
            waiting.append(rows.read_entry(message_key, row))
        except CorruptionError as error:
            queue.shared.quarantine.note(Family.MESSAGES, message_key, row, str(error))
    if waiting:
        queue.touch(change)
        queue.stats.expired += len(waiting)
        dead_letter(queue, change, waiting, EXPIRED, waiting=True)
    after = end if len(index) < EXPIRE_MAX else index[-1] + b"\0"
    change.after(lambda: _set_cursor(queue, after))
    return len(head) == EXPIRE_MAX or len(index) == EXPIRE_MAX


def _is_readable(queue: Queue, key: bytes) -> bool:
    """Whether an index key is valid. An invalid key is noted for the quarantine."""
    try:
        decode_timed_message_key(key)
    except CorruptionError as error:
        queue.shared.quarantine.note(Family.MESSAGE_EXPIRY, key, b"", str(error))
        return False
    return True


def _set_cursor(queue: Queue, after: bytes) -> None:
    queue.expiry_from = after
