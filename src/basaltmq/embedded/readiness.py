"""Cancellable waits for a queue, for workers that stop and tasks that are cancelled.

The plane wakes one waiter per ready message. A woken waiter that leaves without leasing would withhold the message from
the other waiters. It therefore passes the wake-up on: it leases one message and releases it, which wakes the next.
Results that no task can receive any more are undone by `in_thread` for the same reason.
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
    """One wait for ready messages. After a wait that returned True, lease or call `pass_on`."""

    def __init__(self, plane: QueuePlane, name: str) -> None:
        self._plane = plane
        self._name = name
        self._event = threading.Event()
        self._woken = False

    def cancel(self) -> None:
        """Cancel the wait. Safe in a signal handler of a thread that is not waiting."""
        self._event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until messages may be ready (True), or until the wait is cancelled or times out (False)."""
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
        """Like `wait`, for a task. It uses no thread while it waits."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            self._woken = True
            with suppress(RuntimeError):
                # A closed loop has no task to wake.
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
        """Wake the next waiter if messages are still ready."""
        for delivery in self._plane.lease(self._name):
            self._plane.release(self._name, delivery.token)


async def in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Run `work` in a thread. If the task is cancelled meanwhile, undo its result, also in a thread."""
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
    # Do not use the loop's executor: a loop that shuts down accepts no more work.
    threading.Thread(target=_quietly, args=(undo, result), name="basalt-undo", daemon=True).start()


def _quietly(undo: Callable[[T], None], result: T) -> None:
    # A queue that was deleted or closed meanwhile needs no undo.
    with suppress(BasaltError):
        undo(result)
