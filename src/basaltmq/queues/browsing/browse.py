"""Reads the messages of a queue at one point in time, without changing them.

    browse(view, "jobs", from_ns, to_ns)  ->  pages of messages that were enqueued in that time

Works on any view of a store: a snapshot of an open store, a view from another process, or a backup. Leased and delayed
messages are included. Transient messages that exist in memory only are not.

Rows are ordered by sub-queue and then by time, so a time range needs two seeks per sub-queue. A cursor (a family byte
and the key of the last message) continues after a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError, InvalidArgumentError, QueueNotFoundError
from basaltmq.queues.config import QueueConfig, decode_config
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.backing import APART
from basaltmq.queues.message import Message
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import queues as queue_keys

FAMILIES: Final = (Family.MESSAGES, Family.DELAYED, Family.MESSAGE_CONTENT, Family.QUEUES, Family.DELETED_QUEUES)
"""Families that a snapshot for browsing needs."""

PAGE_MESSAGES: Final = 2_000
PAGE_BYTES: Final = 2 << 20
"""Maximum size of a page. A larger message is alone in its page."""

ALL_NS: Final = (1 << 63) - 1
"""Later than any message."""

_KINDS: Final = {b"m": Family.MESSAGES, b"d": Family.DELAYED}
_TIME_AT: Final = slice(-24, -16)


class Page(NamedTuple):
    """Some messages, and where to continue."""

    messages: list[Message]
    cursors: list[bytes]
    """Per message: the `after` value that continues behind it."""
    is_last: bool


def config_of(view: Reader, queue: str) -> QueueConfig:
    row = view.get(Family.QUEUES, queue_keys.queue_key(queue))
    if row is None:
        raise QueueNotFoundError(f"queue {queue!r} does not exist")
    return decode_config(queue, row)


def browse(
    view: Reader,
    queue: str,
    from_ns: int = 0,
    to_ns: int = ALL_NS,
    *,
    after: bytes = b"",
    messages_max: int = PAGE_MESSAGES,
    bytes_max: int = PAGE_BYTES,
) -> Page:
    """Return messages enqueued at or after `from_ns` and before `to_ns`, starting after a cursor.

    Fairness keys are those of the publishers. In a queue with priorities, the priority is the effective one.
    """
    has_priorities = bool(config_of(view, queue).priorities_max)
    from_ns = max(from_ns, _floor_ns(view, queue))
    messages: list[Message] = []
    cursors: list[bytes] = []
    size_bytes = 0
    for cursor, key, row in _rows(view, queue, from_ns, to_ns, after):
        if len(messages) >= messages_max or size_bytes >= bytes_max:
            return Page(messages, cursors, is_last=False)
        message = _open(view, key, row)
        if has_priorities:
            message.priority, message.fairness_key = rows.split_sub_queue(message.fairness_key)
        messages.append(message)
        cursors.append(cursor)
        size_bytes += len(message.payload) + len(row)
    return Page(messages, cursors, is_last=True)


def times_of(view: Reader, queue: str) -> tuple[int, int]:
    """Return the enqueue times of the oldest and newest message in a queue; (0, 0) if it is empty."""
    config_of(view, queue)
    floor_ns = _floor_ns(view, queue)
    times: list[int] = []
    start, end = key_parts.prefix_range(queue_keys.message_prefix(queue))
    while (first := next(iter(view.scan(Family.MESSAGES, start, end)), None)) is not None:
        sub = first[0][:-24]
        start = _above(sub)
        last = next(iter(view.scan(Family.MESSAGES, sub, start, reverse=True)), first)
        times += (int.from_bytes(key[_TIME_AT], "big") for key, _ in (first, last))
    for key, _ in view.scan(Family.DELAYED, *key_parts.prefix_range(queue_keys.timed_message_prefix(queue))):
        times.append(int.from_bytes(key[_TIME_AT], "big"))
    if not times or max(times) < floor_ns:
        return 0, 0
    return max(min(times), floor_ns), max(times)


def _floor_ns(view: Reader, queue: str) -> int:
    """Return the lowest valid enqueue time. Rows below it belong to a deleted queue with the same name."""
    return int.from_bytes(view.get(Family.DELETED_QUEUES, queue_keys.deleted_queue_key(queue)) or b"\0", "big")


def _rows(view: Reader, queue: str, from_ns: int, to_ns: int, after: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield (cursor, message key, row)."""
    kind, behind = after[:1], after[1:]
    if after and kind not in _KINDS:
        raise InvalidArgumentError(f"{after[:24].hex()} is not a cursor of a queue")
    if kind != b"d":
        for key, row in _ready(view, queue, from_ns, to_ns, behind):
            yield b"m" + key, key, row
        behind = b""
    start, end = key_parts.prefix_range(queue_keys.timed_message_prefix(queue))
    for key, row in view.scan(Family.DELAYED, max(start, behind + b"\0" if behind else start), end):
        if from_ns <= int.from_bytes(key[_TIME_AT], "big") < to_ns:
            yield b"d" + key, queue_keys.message_of(key)[0], row


def _ready(view: Reader, queue: str, from_ns: int, to_ns: int, behind: bytes) -> Iterator[tuple[bytes, bytes]]:
    start, end = key_parts.prefix_range(queue_keys.message_prefix(queue))
    assert end is not None, "a prefix begins with a length"
    start = max(start, behind + b"\0" if behind else start)
    low, high = from_ns.to_bytes(8, "big"), to_ns.to_bytes(8, "big")
    while start < end:
        for key, row in view.scan(Family.MESSAGES, start, end):
            if low <= key[_TIME_AT] < high:
                yield key, row
                continue
            sub = key[:-24]
            start = sub + low if key[_TIME_AT] < low else _above(sub)
            break
        else:
            return


def _above(prefix: bytes) -> bytes:
    end = key_parts.prefix_range(prefix)[1]
    assert end is not None, "a prefix begins with a length"
    return end


def _open(view: Reader, key: bytes, row: bytes) -> Message:
    entry = rows.read_entry(key, row)
    if not entry.flags & APART:
        return rows.open_row(key, row)
    body = view.get(Family.MESSAGE_CONTENT, queue_keys.body_key(rows.body_of(row)))
    if body is None or len(body) != entry.size_bytes:
        raise CorruptionError(f"the body of message {key[-16:].hex()} is missing or damaged; verify the store")
    return rows.open_row(key, row, body)


def queues_of(view: Reader, count: int) -> list[str]:
    """Return the first queue names, for error messages about an unknown queue."""
    return [queue_keys.decode_queue_key(key) for key, _ in islice(view.scan(Family.QUEUES), count)]
