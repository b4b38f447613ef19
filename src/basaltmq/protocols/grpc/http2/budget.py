"""Abuse limit: how many frames without useful work one connection may send.

PING, SETTINGS, empty DATA and streams that are reset at once cost the receiver time and do no work. Correct clients
send few of them, or send them next to useful work: a gRPC client pings after received data to estimate its bandwidth.
The allowance therefore refills over time and with useful work. A client that exceeds it is disconnected with
ENHANCE_YOUR_CALM. This also covers rapid reset, because a call counts as work only after its response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

ALLOWANCE: Final = 1_000
"""Largest burst of useless frames. A correct client may cancel all of its calls (up to 1,000) at once."""

PER_SECOND: Final = 100
"""Refill rate in frames per second: far above the rate of correct clients, and too low for an attack."""


class Budget:
    """The allowance of one connection."""

    __slots__ = ("_clock_s", "_left", "_seen_s")

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._left = float(ALLOWANCE)
        self._seen_s = clock_s()

    def refill(self) -> None:
        """Refill the allowance by one frame, because useful work was done."""
        if self._left < ALLOWANCE:
            self._left += 1

    def charge(self) -> bool:
        """Charge one useless frame. Return False if the allowance is exhausted."""
        self._left -= 1
        if self._left < 0:
            now_s = self._clock_s()
            self._left = min(self._left + (now_s - self._seen_s) * PER_SECOND, float(ALLOWANCE))
            self._seen_s = now_s
        return self._left >= 0
