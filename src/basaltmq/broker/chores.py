"""Long work of a virtual host that nobody waits for: a few portions per turn of the loop (P13).

A chore is a function that does one portion and returns whether there is more. Chores take turns. One that meets a store
that is behind is tried again with the same portion, so a portion changes its own state only after its write.
Chores are dropped when the virtual host closes: opening it again does what they were for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

CHORES_S: Final = 0.005
"""Time for chores per turn; the last portion may exceed it."""

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
        """Do portions for a while."""
        until_s = self._clock_s() + CHORES_S
        while self._waiting:
            if self._waiting[0]():
                self._waiting.rotate(-1)
            else:
                self._waiting.popleft()
            if self._clock_s() >= until_s:
                return
