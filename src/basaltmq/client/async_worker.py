"""The asyncio counterpart of `Worker`, for coroutine functions.

    worker = AsyncWorker(client, "jobs", handle, concurrency=100)
    await worker.run()                             until worker.stop(), or the task is cancelled

Results of handlers and shutdown work as with `Worker`. Cancelling `run` cancels its handlers, and their messages return
to the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias

from basaltmq.client.async_client import AsyncClient
from basaltmq.client.leased import Leased
from basaltmq.client.worker import KEEP_ALIVE_SHARE, POLL_S, RETRY_S
from basaltmq.errors import BasaltError, InvalidArgumentError, StaleLeaseError
from basaltmq.queues.lifecycle.handler_failure import (
    RETRY_DELAY_MS_DEFAULT,
    RETRY_DELAY_MS_MAX_DEFAULT,
    Backoff,
    Reject,
    log_failure,
    stored_text,
)

CONCURRENCY_MAX: Final = 10_000

AsyncHandler: TypeAlias = Callable[[Leased], Awaitable[object]]

_log = logging.getLogger("basaltmq")


class AsyncWorker:
    """Handles the messages of a queue until it is stopped. A worker runs once."""

    def __init__(
        self,
        client: AsyncClient,
        queue: str,
        handler: AsyncHandler,
        *,
        concurrency: int = 1,
        visibility_ms: int | None = None,
        retry_delay_ms: int = RETRY_DELAY_MS_DEFAULT,
        retry_delay_max_ms: int = RETRY_DELAY_MS_MAX_DEFAULT,
        keep_alive: bool = True,
    ) -> None:
        if type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidArgumentError(f"concurrency must be 1 to {CONCURRENCY_MAX}, not {concurrency!r:.80}")
        self.queue = queue
        self.handled = 0
        self.failed = 0
        """Messages whose handler raised."""
        self.late = 0
        """Messages whose lease expired before they were settled. They are redelivered."""
        self._client = client
        self._handler = handler
        self._concurrency = concurrency
        self._visibility_ms = visibility_ms
        self._backoff = Backoff(retry_delay_ms, retry_delay_max_ms)
        self._keep_alive = keep_alive
        self._session = client.open_session()
        self._stopping = asyncio.Event()
        self._running: dict[asyncio.Task[None], Leased] = {}
        self._some_held = asyncio.Event()
        self._error: BaseException | None = None

    def stop(self) -> None:
        """Request a stop. `run` returns when all running handlers are finished."""
        self._stopping.set()

    async def run(self) -> None:
        """Run until stopped. Raises the error that ended the worker, if any."""
        extender = asyncio.create_task(self._extend_leases()) if self._keep_alive else None
        try:
            while not self._stopping.is_set():
                await self._turn()
            if self._running:
                await asyncio.wait(self._running)
        finally:
            for task in [*self._running, *([extender] if extender else [])]:
                task.cancel()
            await asyncio.gather(*self._running, *([extender] if extender else []), return_exceptions=True)
            self._session.close()
        if self._error is not None:
            raise self._error

    async def _turn(self) -> None:
        """Lease as many messages as there are free slots, and start their handlers."""
        room = self._concurrency - len(self._running)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            if not room:
                await asyncio.wait([stopping, *self._running], return_when=asyncio.FIRST_COMPLETED)
                return
            leasing = asyncio.ensure_future(
                self._client.lease(
                    self.queue, room, wait=POLL_S, visibility_ms=self._visibility_ms, session=self._session
                )
            )
            await asyncio.wait([stopping, leasing], return_when=asyncio.FIRST_COMPLETED)
            if not leasing.done():
                leasing.cancel()
                with suppress(asyncio.CancelledError, BasaltError):
                    # Messages leased at the last moment return with the end of the session.
                    await leasing
                return
            for message in leasing.result():
                task = asyncio.create_task(self._handle(message))
                self._running[task] = message
                task.add_done_callback(self._finished)
            if self._running:
                self._some_held.set()
        except BasaltError as error:
            if not error.retriable:
                self._fail(error)
            else:
                _log.warning("queue %r: the worker retries in %.0f s: %s", self.queue, RETRY_S, error)
                await asyncio.wait([stopping], timeout=RETRY_S)
        finally:
            stopping.cancel()

    def _finished(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.stop()

    async def _handle(self, message: Leased) -> None:
        failure: Exception | None = None
        try:
            await self._handler(message)
        except Exception as error:
            failure = error
            log_failure(self.queue, message.id, message.attempts, error)
        self.handled += 1
        self.failed += failure is not None
        while not message.settled:
            try:
                await self._settle(message, failure)
            except StaleLeaseError as error:
                message.settled = True
                self.late += 1
                _log.warning("a message was handled after its lease expired and will be redelivered: %s", error)
            except BasaltError as error:
                if not error.retriable or self._stopping.is_set():
                    raise
                await asyncio.sleep(RETRY_S)

    async def _settle(self, message: Leased, failure: Exception | None) -> None:
        if failure is None:
            await self._client.ack(message)
        elif isinstance(failure, Reject):
            await self._client.nack(message, stored_text(failure), reject=True)
        else:
            delay_ms = self._backoff.delay_ms(message.attempts)
            await self._client.nack(message, stored_text(failure), delay_ms=delay_ms)

    async def _extend_leases(self) -> None:
        """Extend the leases of the held messages."""
        while True:
            await self._some_held.wait()
            held = [each for each in self._running.values() if not each.settled]
            if not held:
                self._some_held.clear()
                continue
            await asyncio.sleep(min(each.visibility_ms for each in held) / 1000 * KEEP_ALIVE_SHARE)
            for queue, token in {(each.queue, each.token) for each in self._running.values() if not each.settled}:
                # Settling the messages detects an expired lease.
                with suppress(BasaltError):
                    await self._client.extend_lease(queue, token, self._visibility_ms)
