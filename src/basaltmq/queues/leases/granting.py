"""Grants leases: creates a lease call for fetched messages, and a delivery for each message.

Rows of delivered messages are dropped from memory, because the deliveries hold them. Messages whose rows hold
everything there is to know about them stay in columns (`Plain`). If one message needs more, all messages of the call
become entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Final

from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import RETURNED, SPILLED, TRANSIENT, Entry
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.events.event import LEASED
from basaltmq.queues.leases.delivery import PRIORITY, REDELIVERED, Deliveries, Delivery
from basaltmq.queues.leases.table import LeaseCall

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

_BEFORE_ALL: Final = bytes(8)
"""Sorts before every enqueue time in a key."""


def take_plain(queue: Queue, change: Change, count: int, size_bytes_max: int | None) -> Plain | None:
    """Take up to `count` messages off the head as columns, if they are kept in columns and all of them fit. They go
    back if the change fails. Otherwise return None and take nothing."""
    if queue.shared.throttles or queue.throttling is not None or count < 1:
        return None
    plain = queue.backing.fetch_plain(count)
    if plain is None:
        return None
    until = _maybe_redelivered_to(queue)
    if (size_bytes_max is not None and plain.size_bytes > size_bytes_max) or (
        until != _BEFORE_ALL and plain.keys[0][-24:-16] <= until
    ):
        queue.backing.put_back(plain.entries())
        return None
    change.undo(lambda: queue.backing.put_back(plain.entries()))
    return plain


def grant_plain(queue: Queue, change: Change, plain: Plain, consumer: str, visibility_ms: int | None) -> Deliveries:
    """Lease messages that are in columns."""
    token = queue.shared.tokens.next()
    plain.id_bytes()
    ids = plain.ids
    assert ids is not None, "id_bytes() sets the ids"
    expires_ns = queue.lease_until(change.now_ns, visibility_ms)
    _begin(queue, change, LeaseCall(token, consumer, change.now_ns, expires_ns, {}, plain.without_rows(), ids))
    queue.shared.events.note(change, LEASED, queue, plain, consumer, tried=True)
    return Deliveries(token, ids, plain.keys, plain.rows)


def grant(
    queue: Queue,
    change: Change,
    entries: list[Entry],
    consumer: str,
    visibility_ms: int | None,
    bodies: Mapping[bytes, bytes],
) -> list[Delivery]:
    """Lease entries whose rows are in memory. `bodies` are the payloads stored separately, by key."""
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
        deliveries = _deliveries(queue, token, entries, bodies)
    queue.shared.events.note(change, LEASED, queue, deliveries, consumer, keys=message_keys, tried=True)
    return deliveries


def _begin(queue: Queue, change: Change, call: LeaseCall) -> None:
    queue.leases.add(change.batch, call)
    change.undo(lambda: queue.leases.forget(call))
    change.after(lambda: _add_expiry(queue, call))
    change.marks.add(call)
    queue.used_ns = change.now_ns


def _add_expiry(queue: Queue, call: LeaseCall) -> None:
    if not call.is_settled:
        queue.shared.lease_expiry.add(call.expires_ns, queue.name, call.token)


def _maybe_redelivered_to(queue: Queue) -> bytes:
    """Return the enqueue time up to which messages may have been delivered before."""
    return max(queue.leases.returned_ns, queue.shared.enqueue_clock.crash_ns).to_bytes(8, "big")


def _are_plain(queue: Queue, entries: list[Entry], message_keys: list[bytes]) -> bool:
    """Whether the rows hold everything there is to know about the messages."""
    if queue.config.priorities_max or [e for e in entries if e.flags]:
        return False
    until = _maybe_redelivered_to(queue)
    return until == _BEFORE_ALL or not [key for key in message_keys if key[-24:-16] <= until]


def _deliveries(queue: Queue, token: int, entries: list[Entry], bodies: Mapping[bytes, bytes]) -> list[Delivery]:
    until = _maybe_redelivered_to(queue)
    always = PRIORITY if queue.config.priorities_max else 0
    deliveries: list[Delivery] = []
    for entry in entries:
        key, row = entry.key, entry.row
        is_redelivered = entry.flags & RETURNED or key[-24:-16] <= until
        marks = always | REDELIVERED if is_redelivered else always
        deliveries.append(Delivery(key[-16:], token, key, row, bodies.get(key), marks))
        if entry.flags & (TRANSIENT | SPILLED) != TRANSIENT:
            entry.row = b""
    return deliveries
