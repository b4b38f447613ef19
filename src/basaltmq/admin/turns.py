"""Long work on the loop in short turns, so that messages do not wait for an overview."""

from __future__ import annotations

import asyncio
import time
from typing import Final

TURN_S: Final = 0.002
"""How long a turn holds the loop: less than a sync of most disks, which confirms wait for anyhow."""


class Turns:
    """Count the time of one piece of work."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + TURN_S

    async def breathe(self) -> None:
        """Call it between items: lets others run once the turn is over."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + TURN_S
