"""Operations on queues of any length: purge, move, redrive, delete. None of them holds the plane for its length.

A queue of ten million messages is worked through page by page, and the lock is free between two pages. Each page is one
batch and leaves queues that are right, so a crash, an error or an impatient caller in the middle costs nothing but the
rest of the work. What others do meanwhile:

    purge          takes what was enqueued before it began and is ready when its page comes. A queue without bodies
                   apart and without transient messages is purged in one batch of ranges.
    move, redrive  the same, each page looked at in key order. What comes in meanwhile stays.
    delete         the queue is gone for everyone with the first batch; its name is free at once. What is left of it on
                   disk is nobody's and goes in pages (reclaim.py), by this call or when `run_due` comes round.

A queue that is deleted in the middle ends the operation with QueueNotFoundError; what was moved is moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.change import Change
from basaltmq.queues.change_runner import Changes
from basaltmq.queues.leases.prepared import require_free
from basaltmq.queues.lifecycle import removal
from basaltmq.queues.lifecycle.redrive import PAGE, DueNs, Page, Wanted, move_page, origin_of
from basaltmq.queues.loaded_queues import LoadedQueues
from basaltmq.queues.message import Message
from basaltmq.queues.queue import Queue
from basaltmq.queues.waiters import Waiters

RECLAIM_PAGES: Final = 4
"""Pages of a deleted queue that its deletion takes away itself: an ordinary queue leaves nothing behind."""


class LongOperations:
    """What takes a queue of any length apart."""

    def __init__(self, changes: Changes, loaded: LoadedQueues, waiters: Waiters) -> None:
        self._changes = changes
        self._loaded = loaded
        self._waiters = waiters

    def delete(self, name: str) -> None:
        """Delete a queue with all that is its."""
        with self._changes.lock:
            self._changes.require_alone("delete")
            # A queue that is down goes like any other.
            self._loaded.failures.forget(name)
            queue = self._loaded.require(name)
            require_free(queue)
            self._changes.do(lambda change: self._delete(change, queue))
            self._waiters.wake_queue(name)
        for _ in range(RECLAIM_PAGES):
            if not queue.shared.reclaim.is_pending:
                return
            _breathe()
            with self._changes.lock:
                if queue.shared.reclaim.is_pending:
                    self._changes.do(queue.shared.reclaim.step)

    def _delete(self, change: Change, queue: Queue) -> None:
        removal.delete_queue(queue, change)
        # At once: whoever makes room in memory would write down what a queue has that is no more.
        change.after(lambda: self._loaded.unload(queue.name))

    def purge(self, name: str) -> int:
        """Delete everything that is ready; how many that were. Leased and delayed messages stay."""
        count = 0
        for purged in self.purging(name):
            count += purged
            _breathe()
        return count

    def purging(self, name: str) -> Iterator[int]:
        """The same page by page, for callers that give others their turn in between; how many each page was."""
        with self._changes.lock:
            self._changes.require_alone("purge")
            until_ns = self._loaded.require(name).shared.places.last_ns
            count, is_done = self._purge_page(name, None)
        yield count
        while not is_done:
            count, is_done = self._purge_page(name, until_ns)
            yield count

    def _purge_page(self, name: str, until_ns: int | None) -> tuple[int, bool]:
        return self._changes.do(lambda change: removal.purge(self._loaded.require(name), change, until_ns))

    def move(self, source: str, target: str, count: int | None, wanted: Wanted | None) -> int:
        """Move ready messages to the end of another queue; how many."""
        with self._changes.lock:
            self._changes.require_alone("move")
            self._loaded.require(target)
        return self._move(source, lambda message: self._loaded.require(target), count, wanted, None)

    def redrive(
        self,
        name: str,
        to: str | None,
        count: int | None,
        wanted: Wanted | None,
        rate_per_s: float | None,
        stamp: Mapping[str, str] | None = None,
    ) -> int:
        """Return dead letters to the queues they came from (or `to`), at most so many a second, with more headers."""
        if rate_per_s is not None and rate_per_s <= 0:
            raise InvalidArgumentError(f"a rate is more than 0 per second, not {rate_per_s}")
        with self._changes.lock:
            self._changes.require_alone("redrive")
            if to is not None:
                self._loaded.require(to)
        return self._move(name, partial(self._goal, to), count, wanted, rate_per_s, stamp)

    def redrive_page(
        self,
        name: str,
        after: bytes,
        to: str | None,
        wanted: Wanted,
        due_ns: DueNs | None,
        stamp: Mapping[str, str] | None,
    ) -> Page:
        """Look at a page of dead letters behind a key and return those that are wanted; where to go on."""
        with self._changes.lock:
            self._changes.require_alone("redrive")
            if to is not None:
                self._loaded.require(to)
            until_ns = self._loaded.require(name).shared.places.last_ns
        return self._move_page(name, after, PAGE, until_ns, partial(self._goal, to), wanted, due_ns, stamp)

    def _goal(self, to: str | None, message: Message) -> Queue | None:
        """Where a dead letter goes; None if that queue is gone."""
        goal = to or origin_of(message)
        return None if goal is None or self._loaded.config(goal) is None else self._loaded.require(goal)

    def _move(
        self,
        source: str,
        target_of: Callable[[Message], Queue | None],
        count: int | None,
        wanted: Wanted | None,
        rate_per_s: float | None,
        stamp: Mapping[str, str] | None = None,
    ) -> int:
        moved = 0
        after: bytes | None = b""
        begin_ns = self._changes.clock_ns()
        with self._changes.lock:
            until_ns = self._loaded.require(source).shared.places.last_ns
        while after is not None and (count is None or moved < count):
            left = PAGE if count is None else count - moved
            turns = turns_of(begin_ns, moved, rate_per_s)
            page = self._move_page(source, after, left, until_ns, target_of, wanted, turns, stamp)
            moved += page.moved
            after = page.after
            _breathe()
        return moved

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
    """When the messages of a page are ready, after so many before them."""
    if rate_per_s is None:
        return None
    step_ns = 1e9 / rate_per_s
    return lambda index: begin_ns + int((already + index) * step_ns)


def _breathe() -> None:
    """Let those who wait for the lock have it: giving it up alone does not, as the interpreter goes on with us."""
    time.sleep(0)
