"""Looking through a queue's messages without touching them: what is in it at one moment, by when it came.

    browse(seen, "jobs", from_ns, to_ns)  ->  pages of messages that were enqueued in that time

Works on any moment of a store: a snapshot of one that is served, a view beside another process, a backup. Messages that
are leased or wait for their time are in the queue like any other. Those of transient messages that are only in memory
are not in the store, and so not here.

Rows lie by sub-queue and then by time, so a range of time is looked for in each sub-queue: two seeks where nothing is
in range. A cursor (a byte for the family and the key of the last message) goes on where a page ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError, InvalidArgumentError, QueueNotFoundError
from basaltmq.queues.config import QueueConfig, decode_config
from basaltmq.queues.message import Message
from basaltmq.queues.ready import rows
from basaltmq.queues.ready.backing import APART
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys

FAMILIES: Final = (Family.MESSAGES, Family.DELAYED, Family.BODIES, Family.QUEUES, Family.DELETED_QUEUES)
"""What is read: a snapshot for browsing is one of these."""

PAGE_MESSAGES: Final = 2_000
PAGE_BYTES: Final = 2 << 20
"""A page, but for one message that is larger by itself."""

ALL_NS: Final = (1 << 63) - 1
"""Later than any message."""

_KINDS: Final = {b"m": Family.MESSAGES, b"d": Family.DELAYED}
_TIME_AT: Final = slice(-24, -16)


class Page(NamedTuple):
    """Some messages, and where to go on."""

    messages: list[Message]
    cursors: list[bytes]
    """By message: what to hand in as `after` to go on behind it."""
    is_last: bool


def config_of(seen: Reader, queue: str) -> QueueConfig:
    row = seen.get(Family.QUEUES, keys.queue_key(queue))
    if row is None:
        raise QueueNotFoundError(f"there is no queue {queue!r}")
    return decode_config(queue, row)


def browse(
    seen: Reader,
    queue: str,
    from_ns: int = 0,
    to_ns: int = ALL_NS,
    *,
    after: bytes = b"",
    messages_max: int = PAGE_MESSAGES,
    bytes_max: int = PAGE_BYTES,
) -> Page:
    """Messages enqueued at `from_ns` or later and before `to_ns`, from behind a cursor on.

    Their fairness keys are the users', their priorities those of their places where the queue has priorities.
    """
    has_priorities = bool(config_of(seen, queue).priorities_max)
    from_ns = max(from_ns, _floor_ns(seen, queue))
    messages: list[Message] = []
    cursors: list[bytes] = []
    size_bytes = 0
    for cursor, key, row in _rows(seen, queue, from_ns, to_ns, after):
        if len(messages) >= messages_max or size_bytes >= bytes_max:
            return Page(messages, cursors, is_last=False)
        message = _open(seen, key, row)
        if has_priorities:
            message.priority, message.fairness_key = rows.split_sub_queue(message.fairness_key)
        messages.append(message)
        cursors.append(cursor)
        size_bytes += len(message.payload) + len(row)
    return Page(messages, cursors, is_last=True)


def times_of(seen: Reader, queue: str) -> tuple[int, int]:
    """When the oldest and the newest message of a queue came, of those that are in it; (0, 0) if it is empty."""
    config_of(seen, queue)
    floor_ns = _floor_ns(seen, queue)
    times: list[int] = []
    start, end = keys.prefix_range(keys.message_prefix(queue))
    while (first := next(iter(seen.scan(Family.MESSAGES, start, end)), None)) is not None:
        sub = first[0][:-24]
        start = _above(sub)
        last = next(iter(seen.scan(Family.MESSAGES, sub, start, reverse=True)), first)
        times += (int.from_bytes(key[_TIME_AT], "big") for key, _ in (first, last))
    for key, _ in seen.scan(Family.DELAYED, *keys.prefix_range(keys.timed_message_prefix(queue))):
        times.append(int.from_bytes(key[_TIME_AT], "big"))
    if not times or max(times) < floor_ns:
        return 0, 0
    return max(min(times), floor_ns), max(times)


def _floor_ns(seen: Reader, queue: str) -> int:
    """Rows of a queue of this name that was deleted may still be there, below this."""
    return int.from_bytes(seen.get(Family.DELETED_QUEUES, keys.deleted_queue_key(queue)) or b"\0", "big")


def _rows(seen: Reader, queue: str, from_ns: int, to_ns: int, after: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(cursor, message key, row)"""
    kind, behind = after[:1], after[1:]
    if after and kind not in _KINDS:
        raise InvalidArgumentError(f"{after[:24].hex()} is no cursor of a queue")
    if kind != b"d":
        for key, row in _ready(seen, queue, from_ns, to_ns, behind):
            yield b"m" + key, key, row
        behind = b""
    start, end = keys.prefix_range(keys.timed_message_prefix(queue))
    for key, row in seen.scan(Family.DELAYED, max(start, behind + b"\0" if behind else start), end):
        if from_ns <= int.from_bytes(key[_TIME_AT], "big") < to_ns:
            yield b"d" + key, keys.message_of(key)[0], row


def _ready(seen: Reader, queue: str, from_ns: int, to_ns: int, behind: bytes) -> Iterator[tuple[bytes, bytes]]:
    start, end = keys.prefix_range(keys.message_prefix(queue))
    assert end is not None, "a prefix begins with a length"
    start = max(start, behind + b"\0" if behind else start)
    low, high = from_ns.to_bytes(8, "big"), to_ns.to_bytes(8, "big")
    while start < end:
        for key, row in seen.scan(Family.MESSAGES, start, end):
            if low <= key[_TIME_AT] < high:
                yield key, row
                continue
            sub = key[:-24]
            start = sub + low if key[_TIME_AT] < low else _above(sub)
            break
        else:
            return


def _above(prefix: bytes) -> bytes:
    end = keys.prefix_range(prefix)[1]
    assert end is not None, "a prefix begins with a length"
    return end


def _open(seen: Reader, key: bytes, row: bytes) -> Message:
    entry = rows.read_entry(key, row)
    if not entry.flags & APART:
        return rows.open_row(key, row)
    body = seen.get(Family.BODIES, keys.body_key(rows.body_of(row)))
    if body is None or len(body) != entry.size_bytes:
        raise CorruptionError(f"the body of message {key[-16:].hex()} is missing or damaged; verify the store")
    return rows.open_row(key, row, body)


def queues_of(seen: Reader, count: int) -> list[str]:
    """The first names of queues, for whoever asked for one that is not there."""
    return [keys.decode_queue_key(key) for key, _ in islice(seen.scan(Family.QUEUES), count)]
