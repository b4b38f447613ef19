"""When what a connection waits for must be answered.

A consumer at the end of a partition waits anew with every batch, each time for half a second at most, and hardly ever
for that long. A timer for each costs more than to look for what came. So a connection has one, which is left running:
it finds out when it is due that there is something later to wait for, or nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """One at a time."""

    __slots__ = ("_at", "_call", "_timer")

    def __init__(self) -> None:
        self._at = 0.0
        self._call: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float, call: Callable[[], None]) -> None:
        """Call when the loop's time has come to `at`, unless something else is set or it is cleared before."""
        self._at = at
        self._call = call
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._due)

    def clear(self) -> None:
        """There is nothing to wait for."""
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
