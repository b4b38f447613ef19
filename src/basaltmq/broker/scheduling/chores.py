"""Chores: background work of a virtual host, done in small portions on the event loop (P13).

A chore is a function that does one portion and returns whether there is more. Chores run round-robin. If the store is
stalled, the same portion runs again, so a portion must change its own state only after its write. Closing the virtual
host drops its chores; reopening it does their work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

CHORES_S: Final = 0.005
"""Time for chores per turn of the loop. The last portion may exceed it."""

Chore: TypeAlias = Callable[[], bool]


class Chores:
    """The chores of one virtual host."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self._waiting: deque[Chore] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, chore: Chore) -> None:
        self._waiting.append(chore)

    def run(self) -> None:
        """Run portions for up to CHORES_S."""
        until_s = self._clock_s() + CHORES_S
        while self._waiting:
            if self._waiting[0]():
                self._waiting.rotate(-1)
            else:
                self._waiting.popleft()
            if self._clock_s() >= until_s:
                return
