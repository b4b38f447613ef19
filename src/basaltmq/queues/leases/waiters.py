"""Consumers that wait for ready messages. They are notified by events and do not poll.

A waiter is a callback that is called once, from the thread that made a message ready, with the plane's lock held. It
may only set an event or schedule a callback on an event loop. If another consumer was faster, the waiter registers
again. A listener is called for every queue until it is removed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

Wake: TypeAlias = Callable[[], None]
Listen: TypeAlias = Callable[[str], None]


class Waiter:
    """A waiting thread."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


class Waiters:
    """The waiters of all queues, notified in order of arrival."""

    def __init__(self) -> None:
        self._by_queue: dict[str, dict[int, Wake]] = {}
        self._last = 0
        self._listeners: dict[object, Listen] = {}

    def listen(self, callback: Listen) -> Callable[[], None]:
        """Call `callback` for every queue that may have ready messages. Return a function that stops it."""
        mark = object()
        self._listeners[mark] = callback

        def stop() -> None:
            self._listeners.pop(mark, None)

        return stop

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def notify(self, queue: str) -> None:
        """Notify listeners that a queue may have ready messages."""
        for callback in list(self._listeners.values()):
            callback(queue)

    def add(self, queue: str, wake: Wake) -> int:
        """Add a waiter. Return the number for `remove`."""
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
        """Queues with waiters."""
        return list(self._by_queue)

    def __contains__(self, queue: str) -> bool:
        return queue in self._by_queue

    def wake(self, queue: str, count: int) -> None:
        """Wake up to `count` waiters, longest waiting first."""
        waiting = self._by_queue.get(queue)
        while waiting and count > 0:
            number = next(iter(waiting))
            waiting.pop(number)()
            count -= 1
        if waiting is not None and not waiting:
            del self._by_queue[queue]

    def wake_queue(self, queue: str) -> None:
        """Wake all waiters of a queue."""
        self.wake(queue, len(self._by_queue.get(queue, ())))

    def wake_all(self) -> None:
        for queue in list(self._by_queue):
            self.wake_queue(queue)
