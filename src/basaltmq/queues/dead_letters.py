"""Where messages go that could not be consumed: to the queue's dead-letter queue, with their history (SPEC C9, E7).

A message's history is in its header `x-death`, one record per (queue, reason), the latest first, as JSON text:

    [{"queue": ..., "reason": ..., "count": n, "first_ms": ..., "last_ms": ..., "attempts": n}, ...]

so that scripts, people and wire protocols read it like any other header. `x-first-death-queue` names the queue that a
redrive returns it to.

A cycle (A's dead letters expire in B, whose dead letters go to A) would turn for ever: a message that comes to a queue
where it died before is dropped and counted, unless somebody rejected it or its attempts failed on the way round, which
is a worker's decision and not the machine's.

A message keeps its id and its body; it gets a place at the end of the other queue, that queue's TTL and no attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from basaltmq.queues import rows
from basaltmq.queues.backing import SHARED, TRANSIENT, Entry
from basaltmq.queues.change import Change
from basaltmq.queues.message import Message

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

EXPIRED: Final = "expired"
REJECTED: Final = "rejected"
ATTEMPTS: Final = "delivery_limit"
LENGTH: Final = "maxlen"

HISTORY: Final = "x-death"
FIRST_QUEUE: Final = "x-first-death-queue"
LAST_ERROR: Final = "x-last-error"

HISTORY_MAX: Final = 32
"""Records of one message's history; the oldest go."""

_MS: Final = 1_000_000
_WORKERS: Final = (REJECTED, ATTEMPTS)


class Death(msgspec.Struct, omit_defaults=True):
    """How often a message died of one reason in one queue."""

    queue: str
    reason: str
    count: int
    first_ms: int
    last_ms: int
    attempts: int = 0


_DEATHS: Final = msgspec.json.Decoder(list[Death])


def history_of(message: Message) -> list[Death]:
    """A message's history, the latest first. A header a publisher filled with something else is no history."""
    text = message.headers.get(HISTORY)
    if text is None:
        return []
    try:
        return _DEATHS.decode(text)
    except msgspec.DecodeError:
        return []


def record(message: Message, queue: str, reason: str, now_ms: int) -> list[Death]:
    """Write a death into a message's headers."""
    deaths = history_of(message)
    death = next((d for d in deaths if d.queue == queue and d.reason == reason), None)
    if death is None:
        death = Death(queue, reason, 0, now_ms, now_ms)
    else:
        deaths.remove(death)
    death.count += 1
    death.last_ms = now_ms
    death.attempts += message.attempts
    deaths.insert(0, death)
    del deaths[HISTORY_MAX:]
    message.headers[HISTORY] = msgspec.json.encode(deaths).decode()
    message.headers.setdefault(FIRST_QUEUE, queue)
    return deaths


def is_cycle(deaths: Sequence[Death], target: str) -> bool:
    """True if the message died in `target` before, and no worker had a hand in anything since."""
    for death in deaths:
        if death.reason in _WORKERS:
            return False
        if death.queue == target:
            return True
    return False


def bury(queue: Queue, change: Change, entries: Sequence[Entry], reason: str, *, waiting: bool = False) -> None:
    """Messages are dead: to the dead-letter queue with them, or gone for good.

    They were taken off the queue, or still are somewhere in it (`waiting`). Their rows are in memory.
    """
    queue.touch(change)
    name = queue.config.dead_letter_queue
    moving: list[tuple[Entry, Message]] = []
    gone: list[Entry] = []
    for entry in entries:
        if name is None:
            queue.stats.dropped += 1
            gone.append(entry)
            continue
        message = queue.open(entry)
        if is_cycle(record(message, queue.name, reason, change.now_ns // _MS), name):
            queue.stats.cycles += 1
            queue.stats.dropped += 1
            gone.append(entry)
        else:
            queue.stats.dead_lettered += 1
            moving.append((entry, message))
    if gone:
        if waiting:
            queue.remove(change, gone, keep_bodies=False)
        else:
            queue.delete(change, gone)
    if moving:
        assert name is not None
        _leave(queue, change, [entry for entry, _ in moving], waiting)
        target = queue.shared.find(change, name)
        target.admit(change, settle_in(target, change, moving))
        change.after(lambda: queue.shared.check_limits(target.name))


def _leave(queue: Queue, change: Change, entries: list[Entry], waiting: bool) -> None:
    if waiting:
        queue.remove(change, entries, keep_bodies=True)
    else:
        queue.leave(change, entries)


def settle_in(target: Queue, change: Change, moving: Sequence[tuple[Entry, Message]]) -> list[Entry]:
    """Entries, at the end of this queue, of messages that left another one. The caller admits or delays them."""
    target.touch(change)
    ttl_ms = target.config.ttl_ms
    entries: list[Entry] = []
    for entry, message in moving:
        message.queue = target.name
        message.enqueued_ns = target.shared.places.next(change)
        message.attempts = 0
        message.leased_ns = 0
        message.expires_ns = 0 if ttl_ms is None else change.now_ns + ttl_ms * _MS
        entries.append(
            target.entry_of(
                change,
                message,
                body_id=rows.body_of(entry.row),
                body_bytes=entry.size_bytes,
                shared_body=bool(entry.flags & SHARED),
                transient=bool(entry.flags & TRANSIENT),
            )
        )
    target.stats.enqueued += len(entries)
    return entries
