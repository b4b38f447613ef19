"""Dead-letters messages: moves them to the queue's dead-letter queue with their history (SPEC C9, E7).

The header `x-death` holds a message's history as JSON text, one record per (queue, reason), latest first:

    [{"queue": ..., "reason": ..., "count": n, "first_ms": ..., "last_ms": ..., "attempts": n}, ...]

Scripts, operators and wire protocols read it like any other header. `x-first-death-queue` names the queue that a
redrive returns the message to.

Cycles (A's dead letters expire in B, whose dead letters go to A) would never end. So a message that returns to a queue
where it died before is dropped and counted. Exception: a consumer rejected it, or its attempts failed, since then.

A layer above may route dead letters (an exchange with bindings). It names the target queues and the new properties, and
keeps its own history in them. All of that is in the batch in which the message dies. The first copy keeps the message's
id, the others get new ids, and all share one separate body.

A message keeps its id and body. It goes to the end of the other queue, with that queue's TTL and no attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from basaltmq.clock import NS_PER_MS
from basaltmq.decoding import json_decoder
from basaltmq.queues.change import Change
from basaltmq.queues.config import DEAD_LETTERS, QueueConfig
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART, SHARED, TRANSIENT, Entry
from basaltmq.queues.events.event import Kind
from basaltmq.queues.message import QUEUE_NAME_BYTES_MAX, Message

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
"""Records of one message's history. The oldest are dropped."""

_CONSUMER_REASONS: Final = (REJECTED, ATTEMPTS)

DeadLetterRouter: TypeAlias = Callable[[QueueConfig, Message, str], "tuple[Sequence[str], bytes] | None"]
"""Maps (queue, message, reason) to the target queue names and the new properties. Names of missing queues are ignored,
and without a target the message is dropped. None: use the queue's own dead-letter queue."""


class Death(msgspec.Struct, omit_defaults=True):
    """How often a message died for one reason in one queue."""

    queue: str
    reason: str
    count: int
    first_ms: int
    last_ms: int
    attempts: int = 0


_DEATHS: Final = json_decoder(list[Death])


def history_of(message: Message) -> list[Death]:
    """Return a message's history, latest first. A header that is not a valid history counts as none."""
    text = message.headers.get(HISTORY)
    if text is None:
        return []
    try:
        return _DEATHS(text)
    except msgspec.DecodeError:
        return []


def record(message: Message, queue: str, reason: str, now_ms: int) -> list[Death]:
    """Add a death to a message's headers, and return the history."""
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
    """Whether the message died in `target` before, and no consumer rejected or failed it since."""
    for death in deaths:
        if death.reason in _CONSUMER_REASONS:
            return False
        if death.queue == target:
            return True
    return False


def dead_letter(queue: Queue, change: Change, entries: Sequence[Entry], reason: str, *, waiting: bool = False) -> None:
    """Move dead messages to the dead-letter queue, or drop them if there is none.

    They were taken off the queue, or are still in it (`waiting`). Their rows are in memory.
    """
    queue.touch(change)
    if queue.shared.route_dead is not None:
        entries = _dead_letter_routed(queue, change, entries, reason, waiting, queue.shared.route_dead)
    name = queue.config.dead_letter_queue
    if name is None and reason == ATTEMPTS and queue.config.parks_failed:
        name = default_dead_letter_queue(queue.name)
    moving: list[tuple[Entry, Message]] = []
    dropped: list[Entry] = []
    for entry in entries:
        if name is None:
            queue.stats.dropped += 1
            dropped.append(entry)
            continue
        message = queue.open(entry)
        if is_cycle(record(message, queue.name, reason, change.now_ns // NS_PER_MS), name):
            queue.stats.cycles += 1
            queue.stats.dropped += 1
            dropped.append(entry)
        else:
            queue.stats.dead_lettered += 1
            moving.append((entry, message))
    _record_events(queue, change, reason, [entry for entry, _ in moving], dropped)
    _drop(queue, change, dropped, waiting)
    if moving:
        assert name is not None
        _leave(queue, change, [entry for entry, _ in moving], waiting)
        target = queue.shared.find(change, name)
        target.admit(change, relocate(target, change, moving))
        _check_limits(change, target)


def default_dead_letter_queue(queue: str) -> str | None:
    """Return the dead-letter queue of a queue that configures none; None if the name is too long or `queue` is one
    itself."""
    name = queue + DEAD_LETTERS
    return name if len(name.encode()) <= QUEUE_NAME_BYTES_MAX and not queue.endswith(DEAD_LETTERS) else None


def _dead_letter_routed(
    queue: Queue, change: Change, entries: Sequence[Entry], reason: str, waiting: bool, route: DeadLetterRouter
) -> list[Entry]:
    """Route dead letters with `route`, and return those that it leaves to the queue's own dead-letter queue."""
    own: list[Entry] = []
    dropped: list[Entry] = []
    moving: list[tuple[Entry, Message, list[Queue]]] = []
    bodies = queue.bodies(change, [entry for entry in entries if entry.flags & APART])
    for entry in entries:
        if entry.flags & APART and entry.key not in bodies:
            continue
        message = queue.open(entry, bodies.get(entry.key))
        routed = route(queue.config, message, reason)
        if routed is None:
            own.append(entry)
            continue
        names, message.properties = routed
        targets = [queue.shared.find(change, name) for name in dict.fromkeys(names) if queue.shared.exists(name)]
        if targets:
            queue.stats.dead_lettered += 1
            message.headers.setdefault(FIRST_QUEUE, queue.name)
            moving.append((entry, message, targets))
        else:
            queue.stats.dropped += 1
            dropped.append(entry)
    leaving = [entry for entry, _, _ in moving]
    _record_events(queue, change, reason, leaving, dropped)
    _drop(queue, change, dropped, waiting)
    _leave(queue, change, leaving, waiting)
    arriving: dict[Queue, list[tuple[Entry, Message]]] = {}
    for entry, message, targets in moving:
        for target, copy in zip(targets, _copies(queue, change, entry, message, len(targets)), strict=True):
            arriving.setdefault(target, []).append(copy)
    for target, copies in arriving.items():
        target.admit(change, relocate(target, change, copies))
        _check_limits(change, target)
    return own


def _copies(queue: Queue, change: Change, entry: Entry, message: Message, count: int) -> list[tuple[Entry, Message]]:
    """Return `count` messages: the original, and copies with new ids."""
    if count == 1:
        return [(entry, message)]
    copies = [message]
    copies += [
        msgspec.structs.replace(message, id=queue.shared.ids.next(), headers=dict(message.headers))
        for _ in range(count - 1)
    ]
    if entry.flags & APART:
        body_id = rows.body_of(entry.row)
        entry = msgspec.structs.replace(entry, flags=entry.flags | SHARED)
        for copy in copies:
            queue.shared.content.refer(change, body_id, copy.id)
    return [(entry, copy) for copy in copies]


def _check_limits(change: Change, target: Queue) -> None:
    change.after(lambda: target.shared.check_limits(target.name))


def _drop(queue: Queue, change: Change, dropped: list[Entry], waiting: bool) -> None:
    if not dropped:
        return
    if waiting:
        queue.remove(change, dropped, keep_bodies=False)
    else:
        queue.delete(change, dropped)


def _record_events(
    queue: Queue, change: Change, reason: str, moving: Sequence[Entry], dropped: Sequence[Entry]
) -> None:
    note = queue.shared.events.note
    if reason == EXPIRED:
        note(change, Kind.EXPIRED, queue, [*moving, *dropped], tried=True)
    note(change, Kind.DEAD_LETTERED, queue, moving, tried=True)
    note(change, Kind.DROPPED, queue, dropped, tried=True)


def _leave(queue: Queue, change: Change, entries: list[Entry], waiting: bool) -> None:
    if waiting:
        queue.remove(change, entries, keep_bodies=True)
    else:
        queue.leave(change, entries)


def relocate(target: Queue, change: Change, moving: Sequence[tuple[Entry, Message]]) -> list[Entry]:
    """Return entries at the end of `target` for messages that left another queue. The caller admits or delays them."""
    target.touch(change)
    ttl_ms = target.config.ttl_ms
    entries: list[Entry] = []
    for entry, message in moving:
        message.queue = target.name
        message.enqueued_ns = target.shared.enqueue_clock.next(change)
        message.attempts = 0
        message.leased_ns = 0
        message.expires_ns = 0 if ttl_ms is None else change.now_ns + ttl_ms * NS_PER_MS
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
    target.shared.events.note(change, Kind.ENQUEUED, target, entries)
    return entries
