"""Waking those who wait for records, without polling."""

from __future__ import annotations

import threading


class Arrivals:
    """A count of appends; who waits remembers the count it has seen and is woken when it grows."""

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

    def wait(self, seen: int, timeout_s: float | None) -> bool:
        """Wait until the count is no longer `seen`; False if the time passed first, or everything was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._count != seen or self._closed, timeout_s)
            return self._count != seen and not self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
