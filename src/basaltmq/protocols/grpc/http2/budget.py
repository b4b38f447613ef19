"""How much useless work one connection may ask for.

Some frames cost the receiver something and mean nothing: pings, settings, streams that are reset at once, empty data.
Honest clients send few of them, or send them beside useful work: a gRPC client pings after data it received, to learn
how fast the line is. So there is an allowance that fills with time and with work done, and a client that spends more is
sent away (ENHANCE_YOUR_CALM). Rapid reset is the same: a call counts as work only when it was answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

ALLOWANCE: Final = 1_000
"""Useless frames in one go: a client that gives up all its calls at once (a thousand may run) is honest."""

PER_SECOND: Final = 100
"""Many more than a client with reasons sends, and not worth the trouble to an attacker."""


class Budget:
    """Of one connection."""

    __slots__ = ("_clock_s", "_left", "_seen_s")

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._left = float(ALLOWANCE)
        self._seen_s = clock_s()

    def worked(self) -> None:
        """Something useful was done."""
        if self._left < ALLOWANCE:
            self._left += 1

    def spend(self) -> bool:
        """A useless frame came; False if there were too many."""
        self._left -= 1
        if self._left < 0:
            now_s = self._clock_s()
            self._left = min(self._left + (now_s - self._seen_s) * PER_SECOND, float(ALLOWANCE))
            self._seen_s = now_s
        return self._left >= 0
