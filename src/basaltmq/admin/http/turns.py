"""Long work on the loop in short turns, so that messages do not wait for an overview."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

TURN_S: Final = 0.002
"""How long a turn holds the loop: less than a sync of most disks, which confirms wait for anyhow."""


Item = TypeVar("Item")
Made = TypeVar("Made")


async def in_turns(items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """Make something of every item, in short turns."""
    turns = Turns()
    made = []
    for item in items:
        made.append(make(item))
        await turns.breathe()
    return made


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
