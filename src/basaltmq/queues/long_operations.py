"""Operations on queues of any length (purge, move, redrive, delete), in pages.

The operations release the plane's lock between pages. Each page is one batch and leaves consistent queues, so a crash,
an error or an aborted call in the middle loses only the remaining work. Concurrent changes:

    purge          deletes what was enqueued before it began and is ready when its page is processed. A queue without
                   transient messages and without bodies outside the rows is purged in one batch of range deletes.
    move, redrive  the same, page by page in key order. Messages that arrive meanwhile stay.
    delete         the first batch removes the queue, and its name is free at once. The remaining rows are deleted in
                   pages (`lifecycle/reclaim.py`), by this call or by `run_due`.

If the queue is deleted meanwhile, the operation raises QueueNotFoundError. Messages already moved stay moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.change import Change
from basaltmq.queues.change_runner import ChangeRunner
from basaltmq.queues.leases.prepared import require_free
from basaltmq.queues.leases.waiters import Waiters
from basaltmq.queues.lifecycle import removal
from basaltmq.queues.lifecycle.redrive import PAGE, DueNs, Page, Wanted, move_page, origin_of
from basaltmq.queues.loaded_queues import LoadedQueues
from basaltmq.queues.message import Message
from basaltmq.queues.queue import Queue

RECLAIM_PAGES: Final = 4
"""Pages of rows that the deletion itself removes, which is all of an ordinary queue."""


class LongOperations:
    """Purge, move, redrive and delete, page by page."""

    def __init__(self, changes: ChangeRunner, loaded: LoadedQueues, waiters: Waiters) -> None:
        self._changes = changes
        self._loaded = loaded
        self._waiters = waiters

    def delete(self, name: str) -> None:
        """Delete a queue with all its messages."""
        with self._changes.lock:
            self._changes.require_alone("delete")
            # A failed queue can be deleted like any other.
            self._loaded.failures.forget(name)
            queue = self._loaded.require(name)
            require_free(queue)
            self._changes.do(lambda change: self._delete(change, queue))
            self._waiters.wake_queue(name)
        for _ in range(RECLAIM_PAGES):
            if not queue.shared.reclaim.is_pending:
                return
            _yield_lock()
            with self._changes.lock:
                if queue.shared.reclaim.is_pending:
                    self._changes.do(queue.shared.reclaim.step)

    def _delete(self, change: Change, queue: Queue) -> None:
        removal.delete_queue(queue, change)
        # Unload at once, because an eviction would write the counts of the deleted queue.
        change.after(lambda: self._loaded.unload(queue.name))

    def purge(self, name: str) -> int:
        """Delete all ready messages and return their number. Leased and delayed messages stay."""
        return _all(self.purging(name))

    def purging(self, name: str) -> Iterator[int]:
        """Like `purge`, one page per step. Yields the number of messages of each page."""
        with self._changes.lock:
            self._changes.require_alone("purge")
            until_ns = self._loaded.require(name).shared.enqueue_clock.last_ns
            count, is_done = self._purge_page(name, None)
        yield count
        while not is_done:
            count, is_done = self._purge_page(name, until_ns)
            yield count

    def _purge_page(self, name: str, until_ns: int | None) -> tuple[int, bool]:
        return self._changes.do(lambda change: removal.purge(self._loaded.require(name), change, until_ns))

    def move(self, source: str, target: str, count: int | None, wanted: Wanted | None) -> int:
        """Move ready messages to the end of another queue. Return their number."""
        with self._changes.lock:
            self._changes.require_alone("move")
            self._loaded.require(target)
        return _all(self._moving(source, lambda message: self._loaded.require(target), count, wanted, None))

    def redrive(
        self,
        name: str,
        to: str | None,
        count: int | None,
        wanted: Wanted | None,
        rate_per_s: float | None,
        stamp: Mapping[str, str] | None = None,
    ) -> int:
        """Return dead letters to their original queues (or `to`), at `rate_per_s` at most, with `stamp` as headers."""
        return _all(self.redriving(name, to, count, wanted, rate_per_s, stamp))

    def redriving(
        self,
        name: str,
        to: str | None,
        count: int | None,
        wanted: Wanted | None,
        rate_per_s: float | None,
        stamp: Mapping[str, str] | None = None,
    ) -> Iterator[int]:
        """Like `redrive`, one page per step. Yields the number of messages of each page, which may be 0."""
        if rate_per_s is not None and rate_per_s <= 0:
            raise InvalidArgumentError(f"rate_per_s must be above 0, not {rate_per_s}")
        with self._changes.lock:
            self._changes.require_alone("redrive")
            if to is not None:
                self._loaded.require(to)
        return self._moving(name, partial(self._target, to), count, wanted, rate_per_s, stamp)

    def redrive_page(
        self,
        name: str,
        after: bytes,
        to: str | None,
        wanted: Wanted,
        due_ns: DueNs | None,
        stamp: Mapping[str, str] | None,
    ) -> Page:
        """Redrive the wanted dead letters of one page after a key. The result says where to continue."""
        with self._changes.lock:
            self._changes.require_alone("redrive")
            if to is not None:
                self._loaded.require(to)
            until_ns = self._loaded.require(name).shared.enqueue_clock.last_ns
        return self._move_page(name, after, PAGE, until_ns, partial(self._target, to), wanted, due_ns, stamp)

    def _target(self, to: str | None, message: Message) -> Queue | None:
        """Return the target queue of a dead letter; None if it no longer exists."""
        target = to or origin_of(message)
        return None if target is None or self._loaded.config(target) is None else self._loaded.require(target)

    def _moving(
        self,
        source: str,
        target_of: Callable[[Message], Queue | None],
        count: int | None,
        wanted: Wanted | None,
        rate_per_s: float | None,
        stamp: Mapping[str, str] | None = None,
    ) -> Iterator[int]:
        moved = 0
        after: bytes | None = b""
        begin_ns = self._changes.clock_ns()
        with self._changes.lock:
            until_ns = self._loaded.require(source).shared.enqueue_clock.last_ns
        while after is not None and (count is None or moved < count):
            left = PAGE if count is None else count - moved
            turns = turns_of(begin_ns, moved, rate_per_s)
            page = self._move_page(source, after, left, until_ns, target_of, wanted, turns, stamp)
            moved += page.moved
            after = page.after
            yield page.moved

    def _move_page(
        self,
        source: str,
        after: bytes,
        count: int,
        until_ns: int,
        target_of: Callable[[Message], Queue | None],
        wanted: Wanted | None,
        due_ns: DueNs | None,
        stamp: Mapping[str, str] | None,
    ) -> Page:
        return self._changes.do(
            lambda change: move_page(
                self._loaded.require(source), change, after, count, until_ns, target_of, wanted, due_ns, stamp
            )
        )


def turns_of(begin_ns: int, already: int, rate_per_s: float | None) -> DueNs | None:
    """Return the due time per index in a page, for a rate-limited move of which `already` messages are done."""
    if rate_per_s is None:
        return None
    step_ns = 1e9 / rate_per_s
    return lambda index: begin_ns + int((already + index) * step_ns)


def _all(counts: Iterator[int]) -> int:
    """Run all pages. Return the sum of their counts."""
    total = 0
    for count in counts:
        total += count
        _yield_lock()
    return total


def _yield_lock() -> None:
    """Yield to threads that wait for the lock. Releasing it is not enough, because this thread keeps the GIL."""
    time.sleep(0)
