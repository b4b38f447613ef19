"""Verifies the rows of the queue plane: lists quarantined rows and those the plane would quarantine (P7).

`store.verify` checks files; this checks their content. It works on any view of a store and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.config import decode_config
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.entries.quarantine import queue_of, records
from basaltmq.queues.leases.table import decode_lease_call
from basaltmq.queues.stats import QueueStats
from basaltmq.queues.transactions.branch_rows import decode_branch, decode_draft
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as queue_keys

LINES_MAX: Final = 1000
"""Lines of a report. A store with more faults needs a restore from backup, not a longer list."""

_FLOOR_BYTES: Final = 8
_DEDUP_BYTES: Final = 24


def verify_rows(store: Reader) -> list[str]:
    """Return one line per row of the queue plane that is quarantined or unreadable; empty if all is well."""
    lines: list[str] = []
    for line in _lines(store):
        lines.append(line)
        if len(lines) == LINES_MAX:
            lines.append(f"the list ends after {LINES_MAX} lines; there may be more")
            break
    return lines


def _lines(store: Reader) -> Iterator[str]:
    for record in records(store):
        yield record.line()
    for family, check in _CHECKS.items():
        for key, value in store.scan(family):
            try:
                check(store, key, value)
            except CorruptionError as error:
                queue = queue_of(family, key)
                where = f"queue {queue!r}: " if queue else ""
                yield f"{where}row {key[:48].hex()} in family {family.label} cannot be read: {error}"


def _message(store: Reader, key: bytes, value: bytes) -> None:
    queue = queue_keys.decode_message_key(key)[0]
    _row(store, key, value)
    if store.get(Family.QUEUES, queue_keys.queue_key(queue)) is None and not _is_deleted(store, queue):
        raise CorruptionError(f"queue {queue!r} does not exist; create it to access its messages, then restart it")


def _delayed(store: Reader, key: bytes, value: bytes) -> None:
    queue_keys.decode_timed_message_key(key)
    _row(store, queue_keys.message_of(key)[0], value)


def _row(store: Reader, key: bytes, value: bytes) -> None:
    entry = rows.read_entry(key, value)
    if entry.flags & APART:
        body = store.get(Family.MESSAGE_CONTENT, queue_keys.body_key(rows.body_of(value)))
        if body is None or len(body) != entry.size_bytes:
            raise CorruptionError(f"the body of message {key[-16:].hex()} is missing or truncated")


def _is_deleted(store: Reader, queue: str) -> bool:
    return store.get(Family.DELETED_QUEUES, queue_keys.deleted_queue_key(queue)) is not None


def _lease_call(store: Reader, key: bytes, value: bytes) -> None:
    decode_lease_call(*queue_keys.decode_lease_key(key), value)


def _queue(store: Reader, key: bytes, value: bytes) -> None:
    decode_config(queue_keys.decode_queue_key(key), value)


def _stats(store: Reader, key: bytes, value: bytes) -> None:
    QueueStats.decode(queue_keys.decode_queue_stats_key(key), value)


def _dedup(store: Reader, key: bytes, value: bytes) -> None:
    queue_keys.decode_dedup_key(key)
    _exactly("a deduplication row", value, _DEDUP_BYTES)


def _deleted_queue(store: Reader, key: bytes, value: bytes) -> None:
    queue_keys.decode_deleted_queue_key(key)
    _exactly("the tombstone of a queue", value, _FLOOR_BYTES)


def _branch(store: Reader, key: bytes, value: bytes) -> None:
    decode_branch(key, value)


def _draft(store: Reader, key: bytes, value: bytes) -> None:
    queue_keys.decode_branch_draft_key(key)
    decode_draft(value)


def _by_key(decode: Callable[[bytes], object]) -> Callable[[Reader, bytes, bytes], None]:
    def check(store: Reader, key: bytes, value: bytes) -> None:
        decode(key)

    return check


def _exactly(what: str, value: bytes, size: int) -> None:
    if len(value) != size:
        raise CorruptionError(f"{what} has {len(value)} bytes, not {size}")


_CHECKS: Final[dict[Family, Callable[[Reader, bytes, bytes], None]]] = {
    Family.QUEUES: _queue,
    Family.QUEUE_STATS: _stats,
    Family.MESSAGES: _message,
    Family.DELAYED: _delayed,
    Family.LEASES: _lease_call,
    Family.DEDUP: _dedup,
    Family.DELETED_QUEUES: _deleted_queue,
    Family.XIDS: _branch,
    Family.BRANCH_DRAFTS: _draft,
    Family.LEASE_EXPIRY: _by_key(queue_keys.decode_lease_expiry_key),
    Family.MESSAGE_EXPIRY: _by_key(queue_keys.decode_timed_message_key),
    Family.TIMERS: _by_key(queue_keys.decode_timer_key),
    Family.DEDUP_EXPIRY: _by_key(queue_keys.decode_dedup_expiry_key),
    Family.CONTENT_REFS: _by_key(queue_keys.decode_content_ref_key),
    Family.STATE: _by_key(queue_keys.decode_state_key),
}
