"""Handles failed deliveries (SPEC C8, P5).

A nack and an expired lease take the same path. The attempt is counted, the on_failure script runs, and the attempt
limit applies. Then the message is retried in its position, retried after a delay, or dead-lettered. The new count is in
the row before the message can be leased again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from basaltmq.clock import NS_PER_MS
from basaltmq.queues.change import Change
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import RETURNED, SPILLED, TRANSIENT, Entry
from basaltmq.queues.events.event import Kind
from basaltmq.queues.lifecycle.dead_letters import ATTEMPTS, LAST_ERROR, REJECTED, dead_letter
from basaltmq.queues.lifecycle.delays import delay
from basaltmq.queues.lifecycle.script_results import Verdict, on_failure
from basaltmq.queues.lifecycle.ttl import expire
from basaltmq.store.families import Family

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

ERROR_BYTES_MAX: Final = 1024
"""Bytes of a consumer's error text that are kept in a header."""

LEASE_EXPIRED: Final = "the lease expired"

Edit: TypeAlias = Callable[[bytes], bytes]
"""Returns the changed properties of a message."""

_ATTEMPTS_MAX: Final = (1 << 32) - 1


def fail(
    queue: Queue,
    change: Change,
    entries: Sequence[Entry],
    error: str,
    *,
    delay_ms: int = 0,
    reject: bool = False,
    edit: Edit | None = None,
    is_failure: bool = True,
) -> None:
    """Fail messages that left their lease. With `reject` they are dead-lettered regardless of limits and scripts.
    `edit` changes their properties. Without `is_failure` no attempt is counted, and no script runs."""
    queue.touch(change)
    entries = queue.load_rows(entries, change)
    before = [(entry, entry.row, entry.flags) for entry in entries]
    change.undo(lambda: _restore(before))
    queue.stats.failed += len(entries) if is_failure else 0
    dead: list[Entry] = []
    exhausted: list[Entry] = []
    later: list[tuple[Entry, int]] = []
    retried: list[Entry] = []
    expired: list[Entry] = []
    kept_error = error.encode(errors="replace")[:ERROR_BYTES_MAX].decode(errors="ignore")
    attempts_max = _ATTEMPTS_MAX + 1 if queue.config.attempts_max is None else queue.config.attempts_max
    limit = 2 * _ATTEMPTS_MAX if queue.config.delivery_limit is None else queue.config.delivery_limit
    messages = [queue.open(entry) for entry in entries]
    for message in messages:
        message.attempts = min(message.attempts + is_failure, _ATTEMPTS_MAX)
        if edit is not None:
            message.properties = edit(message.properties)
        if kept_error:
            message.headers[LAST_ERROR] = kept_error
    verdicts: list[Verdict] = [(False, None)] * len(messages)
    if is_failure:
        verdicts = on_failure(queue, messages, kept_error)
    for entry, message in zip(entries, messages, strict=True):
        entry.row = queue.reseal(entry, message)
    kind = Kind.LAPSED if error is LEASE_EXPIRED else Kind.NACKED
    queue.shared.events.note(change, kind, queue, entries, tried=True)
    for entry, message, (is_dead, script_delay_ms) in zip(entries, messages, verdicts, strict=True):
        wait_ms = delay_ms if script_delay_ms is None else script_delay_ms
        if reject or is_dead:
            dead.append(entry)
        elif message.attempts >= attempts_max or message.attempts + rows.returns_of(entry.row) > limit:
            exhausted.append(entry)
        elif entry.expires_ns and entry.expires_ns <= change.now_ns:
            expired.append(entry)
        elif wait_ms > 0:
            later.append((entry, change.now_ns + wait_ms * NS_PER_MS))
        else:
            retried.append(entry)
    if dead:
        dead_letter(queue, change, dead, REJECTED)
    if exhausted:
        dead_letter(queue, change, exhausted, ATTEMPTS)
    if expired:
        expire(queue, change, expired)
    if later:
        queue.set_aside(change, [entry for entry, _ in later])
        delay(queue, change, later)
    if retried:
        queue.has_returned = True
        _put_changed(change, retried)
        queue.requeue(change, retried)


def count_returns(queue: Queue, change: Change, entries: list[Entry], limit: int) -> list[Entry]:
    """Count a return without a failure in each row. Return the messages below the limit, and dead-letter the others."""
    entries = queue.load_rows(entries, change)
    before = [(entry, entry.row, entry.flags) for entry in entries]
    change.undo(lambda: _restore(before))
    staying: list[Entry] = []
    exhausted: list[Entry] = []
    for entry in entries:
        entry.row = rows.count_return(entry.row)
        came_back = rows.returns_of(entry.row) + rows.attempts_of(entry.row)
        (exhausted if came_back > limit else staying).append(entry)
    if exhausted:
        dead_letter(queue, change, exhausted, ATTEMPTS)
    _put_changed(change, staying)
    return staying


def _put_changed(change: Change, entries: Sequence[Entry]) -> None:
    """Write changed rows. Rows that were spilled to disk are in memory again."""
    for entry in entries:
        entry.flags |= RETURNED
        if entry.flags & SPILLED:
            change.batch.delete(Family.TRANSIENT, entry.key)
            entry.flags &= ~SPILLED
        if not entry.flags & TRANSIENT:
            change.batch.put(Family.MESSAGES, entry.key, entry.row)


def _restore(entries: Sequence[tuple[Entry, bytes, int]]) -> None:
    for entry, row, flags in entries:
        entry.row, entry.flags = row, flags


def expire_lease(queue: Queue, change: Change, token: int) -> int:
    """Fail the messages of an expired lease, and return their number."""
    entries = queue.take(change, token, None)
    fail(queue, change, entries, LEASE_EXPIRED)
    return len(entries)
