"""A worker: leases messages, calls a handler for each, and settles them.

    worker = queue.worker(handle, concurrency=4)
    worker.run()                                   until SIGTERM, SIGINT or worker.stop()

Each of `concurrency` threads leases up to `batch` messages and handles them one after the other:

    handler returns              the message is acked
    handler raises Reject        the message is dead-lettered, or dropped if the queue has no dead-letter queue
    handler raises an Exception  the exception is logged with its traceback, and the message is nacked. Its text
                                 and the last frames are stored in the message's header `x-last-error`. The message is
                                 retried later.
    handler settled it itself    nothing more is done

The first retry waits `retry_delay_ms` (1 s). Each further retry waits twice as long as the one before, up to
`retry_delay_max_ms` (5 minutes). Each delay is reduced by a random share of up to one half. After the queue's
`attempts_max` (default 20), a message goes to the dead-letter queue, or to `<name>.dlq`.

While handlers run, the worker extends the leases of all messages of the batch. With `keep_alive=False`, a handler that
hangs loses them. When the process dies, its messages return when their leases expire.

Shutdown is graceful: running handlers finish and their messages are settled. Messages not started return to their
places without counting an attempt. Retriable storage errors are logged and retried. Any other error, such as a deleted
queue, ends the worker, and `join` raises it. Stop workers before closing the store.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from basaltmq.embedded.leased import Leased
from basaltmq.errors import BasaltError, InvalidArgumentError, StaleLeaseError
from basaltmq.queues.lifecycle.handler_failure import (
    RETRY_DELAY_MS_DEFAULT,
    RETRY_DELAY_MS_MAX_DEFAULT,
    Backoff,
    Reject,
    log_failure,
    stored_text,
)
from basaltmq.signals import stopped_by_signals

if TYPE_CHECKING:
    from basaltmq.embedded.queue import EmbeddedQueue
    from basaltmq.embedded.readiness import Readiness

CONCURRENCY_MAX: Final = 1024
"""Threads of one worker. For more, use several processes."""

KEEP_ALIVE_SHARE: Final = 1 / 3
"""Interval between extensions as a share of the visibility timeout: one may fail and the next is still in time."""

RETRY_S: Final = 1.0
"""Delay before a retry after a retriable error, in seconds."""

Handler: TypeAlias = Callable[[Leased], object]

__all__ = ["Handler", "Reject", "Worker"]

_log = logging.getLogger("basaltmq")


class Worker:
    """Handles the messages of a queue until it is stopped. A worker runs once."""

    def __init__(
        self,
        queue: EmbeddedQueue,
        handler: Handler,
        *,
        concurrency: int = 1,
        batch: int = 1,
        consumer: str = "worker",
        visibility_ms: int | None = None,
        retry_delay_ms: int = RETRY_DELAY_MS_DEFAULT,
        retry_delay_max_ms: int = RETRY_DELAY_MS_MAX_DEFAULT,
        keep_alive: bool = True,
    ) -> None:
        if not callable(handler):
            raise InvalidArgumentError(f"a handler must be a function of a message, not {type(handler).__name__}")
        if inspect.iscoroutinefunction(handler):
            raise InvalidArgumentError(
                "a handler runs in a thread and cannot be a coroutine function; loop over lease_async instead"
            )
        _require("concurrency", concurrency, 1, CONCURRENCY_MAX)
        _require("batch", batch, 1, None)
        if visibility_ms is not None:
            _require("visibility_ms", visibility_ms, 1, None)
        self.queue = queue
        self.handled = 0
        self.failed = 0
        """Messages whose handler raised."""
        self.late = 0
        """Messages whose lease expired before they were settled. They are redelivered."""
        self._handler = handler
        self._batch = batch
        self._consumer = consumer
        self._visibility_ms = visibility_ms
        self._backoff = Backoff(retry_delay_ms, retry_delay_max_ms)
        self._keep_alive = keep_alive
        self._stopping = False
        self._error: BaseException | None = None
        self._counts = threading.Lock()
        self._waiting: dict[int, Readiness] = {}
        self._pauses = [threading.Event() for _ in range(concurrency)]
        self._held: dict[int, list[Leased]] = {}
        self._all_done = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._work, args=(number,), name=f"basalt-worker-{queue.name}-{number}", daemon=True
            )
            for number in range(concurrency)
        ]
        self._extender = threading.Thread(
            target=self._extend_leases, name=f"basalt-worker-{queue.name}-leases", daemon=True
        )

    def run(self) -> None:
        """Run until stopped; in the main thread, SIGTERM and SIGINT stop it too. Raises like `join`."""
        with stopped_by_signals(self.stop):
            self.start()
            self.join()

    def start(self) -> None:
        """Start in the background."""
        if self._threads[0].ident is not None:
            raise InvalidArgumentError(f"the worker of queue {self.queue.name!r} was started before; create another")
        for thread in self._threads:
            thread.start()
        if self._keep_alive:
            self._extender.start()

    def stop(self) -> None:
        """Request a stop, from any thread, handler or signal handler. `join` waits for it."""
        self._stopping = True
        for waiting in list(self._waiting.values()):
            waiting.cancel()
        for pause in self._pauses:
            pause.set()

    def join(self) -> None:
        """Wait until all running handlers are finished. Raises the error that ended the worker, if any."""
        for thread in self._threads:
            thread.join()
        self._all_done.set()
        if self._extender.ident is not None:
            self._extender.join()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.join()

    def _work(self, number: int) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn(number)
                except BasaltError as error:
                    if not error.retriable:
                        raise
                    _log.warning("queue %r: the worker retries in %.0f s: %s", self.queue.name, RETRY_S, error)
                    self._pauses[number].wait(RETRY_S)
        except BaseException as error:
            # `join` raises the error. The other threads finish their messages.
            with self._counts:
                self._error = self._error or error
            self.stop()

    def _turn(self, number: int) -> None:
        """Lease and handle messages, or wait until some are ready."""
        messages = self.queue.lease(self._batch, consumer=self._consumer, visibility_ms=self._visibility_ms)
        if messages:
            self._handle_all(number, messages)
            return
        readiness = self._waiting[number] = self.queue.readiness()
        # Check `_stopping` after registering: `stop` either finds this wait, or is noticed here.
        is_ready = not self._stopping and readiness.wait()
        del self._waiting[number]
        if is_ready and self._stopping:
            readiness.pass_on()

    def _handle_all(self, number: int, messages: list[Leased]) -> None:
        self._held[number] = messages
        try:
            for message in messages:
                if self._stopping:
                    return
                self._handle(message)
        finally:
            del self._held[number]
            self._release([message for message in messages if not message.settled])

    def _handle(self, message: Leased) -> None:
        failure: Exception | None = None
        try:
            self._handler(message)
        except Exception as error:
            failure = error
            log_failure(self.queue.name, message.id, message.attempts, error)
        with self._counts:
            self.handled += 1
            self.failed += failure is not None
        if message.settled:
            return
        try:
            if failure is None:
                self.queue.ack(message)
            else:
                is_rejected = isinstance(failure, Reject)
                delay_ms = 0 if is_rejected else self._backoff.delay_ms(message.attempts)
                self.queue.nack(message, stored_text(failure), delay_ms=delay_ms, reject=is_rejected)
        except StaleLeaseError as error:
            message.settled = True
            with self._counts:
                self.late += 1
            _log.warning("a message was handled after its lease expired and will be redelivered: %s", error)

    def _release(self, messages: list[Leased]) -> None:
        """Release messages that were not started or could not be settled. Expired ones are released already."""
        for message in messages:
            try:
                self.queue.release(message)
            except StaleLeaseError:
                continue

    def _extend_leases(self) -> None:
        """Extend the leases of held messages until the worker ends."""
        last_error = ""
        while True:
            try:
                visibility_ms = self._visibility_ms or self.queue.config.visibility_timeout_ms
                if self._all_done.wait(visibility_ms / 1000 * KEEP_ALIVE_SHARE):
                    return
                self._extend_all()
            except BasaltError as error:
                # The handling threads get the same error and act on it.
                if str(error) != last_error:
                    _log.warning("queue %r: leases could not be extended: %s", self.queue.name, error)
                last_error = str(error)
                if self._all_done.wait(RETRY_S):
                    return

    def _extend_all(self) -> None:
        tokens = {message.token for held in list(self._held.values()) for message in held if not message.settled}
        for token in tokens:
            try:
                # Extend the whole lease to keep its token, which the handlers' threads use meanwhile.
                self.queue.extend_lease(token, self._visibility_ms)
            except StaleLeaseError:
                continue


def _require(name: str, value: object, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        limit = "or more" if high is None else f"to {high}"
        raise InvalidArgumentError(f"{name} of a worker must be {low} {limit}, not {value!r:.80}")
