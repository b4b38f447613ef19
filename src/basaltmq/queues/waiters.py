"""Who waits for a queue to have something. Woken by events; nobody polls.

A waiter is a callback that is called once, from whichever thread made a message ready, with the plane's lock held: it
may set an event or hand over to a loop, nothing more. A waiter that was woken and finds nothing (somebody was faster)
waits again. A listener hears of every queue, as long as it listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

Wake: TypeAlias = Callable[[], None]
Listen: TypeAlias = Callable[[str], None]


class Waiter:
    """A thread that waits."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


class Waiters:
    """The waiters of all queues, served in the order they came."""

    def __init__(self) -> None:
        self._by_queue: dict[str, dict[int, Wake]] = {}
        self._last = 0
        self._listeners: dict[object, Listen] = {}

    def listen(self, callback: Listen) -> Callable[[], None]:
        """Hear of every queue that may have something; returns how to stop."""
        mark = object()
        self._listeners[mark] = callback

        def stop() -> None:
            self._listeners.pop(mark, None)

        return stop

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def tell(self, queue: str) -> None:
        """Tell those who listen that a queue may have something."""
        for callback in list(self._listeners.values()):
            callback(queue)

    def add(self, queue: str, wake: Wake) -> int:
        """Wait; the number to stop waiting by."""
        self._last += 1
        self._by_queue.setdefault(queue, {})[self._last] = wake
        return self._last

    def remove(self, queue: str, number: int) -> None:
        waiting = self._by_queue.get(queue)
        if waiting is not None:
            waiting.pop(number, None)
            if not waiting:
                del self._by_queue[queue]

    def queues(self) -> list[str]:
        """Queues somebody waits at."""
        return list(self._by_queue)

    def __contains__(self, queue: str) -> bool:
        return queue in self._by_queue

    def wake(self, queue: str, count: int) -> None:
        """Wake up to `count`, those who waited longest first."""
        waiting = self._by_queue.get(queue)
        while waiting and count > 0:
            number = next(iter(waiting))
            waiting.pop(number)()
            count -= 1
        if waiting is not None and not waiting:
            del self._by_queue[queue]

    def wake_queue(self, queue: str) -> None:
        """Wake everyone who waits at a queue."""
        self.wake(queue, len(self._by_queue.get(queue, ())))

    def wake_all(self) -> None:
        for queue in list(self._by_queue):
            self.wake_queue(queue)
