"""Input of a connection that is not handled yet: reads, their frames, and a message that has to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.protocols.amqp10.wire.frames import Frame, FrameReader

Wait: TypeAlias = Callable[[Callable[[], None]], object]
"""Schedules the rest of the input, if a message has to wait."""


class Input:
    """Unhandled input of one connection."""

    __slots__ = ("_frames", "_parked", "_reader", "_reads", "_shares", "later_s")

    def __init__(self, reader: FrameReader, shares: LoopShares) -> None:
        self.later_s = 0.0
        """Time in seconds that the current frame will take at the end of the turn."""
        self._reader = reader
        self._shares = shares
        self._reads: deque[bytes] = deque()
        self._frames: Iterator[Frame] | None = None
        self._parked: Callable[[], Wait | None] | None = None

    def __bool__(self) -> bool:
        return bool(self._reads) or self._frames is not None or self._parked is not None

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._reads.append(data)

    def park(self, retry: Callable[[], Wait | None]) -> None:
        """Handle a message again later, before all other input."""
        self._parked = retry

    def drop(self) -> None:
        """Discard everything."""
        self._reads.clear()
        self._frames = self._parked = None

    def take(self, handle: Callable[[Frame], Wait | None], is_held: Callable[[], bool]) -> tuple[bool, Wait | None]:
        """Handle frames for the share of this turn. Return whether some are left, and how to schedule them."""
        while True:
            self.later_s = 0.0
            if self._parked is not None:
                retry, self._parked = self._parked, None
                wait = retry()
            else:
                found = self._next()
                if found is None:
                    return False, None
                wait = handle(found)
            if wait is not None:
                return True, wait
            if is_held():
                return False, None
            if self._shares.is_over(self.later_s):
                return True, None

    def _next(self) -> Frame | None:
        while True:
            if self._frames is not None:
                found = next(self._frames, None)
                if found is not None:
                    return found
                self._frames = None
            if not self._reads:
                return None
            self._frames = self._reader.feed(self._reads.popleft())
