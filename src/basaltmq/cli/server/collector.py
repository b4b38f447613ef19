"""Keeps the pauses of the garbage collector short (P13).

A full collection visits every tracked object and blocks the event loop meanwhile: 170 ms with 100,000 bindings. Objects
that survive a slow collection are frozen, so the next one visits only newer objects. Python itself defers full
collections until the unfrozen objects have grown by a quarter.

Reference counting still frees a frozen object. Only a cycle that was alive at a slow collection and became garbage
later stays in memory until the process ends. So objects that belong to a client must not form cycles when they end;
tests/unit/protocols/amqp091/test_connection.py and tests/unit/queues/test_change.py check that.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

SLOW_S: Final = 0.01
"""The time limit of one event-loop turn (broker/scheduling/loop_shares.py). About 30,000 objects."""

FULL: Final = 2


class Collector:
    """Context manager that freezes the objects that survive a slow full collection."""

    def __init__(self, freeze: Callable[[], None] = gc.freeze, clock_s: Callable[[], float] = time.thread_time) -> None:
        self._freeze = freeze
        self._clock_s = clock_s
        self._began_s = 0.0

    def __enter__(self) -> Self:
        gc.collect()
        self._freeze()
        gc.callbacks.append(self._collected)
        return self

    def __exit__(self, *exc: object) -> None:
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        if info["generation"] != FULL:
            return
        if phase == "start":
            self._began_s = self._clock_s()
        elif self._clock_s() - self._began_s > SLOW_S:
            self._freeze()
