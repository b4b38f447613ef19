"""Messages that were taken off a queue are handed to a consumer: a lease call, and a delivery for each.

The rows of what is handed out are dropped from memory; the deliveries have them. Messages that are nothing but what is
in their rows stay columns all the way (plain.py); whatever has to be said of one of them takes the other way for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Final

from basaltmq.queues.change import Change
from basaltmq.queues.events.event import LEASED
from basaltmq.queues.leases.delivery import PRIORITY, REDELIVERED, Deliveries, Delivery
from basaltmq.queues.leases.table import LeaseCall
from basaltmq.queues.ready.backing import RETURNED, SPILLED, TRANSIENT, Entry
from basaltmq.queues.ready.plain import Plain

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

_NOWHERE: Final = bytes(8)
"""Below every place."""


def take_plain(queue: Queue, change: Change, count: int, size_bytes_max: int | None) -> Plain | None:
    """Up to `count` messages off the head as columns, if they are such and all of them fit; they go back if the change
    fails. Otherwise None, and nothing is taken."""
    if queue.shared.throttles or queue.throttling is not None or count < 1:
        return None
    plain = queue.backing.fetch_plain(count)
    if plain is None:
        return None
    until = _until(queue)
    if (size_bytes_max is not None and plain.size_bytes > size_bytes_max) or (
        until != _NOWHERE and plain.keys[0][-24:-16] <= until
    ):
        queue.backing.put_back(plain.entries())
        return None
    change.undo(lambda: queue.backing.put_back(plain.entries()))
    return plain


def lend_plain(queue: Queue, change: Change, plain: Plain, consumer: str, visibility_ms: int | None) -> Deliveries:
    """Hand columns out."""
    token = queue.shared.tokens.next()
    plain.id_bytes()
    ids = plain.ids
    assert ids is not None, "whoever has their bytes has them"
    expires_ns = queue.lease_until(change.now_ns, visibility_ms)
    _begin(queue, change, LeaseCall(token, consumer, change.now_ns, expires_ns, {}, plain.without_rows(), ids))
    queue.shared.events.note(change, LEASED, queue, plain, consumer, tried=True)
    return Deliveries(token, ids, plain.keys, plain.rows)


def lend(
    queue: Queue,
    change: Change,
    entries: list[Entry],
    consumer: str,
    visibility_ms: int | None,
    bodies: Mapping[bytes, bytes],
) -> list[Delivery]:
    """Hand entries out, whose rows are in memory; `bodies` are those kept apart, by key."""
    token = queue.shared.tokens.next()
    message_keys = [e.key for e in entries]
    ids = [key[-16:] for key in message_keys]
    expires_ns = queue.lease_until(change.now_ns, visibility_ms)
    call = LeaseCall(token, consumer, change.now_ns, expires_ns, dict(zip(ids, entries, strict=True)))
    _begin(queue, change, call)
    if _are_plain(queue, entries, message_keys):
        deliveries = list(map(Delivery, ids, repeat(token), message_keys, [e.row for e in entries]))
        for entry in entries:
            entry.row = b""
    else:
        deliveries = _hand_out(queue, token, entries, bodies)
    queue.shared.events.note(change, LEASED, queue, deliveries, consumer, keys=message_keys, tried=True)
    return deliveries


def _begin(queue: Queue, change: Change, call: LeaseCall) -> None:
    queue.leases.add(change.batch, call)
    change.undo(lambda: queue.leases.forget(call))
    change.after(lambda: _expect_expiry(queue, call))
    change.marks.add(call)
    queue.used_ns = change.now_ns


def _expect_expiry(queue: Queue, call: LeaseCall) -> None:
    if not call.is_settled:
        queue.shared.lease_expiry.add(call.expires_ns, queue.name, call.token)


def _until(queue: Queue) -> bytes:
    """Messages up to this place may have been delivered before."""
    return max(queue.leases.returned_ns, queue.shared.places.crash_ns).to_bytes(8, "big")


def _are_plain(queue: Queue, entries: list[Entry], message_keys: list[bytes]) -> bool:
    """Whether there is nothing to say of messages but what is in their rows."""
    if queue.config.priorities_max or [e for e in entries if e.flags]:
        return False
    until = _until(queue)
    return until == _NOWHERE or not [key for key in message_keys if key[-24:-16] <= until]


def _hand_out(queue: Queue, token: int, entries: list[Entry], bodies: Mapping[bytes, bytes]) -> list[Delivery]:
    until = _until(queue)
    always = PRIORITY if queue.config.priorities_max else 0
    deliveries: list[Delivery] = []
    for entry in entries:
        key, row = entry.key, entry.row
        came_back = entry.flags & RETURNED or key[-24:-16] <= until
        marks = always | REDELIVERED if came_back else always
        deliveries.append(Delivery(key[-16:], token, key, row, bodies.get(key), marks))
        if entry.flags & (TRANSIENT | SPILLED) != TRANSIENT:
            entry.row = b""
    return deliveries
