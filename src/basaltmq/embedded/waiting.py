"""Waits for new records without polling, with a time limit."""

from __future__ import annotations

import math
import threading
import time

from basaltmq.errors import InvalidArgumentError


class WaitLimit:
    """Time limit of a wait: `wait_s` seconds, 0 for no wait, None for no limit."""

    def __init__(self, wait_s: float | None) -> None:
        if wait_s is None:
            wait_s = math.inf
        elif isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not wait_s >= 0:
            raise InvalidArgumentError(f"wait must be 0 seconds or more, or None for no limit, not {wait_s!r:.80}")
        self._wait_s = wait_s
        self._until_s = 0.0
        self.renew()

    def renew(self) -> None:
        """Restart the time limit."""
        self._until_s = time.monotonic() + self._wait_s

    def left_s(self) -> float:
        """Return the time left; infinity without a limit."""
        return max(0.0, self._until_s - time.monotonic())


class Arrivals:
    """A counter of appends. A waiter passes the count it has seen and is woken when it grows."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._closed = False

    @property
    def count(self) -> int:
        return self._count

    @property
    def closed(self) -> bool:
        return self._closed

    def wake(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, seen: int, wait_limit: WaitLimit) -> bool:
        """Wait until the count differs from `seen`. False if the time is up or the store was closed."""
        left_s = wait_limit.left_s()
        if not left_s:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._count != seen or self._closed, None if math.isinf(left_s) else left_s)
            return self._count != seen and not self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
