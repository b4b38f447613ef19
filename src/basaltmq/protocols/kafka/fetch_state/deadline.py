"""Deadline of the request that a connection waits for.

A consumer at the end of a partition waits after every batch, for at most 500 ms and usually for less. A timer per wait
costs more than the read itself. So each connection keeps one timer running. A timer that fires before the current
deadline is rescheduled for it. Without a deadline it is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """At most one deadline at a time, on a timer that is reused."""

    __slots__ = ("_at", "_call", "_timer")

    def __init__(self) -> None:
        self._at = 0.0
        self._call: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float, call: Callable[[], None]) -> None:
        """Call `call` when the loop time reaches `at`, unless the deadline is replaced or cleared before."""
        self._at = at
        self._call = call
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._due)

    def clear(self) -> None:
        """Cancel the deadline and leave the timer running."""
        self._call = None

    def close(self) -> None:
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        call = self._call
        if call is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._at:
            self._timer = loop.call_at(self._at, self._due)
            return
        self._call = None
        call()
