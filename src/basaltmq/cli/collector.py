"""Keeps the garbage collector's pauses short (P13).

A full collection visits every tracked object and holds the loop meanwhile: 170 ms with 100,000 bindings. Objects that
survive a slow one are frozen, so the next visits only objects made since then. Python itself waits with full
collections until the unfrozen objects have grown by a quarter.

A frozen object is still freed when its last reference goes. Only a cycle that was alive at a slow collection and became
garbage later stays in memory until the process ends. Objects that come and go with clients must not form cycles when
they end; tests/unit/protocols/amqp091/test_connection.py and tests/unit/queues/test_change.py check that.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

SLOW_S: Final = 0.01
"""The input of one turn of the loop (broker/loop_shares.py). About 30,000 objects."""

FULL: Final = 2


class Collector:
    """While entered, freezes what survives a slow full collection."""

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
