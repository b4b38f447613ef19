"""TTL: messages leave on time, wherever in the queue they are (SPEC E7).

    message expiry   | lp(queue) | expires ns u64 | lp(sub-queue) | enqueued ns u64 | id (16) |  ->  nothing

Messages that all have the TTL of their queue expire in the order they came, so the head tells, and they need no index.
A message with a TTL of its own, or in a sub-queue of its own, has a row in the index and expires on time behind longer
ones. A timer (timers.py) says when to look. A leased message does not expire; it is looked at again when it comes back.
A transient message has no row in the index: it leaves on time at the head, and is never delivered late.

Expired messages go to the dead-letter queue, or are gone if there is none.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.change import Change
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT
from basaltmq.queues.lifecycle import timers
from basaltmq.queues.lifecycle.dead_letters import EXPIRED, bury
from basaltmq.queues.ready import rows
from basaltmq.queues.ready.backing import Entry
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import decode_timed_message_key, message_of, timed_message_bound

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

EXPIRE_MAX: Final = 100
"""Messages that expire in one batch: 1 ms of work, 10 ms if an exchange dead-letters them."""


def watch(queue: Queue, change: Change, expires_ns: int) -> None:
    """A message that expires then comes into the queue."""
    queue.shared.timers.set(change, expires_ns, timers.EXPIRY, queue.name)
    change.after(lambda: _look_again(queue, expires_ns))


def _look_again(queue: Queue, expires_ns: int) -> None:
    queue.expiry_from = min(queue.expiry_from, timed_message_bound(queue.name, expires_ns))


def expire(queue: Queue, change: Change, entries: list[Entry]) -> None:
    """Messages that were taken off the queue, with their rows in memory, have expired."""
    queue.touch(change)
    queue.stats.expired += len(entries)
    bury(queue, change, entries, EXPIRED)


def expire_due(queue: Queue, change: Change) -> bool:
    """Let messages go whose time has come; True if there are more."""
    now_ns = change.now_ns
    queue.settle_down(now_ns)
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
    sound = [key for key in index if _is_sound(queue, key)]
    message_keys = [message_of(key)[0] for key in sound]
    found = queue.shared.store.get_many(Family.MESSAGES, message_keys)
    waiting: list[Entry] = []
    for key, message_key, row in zip(sound, message_keys, found, strict=True):
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
        bury(queue, change, waiting, EXPIRED, waiting=True)
    after = end if len(index) < EXPIRE_MAX else index[-1] + b"\0"
    change.after(lambda: _looked(queue, after))
    return len(head) == EXPIRE_MAX or len(index) == EXPIRE_MAX


def _is_sound(queue: Queue, key: bytes) -> bool:
    """Whether a key of the index can be read; one that cannot is noted for the quarantine."""
    try:
        decode_timed_message_key(key)
    except CorruptionError as error:
        queue.shared.quarantine.note(Family.MESSAGE_EXPIRY, key, b"", str(error))
        return False
    return True


def _looked(queue: Queue, after: bytes) -> None:
    queue.expiry_from = after
