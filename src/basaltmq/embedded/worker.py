"""A worker: a loop that leases messages, hands each to a function, and settles it.

    worker = queue.worker(handle, concurrency=4)
    worker.run()                                   until SIGTERM, SIGINT or worker.stop()

Each of `concurrency` threads leases up to `batch` messages and handles them one after the other:

    handler returns             the message is acked
    handler raises Reject       it is given up: dead-lettered, or dropped if the queue has no dead-letter queue
    handler raises an Exception it is logged with its traceback and nacked with its text, which is kept with the message
                                as `x-last-error`; it is tried again later (see below)
    handler settled it itself   nothing more is done

The first retry waits `retry_delay_ms` (1 s), each further one twice as long as the one before, up to
`retry_delay_max_ms` (5 minutes); a random share of up to a half is taken off. After the `attempts_max` of the queue (20
unless it says otherwise) a message goes to the dead-letter queue, or to `<name>.dlq`.

Leases of what is being handled, and of what waits behind it in the batch, are extended while the handler runs, so that
a long one keeps its messages; with `keep_alive=False` a handler that hangs loses them instead. A process that dies
stops extending: its messages come back when their leases expire.

Stopping is graceful: handlers that run are finished and settled, messages not begun go back to their places, and no
attempt is counted. A storage error that may pass is logged and tried again; any other ends the worker, and `join`
raises it. A queue deleted under its worker is such an error. Stop workers before closing the store.
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
from basaltmq.queues.handler_failure import (
    RETRY_DELAY_MS_DEFAULT,
    RETRY_DELAY_MS_MAX_DEFAULT,
    Backoff,
    Reject,
    log_failure,
    text_of,
)
from basaltmq.signals import stopped_by_signals

if TYPE_CHECKING:
    from basaltmq.embedded.queue import EmbeddedQueue
    from basaltmq.embedded.readiness import Readiness

CONCURRENCY_MAX: Final = 1024
"""Threads of one worker; beyond it another process is the better answer."""

KEEP_ALIVE_SHARE: Final = 1 / 3
"""Of the visibility timeout, between two extensions: one may fail and the next still comes in time."""

RETRY_S: Final = 1.0
"""Before a storage error that may pass is met again."""

Handler: TypeAlias = Callable[[Leased], object]

__all__ = ["Handler", "Reject", "Worker"]

_log = logging.getLogger("basaltmq")


class Worker:
    """Handles the messages of a queue until it is stopped. Works once: make another to go on."""

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
            raise InvalidArgumentError(f"a handler is a function of a message, not {type(handler).__name__}")
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
        """Messages whose lease was over before they were settled: they are handled again."""
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
        self._keeper = threading.Thread(target=self._keep, name=f"basalt-worker-{queue.name}-leases", daemon=True)

    def run(self) -> None:
        """Work in this thread's name until stopped; in the main thread also by SIGTERM and SIGINT. Raises as `join`."""
        with stopped_by_signals(self.stop):
            self.start()
            self.join()

    def start(self) -> None:
        """Begin in the background."""
        if self._threads[0].ident is not None:
            raise InvalidArgumentError(f"the worker of queue {self.queue.name!r} was started before; make another")
        for thread in self._threads:
            thread.start()
        if self._keep_alive:
            self._keeper.start()

    def stop(self) -> None:
        """Ask to stop, from anywhere, a handler or a signal handler included; `join` waits for it."""
        self._stopping = True
        for waiting in list(self._waiting.values()):
            waiting.give_up()
        for pause in self._pauses:
            pause.set()

    def join(self) -> None:
        """Wait until everything that runs is finished; raises the error that ended the worker, if one did."""
        for thread in self._threads:
            thread.join()
        self._all_done.set()
        if self._keeper.ident is not None:
            self._keeper.join()
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
                    _log.warning("the worker of queue %r goes on in %.0f s: %s", self.queue.name, RETRY_S, error)
                    self._pauses[number].wait(RETRY_S)
        except BaseException as error:
            # Whoever joins gets it; the other threads finish what they have.
            with self._counts:
                self._error = self._error or error
            self.stop()

    def _turn(self, number: int) -> None:
        """Wait for messages if there are none, and handle those there are."""
        messages = self.queue.lease(self._batch, consumer=self._consumer, visibility_ms=self._visibility_ms)
        if messages:
            self._handle_all(number, messages)
            return
        readiness = self._waiting[number] = self.queue.readiness()
        # Said after we can be found: whoever stops us either sees us wait, or is seen here.
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
            self._give_back([message for message in messages if not message.settled])

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
                self.queue.nack(message, text_of(failure), delay_ms=delay_ms, reject=is_rejected)
        except StaleLeaseError as error:
            message.settled = True
            with self._counts:
                self.late += 1
            _log.warning("a message was handled after its lease was over and comes again: %s", error)

    def _give_back(self, messages: list[Leased]) -> None:
        """Release what was not begun, or could not be settled. What has expired is given back already."""
        for message in messages:
            try:
                self.queue.release(message)
            except StaleLeaseError:
                continue

    def _keep(self) -> None:
        """Extend the leases of what is held, until all is done."""
        said = ""
        while True:
            try:
                visibility_ms = self._visibility_ms or self.queue.config.visibility_timeout_ms
                if self._all_done.wait(visibility_ms / 1000 * KEEP_ALIVE_SHARE):
                    return
                self._extend_all()
            except BasaltError as error:
                # The threads that handle messages meet it too, and decide.
                if str(error) != said:
                    _log.warning("leases of queue %r could not be extended: %s", self.queue.name, error)
                said = str(error)
                if self._all_done.wait(RETRY_S):
                    return

    def _extend_all(self) -> None:
        tokens = {message.token for held in list(self._held.values()) for message in held if not message.settled}
        for token in tokens:
            try:
                # The whole of a lease, so that its token stays: the handlers' threads answer with it meanwhile.
                self.queue.extend_lease(token, self._visibility_ms)
            except StaleLeaseError:
                continue


def _require(name: str, value: object, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        limit = "or more" if high is None else f"to {high}"
        raise InvalidArgumentError(f"{name} of a worker is {low} {limit}, not {value!r:.80}")
