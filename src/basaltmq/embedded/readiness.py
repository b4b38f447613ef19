"""Waiting for a queue in a way that can be given up: by a worker that stops, by a task that is cancelled.

The plane wakes one waiter per ready message. A waiter that was woken and goes away without leasing would keep the
message from the others who wait; so it passes the wake on: it leases one message and puts it back, which wakes the
next. The same holds for results that nobody is left to take: `in_thread` undoes them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from basaltmq.errors import BasaltError
from basaltmq.queues.plane import QueuePlane

T = TypeVar("T")


class Readiness:
    """One wait for a queue to have something. After a wait that returned True, try a lease or `pass_on`."""

    def __init__(self, plane: QueuePlane, name: str) -> None:
        self._plane = plane
        self._name = name
        self._event = threading.Event()
        self._woken = False

    def give_up(self) -> None:
        """End the wait, whoever waits; safe in a signal handler of a thread that does not."""
        self._event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there may be something, the wait is given up or the time has passed; whether it is the first."""
        stop = self._plane.on_ready(self._name, self._wake)
        try:
            self._event.wait(timeout_s)
        finally:
            stop()
        return self._woken

    def _wake(self) -> None:
        self._woken = True
        self._event.set()

    async def wait_async(self, timeout_s: float | None = None) -> bool:
        """The same for a task; it holds no thread while it waits."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            self._woken = True
            with suppress(RuntimeError):
                # A loop that was closed has nobody left to tell.
                loop.call_soon_threadsafe(done.set)

        stop = await in_thread(lambda: self._plane.on_ready(self._name, wake), self._withdraw)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await done.wait()
            await asyncio.to_thread(stop)
        except asyncio.CancelledError:
            _start(self._withdraw, stop)
            raise
        return self._woken

    def _withdraw(self, stop: Callable[[], None]) -> None:
        stop()
        if self._woken:
            self.pass_on()

    def pass_on(self) -> None:
        """Wake the next who waits, if there is still something."""
        for delivery in self._plane.lease(self._name):
            self._plane.release(self._name, delivery.token)


async def in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Run `work` in a thread; if the task is cancelled meanwhile, what it did is undone, in a thread too."""
    lock = threading.Lock()
    results: list[T] = []
    is_abandoned = False

    def run() -> T:
        result = work()
        with lock:
            results.append(result)
            undo_here = is_abandoned
        if undo_here:
            _quietly(undo, result)
        return result

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        with lock:
            is_abandoned = True
            undo_there = bool(results)
        if undo_there:
            _start(undo, results[0])
        raise


def _start(undo: Callable[[T], None], result: T) -> None:
    # Not the loop's executor: a loop that is going down cancels tasks and takes no more work.
    threading.Thread(target=_quietly, args=(undo, result), name="basalt-undo", daemon=True).start()


def _quietly(undo: Callable[[T], None], result: T) -> None:
    # A queue deleted or closed meanwhile has nothing to give back to.
    with suppress(BasaltError):
        undo(result)
