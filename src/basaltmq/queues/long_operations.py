"""Operations of many batches: purge, move, redrive, delete. The plane's lock is free between two of them.

A queue of ten million messages is worked through page by page; everybody else gets a turn after each page. Each page is
one batch and leaves queues that are right, so a crash, an error or an impatient caller in the middle costs nothing but
the rest of the work.
"""

from __future__ import annotations

from collections.abc import Callable

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues import removal
from basaltmq.queues.changes import Changes
from basaltmq.queues.held import require_free
from basaltmq.queues.loaded import LoadedQueues
from basaltmq.queues.message import Message
from basaltmq.queues.queue import Queue
from basaltmq.queues.redrive import PAGE, DueNs, Page, Wanted, move_page, origin_of
from basaltmq.queues.waiters import Waiters


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
            require_free(self._loaded.require(name))
            self._changes.do(lambda change: removal.end_leases(self._loaded.require(name), change))
            after: bytes | None = b""
            while after is not None and self._loaded.require(name).stats.apart:
                after = self._delete_bodies(name, after)
            self._changes.do(lambda change: removal.delete_queue(self._loaded.require(name), change))
            self._loaded.unload(name)
            self._waiters.wake_queue(name)

    def _delete_bodies(self, name: str, after: bytes) -> bytes | None:
        return self._changes.do(lambda change: removal.delete_bodies(self._loaded.require(name), change, after))

    def purge(self, name: str) -> int:
        """Delete everything that is ready; how many that were. Leased and delayed messages stay."""
        with self._changes.lock:
            self._changes.require_alone("purge")
            count = len(self._loaded.require(name))
            while not self._changes.do(lambda change: removal.purge(self._loaded.require(name), change)):
                pass
        return count

    def move(self, source: str, target: str, count: int | None, wanted: Wanted | None) -> int:
        """Move ready messages to the end of another queue; how many."""
        with self._changes.lock:
            self._changes.require_alone("move")
            self._loaded.require(target)
            return self._move(source, lambda message: self._loaded.require(target), count, wanted, None)

    def redrive(
        self, name: str, to: str | None, count: int | None, wanted: Wanted | None, rate_per_s: float | None
    ) -> int:
        """Return dead letters to the queues they came from (or `to`), at most so many a second."""
        if rate_per_s is not None and rate_per_s <= 0:
            raise InvalidArgumentError(f"a rate is more than 0 per second, not {rate_per_s}")

        def target_of(message: Message) -> Queue | None:
            goal = to or origin_of(message)
            return None if goal is None or self._loaded.config(goal) is None else self._loaded.require(goal)

        with self._changes.lock:
            self._changes.require_alone("redrive")
            if to is not None:
                self._loaded.require(to)
            return self._move(name, target_of, count, wanted, rate_per_s)

    def _move(
        self,
        source: str,
        target_of: Callable[[Message], Queue | None],
        count: int | None,
        wanted: Wanted | None,
        rate_per_s: float | None,
    ) -> int:
        moved = 0
        after: bytes | None = b""
        begin_ns = self._changes.clock_ns()
        while after is not None and (count is None or moved < count):
            left = PAGE if count is None else count - moved
            page = self._move_page(source, after, left, target_of, wanted, _turns(begin_ns, moved, rate_per_s))
            moved += page.moved
            after = page.after
        return moved

    def _move_page(
        self,
        source: str,
        after: bytes,
        count: int,
        target_of: Callable[[Message], Queue | None],
        wanted: Wanted | None,
        due_ns: DueNs | None,
    ) -> Page:
        return self._changes.do(
            lambda change: move_page(self._loaded.require(source), change, after, count, target_of, wanted, due_ns)
        )


def _turns(begin_ns: int, already: int, rate_per_s: float | None) -> DueNs | None:
    """When the messages of a page are ready, after so many before them."""
    if rate_per_s is None:
        return None
    step_ns = 1e9 / rate_per_s
    return lambda index: begin_ns + int((already + index) * step_ns)
