"""Shares of the event loop's turns, so that no connection's input delays the others (P13).

A connection handles input while it has a share of the turn, then keeps the rest, stops reading, and goes on in the next
turn. The time of one turn is split among the connections that have input left, so a turn is short however many there
are. A connection always gets `SHARE_S_MIN`: with a thousand busy connections a turn takes 0.2 s, which is overload.

    begin() ──> handle input until it ends or `is_over()` ──> end(has_more)

The loop has no notion of a turn. The first `begin` schedules a callback, which runs once in the next turn and resets
the time used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

TURN_S: Final = 0.01
"""Input handled per turn. A request takes two or three turns from its arrival to its answer: 100 ms leaves room for
the writes, the deliveries and the syncs of each."""

SHARE_S_MIN: Final = 0.0002
"""A few requests, or a few dozen publishes."""

DRAFT_S: Final = 6e-6
"""What one message costs per queue after it is read: the write of the turn's batch (`python -m bench broker`)."""


class LoopShares:
    """Splits turns among the connections of one loop."""

    __slots__ = ("_clock_s", "_ends_s", "_is_scheduled", "_started_s", "_used_s", "behind")

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self.behind = 0
        """Connections that have input left for the next turn."""
        self._clock_s = clock_s
        self._used_s = 0.0
        self._is_scheduled = False
        self._started_s = self._ends_s = 0.0

    def begin(self, *, was_behind: bool) -> None:
        """A connection begins to handle input."""
        if was_behind:
            self.behind -= 1
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        share_s = (TURN_S - self._used_s) / (self.behind + 1)
        self._started_s = self._clock_s()
        self._ends_s = self._started_s + max(SHARE_S_MIN, share_s)

    def is_over(self, later_s: float = 0.0) -> bool:
        """Whether the share is used up; `later_s` more of it goes to work that the input causes later in the turn."""
        if later_s:
            self._ends_s -= later_s
        return self._clock_s() >= self._ends_s

    def end(self, *, has_more: bool) -> None:
        """The connection stops, with or without input left."""
        self._used_s += self._clock_s() - self._started_s
        if has_more:
            self.behind += 1

    def left(self) -> None:
        """A connection that had input left is gone."""
        self.behind -= 1

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._used_s = 0.0
