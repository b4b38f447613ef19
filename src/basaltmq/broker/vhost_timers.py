"""Timers of a virtual host: deadlines of the queue plane, expiry of unused queues, stream retention.

One loop timer covers the earliest deadline. When it fires, a bounded part of the due work runs, and the timer is set
again. Retention runs in a thread, a bounded part at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from basaltmq.broker.guard import Failing, QuietGuard
from basaltmq.errors import StorageError

RETENTION_INTERVAL_S: Final = 2.0
"""Delay between two parts of stream retention."""

STALL_PAUSE_NS: Final = 50_000_000
"""Delay before due work is retried while the store is stalled: 50 ms."""

_log: Final = logging.getLogger(__name__)


class Deadlines(Protocol):
    """Has work that becomes due: the queue plane."""

    def deadline_ns(self) -> int | None: ...

    def run_due(self, now_ns: int | None = None) -> int | None: ...


class Maintained(Protocol):
    """Deletes old records and checkpoints its index: the streams of a virtual host."""

    @property
    def is_open(self) -> bool: ...

    def maintain(self) -> None: ...


class VHostTimers:
    """The timers of one virtual host."""

    def __init__(
        self,
        vhost: Failing,
        plane: Deadlines,
        streams: Maintained,
        clock_ns: Callable[[], int],
    ) -> None:
        self._vhost = vhost
        self._plane = plane
        self._streams = streams
        self._expire: Callable[[int], int | None] = lambda now_ns: None
        self._clock_ns = clock_ns
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._retention: asyncio.TimerHandle | None = None
        self._retaining: asyncio.Future[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop, expire: Callable[[int], int | None]) -> None:
        """`expire(now)` deletes expired queues and returns the time of the next expiry."""
        self._loop = loop
        self._expire = expire
        now_ns = self._clock_ns()
        for due_ns in (self._plane.deadline_ns(), self._expire(now_ns)):
            if due_ns is not None:
                self.due_at(due_ns)
        self._retain()

    def plane_deadline_changed(self) -> None:
        """Handle an earlier deadline of the plane."""
        due_ns = self._plane.deadline_ns() if self._loop is not None else None
        if due_ns is not None:
            self.due_at(due_ns)

    def due_at(self, due_ns: int) -> None:
        """Run due work at this time or earlier."""
        if self._loop is None:
            return
        if self._timer is not None:
            if self._timer_ns <= due_ns:
                return
            self._timer.cancel()
        self._timer_ns = due_ns
        self._timer = self._loop.call_later(max(0.0, (due_ns - self._clock_ns()) / 1e9), self._run)

    def _run(self) -> None:
        self._timer = None
        if self._loop is None:
            return
        now_ns = self._clock_ns()
        # If the store is stalled, nothing was done, and the work is retried.
        next_ns: int | None = now_ns + STALL_PAUSE_NS
        expiry_ns: int | None = None
        with QuietGuard(self._vhost):
            expiry_ns = self._expire(now_ns)
            next_ns = self._plane.run_due(now_ns)
        for due_ns in (next_ns, expiry_ns):
            if due_ns is not None:
                self.due_at(due_ns)

    def _retain(self) -> None:
        if self._loop is None:
            return
        if self._streams.is_open:
            self._retaining = self._loop.run_in_executor(None, self._streams.maintain)
            self._retaining.add_done_callback(self._retained)
        else:
            self._retention = self._loop.call_later(RETENTION_INTERVAL_S, self._retain)

    def _retained(self, done: asyncio.Future[None]) -> None:
        self._retaining = None
        error = None if done.cancelled() else done.exception()
        if isinstance(error, StorageError) and not error.retriable:
            self._vhost.fail(error)
        elif error is not None:
            _log.error("retention of vhost %r failed: %s", self._vhost.name, error)
        if self._loop is not None:
            self._retention = self._loop.call_later(RETENTION_INTERVAL_S, self._retain)

    def stop(self) -> None:
        """Cancel all timers."""
        self._loop = None
        for handle in (self._timer, self._retention):
            if handle is not None:
                handle.cancel()
        self._timer = self._retention = None

    async def finish(self) -> None:
        """Wait for retention that runs in a thread."""
        if self._retaining is not None:
            await asyncio.wait([self._retaining])
