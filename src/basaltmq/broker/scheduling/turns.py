"""Cooperative scheduling: splits long work on the event loop into short turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

TURN_S: Final = 0.002
"""Time per turn. An fsync, which confirms wait for anyway, takes longer on most disks."""


Item = TypeVar("Item")
Made = TypeVar("Made")


async def in_turns(items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
    """Apply `make` to every item, in short turns."""
    turns = Turns()
    made = []
    for item in items:
        made.append(make(item))
        await turns.yield_if_due()
    return made


class Turns:
    """Measures the turns of one piece of work."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + TURN_S

    async def yield_if_due(self) -> None:
        """Yield to the event loop if the turn has used up its time. Call it between items."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + TURN_S
