"""A time limit for an operation that waits for locks and for the disk."""

from __future__ import annotations

import time

from basaltmq.errors import TimedOutError
from basaltmq.streams.offsets import Durable


class Deadline:
    """The time limit of one operation. `what` names the operation in errors."""

    def __init__(self, what: str, limit_ms: int) -> None:
        self._what = what
        self._limit_ms = limit_ms
        self._end = time.monotonic() + limit_ms / 1000

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise self.passed()

    def passed(self) -> TimedOutError:
        return TimedOutError(f"{self._what} took longer than {self._limit_ms} ms and was rolled back; try again")

    def wait_durable(self, sync: Durable) -> None:
        """Wait for the sync up to the deadline, because a hanging disk must not block the caller without limit."""
        if not sync.wait_durable(self.left_s()):
            raise self.passed()
