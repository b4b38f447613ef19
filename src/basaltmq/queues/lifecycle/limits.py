"""Queue length limits and overflow policies (SPEC E7).

Limits apply to ready messages. `drop-head` drops the oldest messages (to the dead-letter queue, if there is one).
`reject-publish` rejects the whole call. `reject-publish-dlx` rejects it and dead-letters its messages. Messages from
other sources (dead letters, delays, moves) are never rejected, because no publisher waits for an answer. A `drop-head`
queue is trimmed to its limits right after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from basaltmq.errors import QueueFullError
from basaltmq.queues.change import Change
from basaltmq.queues.config import Overflow
from basaltmq.queues.entries.backing import Entry
from basaltmq.queues.lifecycle.dead_letters import LENGTH, dead_letter

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

DROP_MAX: Final = 200
"""Messages dropped per batch when a queue is trimmed: 2 ms of work, 20 ms if an exchange dead-letters them."""


def admit(queue: Queue, change: Change, entries: list[Entry], *, prepared: bool = False) -> list[Entry]:
    """Make room for incoming messages or reject them, and return those that stay. `prepared` ones are not rejected."""
    count = len(queue) + len(entries)
    size_bytes = queue.ready_bytes() + sum(e.size_bytes for e in entries)
    if not _is_over(queue, count, size_bytes):
        return entries
    if queue.config.overflow is Overflow.DROP_HEAD:
        return _drop(queue, change, count, size_bytes, entries)
    if prepared:
        return entries
    refusal = _refusal(queue)
    if queue.config.overflow is Overflow.REJECT_PUBLISH:
        raise refusal
    change.refusal = refusal
    queue.count(entries, 1)
    dead_letter(queue, change, entries, LENGTH)
    return []


def require_room(queue: Queue, count: int, size_bytes: int) -> None:
    """Raise QueueFullError if the queue would reject so many messages. A drop-head queue never rejects."""
    is_over = _is_over(queue, len(queue) + count, queue.ready_bytes() + size_bytes)
    if is_over and queue.config.overflow is not Overflow.DROP_HEAD:
        raise _refusal(queue)


def _refusal(queue: Queue) -> QueueFullError:
    length_max, bytes_max = _limit_text(queue.config.length_max), _limit_text(queue.config.bytes_max)
    return QueueFullError(
        f"queue {queue.name!r} is full: {len(queue)} messages with {queue.ready_bytes()} bytes are ready, the limits "
        f"are {length_max} messages and {bytes_max} bytes; consume messages or raise the limits"
    )


def _limit_text(limit: int | None) -> str:
    return "any number of" if limit is None else str(limit)


def _is_over(queue: Queue, count: int, size_bytes: int) -> bool:
    length_max, bytes_max = queue.config.length_max, queue.config.bytes_max
    return (length_max is not None and count > length_max) or (bytes_max is not None and size_bytes > bytes_max)


def _drop(queue: Queue, change: Change, count: int, size_bytes: int, incoming: list[Entry]) -> list[Entry]:
    """Drop from the head, then from the incoming messages, until the limits hold."""
    queue.unpark_all(change.now_ns)
    dropped: list[Entry] = []
    while _is_over(queue, count, size_bytes):
        excess = 1 if queue.config.length_max is None else max(1, count - queue.config.length_max)
        fetched = queue.backing.fetch(excess)
        if not fetched:
            break
        dropped += fetched
        count -= len(fetched)
        size_bytes -= sum(e.size_bytes for e in fetched)
    if dropped:
        change.undo(lambda: queue.backing.put_back(dropped))
        dead_letter(queue, change, dropped, LENGTH)
    if count > len(incoming) and _is_over(queue, count, size_bytes):
        # The head was enqueued in this same change, and can be dropped only after that is written.
        change.after(lambda: queue.shared.check_limits(queue.name))
        return incoming
    first = 0
    while first < len(incoming) and _is_over(queue, count, size_bytes):
        count -= 1
        size_bytes -= incoming[first].size_bytes
        first += 1
    if first:
        queue.count(incoming[:first], 1)
        dead_letter(queue, change, incoming[:first], LENGTH)
    return incoming[first:]


def trim(queue: Queue, change: Change) -> bool:
    """Trim a drop-head queue to its limits. Return whether it still exceeds them."""
    if queue.config.overflow is not Overflow.DROP_HEAD or not _is_over(queue, len(queue), queue.ready_bytes()):
        return False
    queue.unpark_all(change.now_ns)
    count, size_bytes = len(queue), queue.ready_bytes()
    dropped: list[Entry] = []
    while _is_over(queue, count, size_bytes) and len(dropped) < DROP_MAX:
        fetched = queue.backing.fetch(1)
        if not fetched:
            break
        dropped += fetched
        count -= 1
        size_bytes -= fetched[0].size_bytes
    if not dropped:
        return False
    change.undo(lambda: queue.backing.put_back(dropped))
    dead_letter(queue, change, dropped, LENGTH)
    return _is_over(queue, count, size_bytes)
