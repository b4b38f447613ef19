"""Moves messages between queues: all of one queue to another, or dead letters back to their origin (SPEC C9).

Messages are read page by page in key order, so a queue of any length is moved in bounded memory. Each page is one
batch: a message is in one queue or the other. A moved message keeps its id and body and has no attempts. It loses its
dead-letter history, so that it can die again.

With a rate, all messages move at once, each with a delay. So a redrive with a rate is complete when it returns, and
survives a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.change import Change
from basaltmq.queues.entries.backing import APART, Entry
from basaltmq.queues.lifecycle.dead_letters import FIRST_QUEUE, HISTORY, LAST_ERROR, relocate
from basaltmq.queues.lifecycle.delays import delay
from basaltmq.queues.message import Message

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

PAGE: Final = 200
"""Messages read, and at most moved, per batch. Other sizes were not measured."""

Wanted: TypeAlias = Callable[[Message], bool]
DueNs: TypeAlias = Callable[[int], int]
"""Maps the index of a redriven message to the time when it becomes ready."""


class Page:
    """Result of one step: messages moved, and the key to continue after (None at the end)."""

    __slots__ = ("after", "moved")

    def __init__(self, moved: int, after: bytes | None) -> None:
        self.moved = moved
        self.after = after


def move_page(
    source: Queue,
    change: Change,
    after: bytes,
    count: int,
    until_ns: int,
    target_of: Callable[[Message], Queue | None],
    wanted: Wanted | None,
    due_ns: DueNs | None = None,
    stamp: Mapping[str, str] | None = None,
) -> Page:
    """Move up to `count` messages of the page after the key `after`, none enqueued after `until_ns`.

    They get the headers in `stamp`, which identify the operation.
    """
    source.unpark_all(change.now_ns)
    page = source.backing.browse(after, PAGE)
    groups: dict[Queue, list[tuple[Entry, Message]]] = {}
    moved = 0
    last = after
    until = until_ns.to_bytes(8, "big")
    is_last = len(page) < PAGE
    for entry in page:
        if moved == count:
            break
        if entry.key[-24:-16] > until:
            # Enqueued since the operation started, like all later messages of its sub-queue.
            last = entry.key[:-24] + b"\xff" * 24
            is_last = False
            break
        last = entry.key
        message = source.open(entry)
        if wanted is not None:
            bodies = source.bodies(change, [entry] if entry.flags & APART else [])
            if entry.flags & APART and entry.key not in bodies:
                continue
            if not change.call_filter(wanted, source.open(entry, bodies.get(entry.key))):
                continue
        target = target_of(message)
        if target is None:
            continue
        if target is source:
            raise InvalidArgumentError(f"queue {source.name!r} cannot be moved to itself; name another queue")
        for header in (HISTORY, FIRST_QUEUE, LAST_ERROR):
            message.headers.pop(header, None)
        message.headers.update(stamp or {})
        groups.setdefault(target, []).append((entry, message))
        moved += 1
    at = 0
    for target, moving in groups.items():
        source.touch(change)
        source.remove(change, [entry for entry, _ in moving], keep_bodies=True)
        _arrive(target, change, moving, at, due_ns)
        at += len(moving)
    return Page(moved, None if is_last and moved < count else last)


def _arrive(
    target: Queue, change: Change, moving: Sequence[tuple[Entry, Message]], first: int, due_ns: DueNs | None
) -> None:
    entries = relocate(target, change, moving)
    if due_ns is None:
        target.admit(change, entries)
    else:
        delay(target, change, [(entry, due_ns(first + index)) for index, entry in enumerate(entries)])
    change.after(lambda: target.shared.check_limits(target.name))


def origin_of(message: Message) -> str | None:
    """Return the queue that a dead letter came from."""
    return message.headers.get(FIRST_QUEUE)
