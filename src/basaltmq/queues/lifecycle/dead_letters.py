"""Where messages go that could not be consumed: to the queue's dead-letter queue, with their history (SPEC C9, E7).

A message's history is in its header `x-death`, one record per (queue, reason), the latest first, as JSON text:

    [{"queue": ..., "reason": ..., "count": n, "first_ms": ..., "last_ms": ..., "attempts": n}, ...]

so that scripts, people and wire protocols read it like any other header. `x-first-death-queue` names the queue that a
redrive returns it to.

A cycle (A's dead letters expire in B, whose dead letters go to A) would turn for ever: a message that comes to a queue
where it died before is dropped and counted, unless somebody rejected it or its attempts failed on the way round, which
is a worker's decision and not the machine's.

A layer above may route dead letters itself (an exchange with its bindings): it names the queues and the properties each
message goes on with, and keeps its own history in them. All of that is in the batch in which the message dies. The
first copy keeps the message's id, others have their own; a body apart is shared between them.

A message keeps its id and its body; it gets a place at the end of the other queue, that queue's TTL and no attempts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from basaltmq.decoding import json_decoder
from basaltmq.queues.change import Change
from basaltmq.queues.config import DEAD_LETTERS, QueueConfig
from basaltmq.queues.events.event import Kind
from basaltmq.queues.message import QUEUE_NAME_BYTES_MAX, Message
from basaltmq.queues.ready import rows
from basaltmq.queues.ready.backing import APART, SHARED, TRANSIENT, Entry

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

DeadLetterRouter: TypeAlias = Callable[[QueueConfig, Message, str], "tuple[Sequence[str], bytes] | None"]
"""(queue, message, reason) to the names of the queues a dead letter goes to (none: it is dropped; names without a queue
are left out) and its properties from there on; None: to the queue's own dead-letter queue."""


class Death(msgspec.Struct, omit_defaults=True):
    """How often a message died of one reason in one queue."""

    queue: str
    reason: str
    count: int
    first_ms: int
    last_ms: int
    attempts: int = 0


_DEATHS: Final = json_decoder(list[Death])


def history_of(message: Message) -> list[Death]:
    """A message's history, the latest first. A header a publisher filled with something else is no history."""
    text = message.headers.get(HISTORY)
    if text is None:
        return []
    try:
        return _DEATHS(text)
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
    if queue.shared.route_dead is not None:
        entries = _bury_routed(queue, change, entries, reason, waiting, queue.shared.route_dead)
    name = queue.config.dead_letter_queue
    if name is None and reason == ATTEMPTS and queue.config.parks_failed:
        name = parked_in(queue.name)
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
    _tell(queue, change, reason, [entry for entry, _ in moving], gone)
    _drop(queue, change, gone, waiting)
    if moving:
        assert name is not None
        _leave(queue, change, [entry for entry, _ in moving], waiting)
        target = queue.shared.find(change, name)
        target.admit(change, settle_in(target, change, moving))
        _check_limits(change, target)


def parked_in(queue: str) -> str | None:
    """The queue that takes what a queue without a dead-letter queue gave up; None if its name would be too long."""
    name = queue + DEAD_LETTERS
    return name if len(name.encode()) <= QUEUE_NAME_BYTES_MAX and not queue.endswith(DEAD_LETTERS) else None


def _bury_routed(
    queue: Queue, change: Change, entries: Sequence[Entry], reason: str, waiting: bool, route: DeadLetterRouter
) -> list[Entry]:
    """Let the layer above say where dead letters go; those it has no opinion on."""
    own: list[Entry] = []
    gone: list[Entry] = []
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
            gone.append(entry)
    leaving = [entry for entry, _, _ in moving]
    _tell(queue, change, reason, leaving, gone)
    _drop(queue, change, gone, waiting)
    _leave(queue, change, leaving, waiting)
    arriving: dict[Queue, list[tuple[Entry, Message]]] = {}
    for entry, message, targets in moving:
        for target, copy in zip(targets, _copies(queue, change, entry, message, len(targets)), strict=True):
            arriving.setdefault(target, []).append(copy)
    for target, copies in arriving.items():
        target.admit(change, settle_in(target, change, copies))
        _check_limits(change, target)
    return own


def _copies(queue: Queue, change: Change, entry: Entry, message: Message, count: int) -> list[tuple[Entry, Message]]:
    """So many messages of one, the first of which is itself."""
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


def _drop(queue: Queue, change: Change, gone: list[Entry], waiting: bool) -> None:
    if not gone:
        return
    if waiting:
        queue.remove(change, gone, keep_bodies=False)
    else:
        queue.delete(change, gone)


def _tell(queue: Queue, change: Change, reason: str, moving: Sequence[Entry], gone: Sequence[Entry]) -> None:
    note = queue.shared.events.note
    if reason == EXPIRED:
        note(change, Kind.EXPIRED, queue, [*moving, *gone], tried=True)
    note(change, Kind.DEAD_LETTERED, queue, moving, tried=True)
    note(change, Kind.DROPPED, queue, gone, tried=True)


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
    target.shared.events.note(change, Kind.ENQUEUED, target, entries)
    return entries
