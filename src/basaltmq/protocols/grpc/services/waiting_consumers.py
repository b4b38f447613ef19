"""Distribution of a queue's messages over waiting consumers, least loaded first.

    take() ──> messages are ready and nobody waits ──> lease at once
          └──> wait at the queue ──> the plane reports ready messages ──> serve waiters

A `PushConsumer` takes messages repeatedly: a Consume stream. Its load is the number of messages that it holds
unacknowledged. Waiters are served by load, then by waiting time, so a slow consumer gets what the fast ones leave.

Above `LOAD_SOFT_MAX` a push consumer gets nothing while another one of the queue is below the limit and reads.
Messages thus do not pile up at one consumer while others are free. A single consumer has no limit, because the Fila
protocol allows it to hold any number of messages.

Everything runs on the loop that created it. Only the wake-up callback is thread-safe.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane

LOAD_SOFT_MAX: Final = 256
"""Messages a consumer may hold before others take precedence: enough for a fast consumer over a network round trip."""

RETRY_S: Final = 0.05
"""Delay before polling again a queue that reported ready messages but returned none."""


class PushConsumer:
    """A consumer that takes messages repeatedly."""

    __slots__ = ("is_stalled", "load")

    def __init__(self) -> None:
        self.load = 0
        """Messages that it holds."""
        self.is_stalled = False
        """It does not read the messages that were sent to it."""


class _Waiter:
    """One waiting call of `take`."""

    __slots__ = ("consumer", "count", "future", "push_consumer", "visibility_ms")

    def __init__(
        self,
        count: int,
        consumer: str,
        visibility_ms: int | None,
        push_consumer: PushConsumer | None,
        future: asyncio.Future[list[Delivery]],
    ) -> None:
        self.count = count
        self.consumer = consumer
        self.visibility_ms = visibility_ms
        self.push_consumer = push_consumer
        self.future = future

    @property
    def load(self) -> int:
        return 0 if self.push_consumer is None else self.push_consumer.load


class _QueueWaiters:
    """The waiting calls and the push consumers of one queue."""

    def __init__(self, plane: QueuePlane, queue: str, loop: asyncio.AbstractEventLoop) -> None:
        self._plane = plane
        self._queue = queue
        self._loop = loop
        self._thread = threading.get_ident()
        self._stop: Callable[[], None] | None = None
        self._is_scheduled = False
        self.waiters: list[_Waiter] = []
        self.push_consumers: set[PushConsumer] = set()

    def schedule(self, delay_s: float = 0.0) -> None:
        """Serve waiters in the next loop turn. Repeated calls within one turn have no further effect."""
        if self._is_scheduled or not self.waiters:
            return
        self._is_scheduled = True
        if delay_s:
            self._loop.call_later(delay_s, self._serve)
        else:
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._is_scheduled = False
        while (waiter := self._next()) is not None:
            try:
                found = self._plane.lease(
                    self._queue, self._share(waiter), consumer=waiter.consumer, visibility_ms=waiter.visibility_ms
                )
                if not found:
                    self._arm()
                    return
            except BasaltError as error:
                self._fail(waiter, error)
                continue
            self.waiters.remove(waiter)
            waiter.future.set_result(found)
        self.unregister_if_idle()

    def _next(self) -> _Waiter | None:
        """Return the waiter to serve next. None if nobody waits, or all waiters must yield to other push consumers."""
        self.waiters = [waiter for waiter in self.waiters if not waiter.future.done()]
        best: _Waiter | None = None
        for waiter in self.waiters:
            load = waiter.load
            if load == 0:
                return waiter
            if (best is None or load < best.load) and (
                load < LOAD_SOFT_MAX or not self._another_has_room(waiter.push_consumer)
            ):
                best = waiter
        return best

    def _another_has_room(self, push_consumer: PushConsumer | None) -> bool:
        return any(p.load < LOAD_SOFT_MAX and not p.is_stalled for p in self.push_consumers if p is not push_consumer)

    def has_unloaded(self) -> bool:
        """Whether a waiter has precedence over a newcomer."""
        return any(waiter.load == 0 for waiter in self.waiters)

    def _share(self, waiter: _Waiter) -> int:
        """Return how many messages a waiter may take, so that all waiting push consumers get some."""
        waiting = sum(1 for each in self.waiters if each.push_consumer is not None)
        if waiter.push_consumer is None or waiting < 2:
            return waiter.count
        return max(1, min(waiter.count, self._plane.stats(self._queue)["ready"] // waiting))

    def _fail(self, waiter: _Waiter, error: BasaltError) -> None:
        self.waiters.remove(waiter)
        waiter.future.set_exception(error)

    def _arm(self) -> None:
        """Register for the queue's next ready message."""
        if self._stop is not None:
            return
        is_woken = False

        def wake() -> None:
            nonlocal is_woken
            is_woken = True
            self._stop = None
            if threading.get_ident() == self._thread:
                self.schedule()
            else:
                with suppress(RuntimeError):
                    # The loop is closed, so nobody waits any more.
                    self._loop.call_soon_threadsafe(self.schedule)

        # If the callback runs at once, retry later: the queue reported ready messages but returned none.
        is_scheduled, self._is_scheduled = self._is_scheduled, True
        try:
            stop = self._plane.on_ready(self._queue, wake)
        except BasaltError as error:
            for waiter in list(self.waiters):
                self._fail(waiter, error)
            return
        finally:
            self._is_scheduled = is_scheduled
        if is_woken:
            self.schedule(RETRY_S)
        else:
            self._stop = stop

    def unregister_if_idle(self) -> None:
        """Unregister from the queue if nobody waits."""
        if not self.waiters and self._stop is not None:
            self._stop()
            self._stop = None


class WaitingConsumers:
    """The waiting consumers of all queues."""

    def __init__(self, plane: QueuePlane, loop: asyncio.AbstractEventLoop) -> None:
        self._plane = plane
        self._loop = loop
        self._by_queue: dict[str, _QueueWaiters] = {}

    def take_ready(
        self, queue: str, count: int, *, consumer: str, visibility_ms: int | None = None
    ) -> Sequence[Delivery]:
        """Lease and return up to `count` ready messages, or none if a waiter has precedence."""
        waiting = self._by_queue.get(queue)
        if waiting is not None and waiting.has_unloaded():
            return []
        return self._plane.lease_ready(queue, count, consumer=consumer, visibility_ms=visibility_ms)

    async def take(
        self,
        queue: str,
        count: int,
        *,
        consumer: str,
        visibility_ms: int | None = None,
        push_consumer: PushConsumer | None = None,
        timeout_s: float | None = None,
    ) -> list[Delivery]:
        """Lease and return up to `count` messages. Wait for the first up to `timeout_s` seconds (None: no limit).

        If the caller is cancelled, messages already leased to it are released.
        """
        waiting = self._by_queue.get(queue)
        if push_consumer is None and (waiting is None or not waiting.has_unloaded()):
            found = self._plane.lease(queue, count, consumer=consumer, visibility_ms=visibility_ms)
            if found or timeout_s == 0:
                return found
        elif timeout_s == 0:
            return []
        if waiting is None:
            waiting = self._by_queue[queue] = _QueueWaiters(self._plane, queue, self._loop)
        waiter = _Waiter(count, consumer, visibility_ms, push_consumer, self._loop.create_future())
        waiting.waiters.append(waiter)
        waiting.schedule()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.future
        except TimeoutError:
            return _result(waiter.future)
        except asyncio.CancelledError:
            for delivery in _result(waiter.future)[:1]:
                with suppress(BasaltError):
                    self._plane.release(queue, delivery.token)
            raise
        finally:
            waiter.future.cancel()
            if waiter in waiting.waiters:
                waiting.waiters.remove(waiter)
            self._tidy(queue, waiting)

    def join(self, queue: str, push_consumer: PushConsumer) -> None:
        waiting = self._by_queue.get(queue)
        if waiting is None:
            waiting = self._by_queue[queue] = _QueueWaiters(self._plane, queue, self._loop)
        waiting.push_consumers.add(push_consumer)

    def leave(self, queue: str, push_consumer: PushConsumer) -> None:
        waiting = self._by_queue[queue]
        waiting.push_consumers.discard(push_consumer)
        waiting.schedule()
        self._tidy(queue, waiting)

    def refuse(self, queue: str, push_consumer: PushConsumer, error: BasaltError) -> None:
        """Fail the waiting call of a push consumer with an error."""
        waiting = self._by_queue.get(queue)
        for waiter in [] if waiting is None else waiting.waiters:
            if waiter.push_consumer is push_consumer and not waiter.future.done():
                waiter.future.set_exception(error)

    def load_decreased(self, queue: str) -> None:
        """Re-evaluate the waiters, because a push consumer holds fewer messages or reads again."""
        waiting = self._by_queue.get(queue)
        if waiting is not None:
            waiting.schedule()

    def push_consumers(self, queue: str) -> int:
        waiting = self._by_queue.get(queue)
        return 0 if waiting is None else len(waiting.push_consumers)

    def _tidy(self, queue: str, waiting: _QueueWaiters) -> None:
        if not waiting.waiters:
            waiting.unregister_if_idle()
            if not waiting.push_consumers:
                self._by_queue.pop(queue, None)


def _result(future: asyncio.Future[list[Delivery]]) -> list[Delivery]:
    """Return the messages of a finished wait, or none."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return []
    return future.result()
