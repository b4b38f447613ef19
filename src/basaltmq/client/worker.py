"""A worker: leases messages, calls a handler for each in one of its threads, and settles them.

    worker = Worker(client, "jobs", handle, concurrency=8)
    worker.run()                                   until SIGTERM, SIGINT or worker.stop()

    handler returns              the message is acked
    handler raises Reject        the message is dead-lettered, or dropped if the queue has no dead-letter queue
    handler raises an Exception  the exception is logged with its traceback, and the message is nacked. Its text
                                 and the last frames are stored in the message's header `x-last-error`. The message is
                                 retried later.
    handler settled it itself    nothing more is done

    one thread leases ──> `concurrency` threads handle ──> one thread settles finished messages in batches
                                    one thread extends the leases of held messages

The first retry waits `retry_delay_ms` (1 s). Each further retry waits twice as long as the one before, up to
`retry_delay_max_ms` (5 minutes). Each delay is reduced by a random share of up to one half. A script of the queue may
choose another delay. After `attempts_max` attempts, the queue dead-letters the message.

The worker extends leases while handlers run. With `keep_alive=False`, a handler that hangs loses its message. When the
process dies, its messages return to the queue at once.

Shutdown is graceful: running handlers finish and their messages are settled. Messages not started return to their
places without counting an attempt. Retriable errors, such as a broker restart, are logged and retried. Any other error
ends the worker, and `join` raises it.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Self, TypeAlias

from basaltmq.client.cancellation import Cancellation
from basaltmq.client.client import Client
from basaltmq.client.leased import Leased, by_lease
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

CONCURRENCY_MAX: Final = 1024
"""Threads of one worker. For more, use several processes."""

KEEP_ALIVE_SHARE: Final = 1 / 3
"""Interval between extensions as a share of the visibility timeout: one may fail and the next is still in time."""

POLL_S: Final = 20.0
"""Duration of one long poll, in seconds."""

RETRY_S: Final = 1.0
"""Delay before a retry after a retriable error, in seconds."""

SETTLE_MAX: Final = 1_000
"""Messages settled in one batch."""

Handler: TypeAlias = Callable[[Leased], object]

_log = logging.getLogger("basaltmq")


class Worker:
    """Handles the messages of a queue until it is stopped. A worker runs once."""

    def __init__(
        self,
        client: Client,
        queue_name: str,
        handler: Handler,
        *,
        concurrency: int = 1,
        ahead: int = 0,
        visibility_ms: int | None = None,
        retry_delay_ms: int = RETRY_DELAY_MS_DEFAULT,
        retry_delay_max_ms: int = RETRY_DELAY_MS_MAX_DEFAULT,
        keep_alive: bool = True,
    ) -> None:
        """`ahead` is the number of messages leased beyond those being handled, so that threads need not wait."""
        if not callable(handler) or inspect.iscoroutinefunction(handler):
            raise InvalidArgumentError("a handler must be a function; for a coroutine function use AsyncWorker")
        for name, value, low, high in (("concurrency", concurrency, 1, CONCURRENCY_MAX), ("ahead", ahead, 0, 10_000)):
            if type(value) is not int or not low <= value <= high:
                raise InvalidArgumentError(f"{name} of a worker must be {low} to {high}, not {value!r:.80}")
        self.queue = queue_name
        self.handled = 0
        self.failed = 0
        """Messages whose handler raised."""
        self.late = 0
        """Messages whose lease expired before they were settled. They are redelivered."""
        self._client = client
        self._handler = handler
        self._visibility_ms = visibility_ms
        self._backoff = Backoff(retry_delay_ms, retry_delay_max_ms)
        self._keep_alive = keep_alive
        self._concurrency = concurrency
        self._session = client.open_session()
        self._cancellation = Cancellation()
        self._room = threading.Semaphore(concurrency + ahead)
        self._todo: queue.SimpleQueue[Leased | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Leased, Exception | None] | None] = queue.SimpleQueue()
        self._held: dict[bytes, Leased] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._all_done = threading.Event()
        self._some_held = threading.Event()
        self._error: BaseException | None = None
        self._leaser = self._thread(self._lease, "leases")
        self._handlers = [self._thread(self._handle, str(number)) for number in range(concurrency)]
        self._settler = self._thread(self._settle, "responses")
        self._extender = self._thread(self._extend_leases, "extends")

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(
            target=self._guarded, args=(target,), name=f"basalt-worker-{self.queue}-{name}", daemon=True
        )

    def run(self) -> None:
        """Run until stopped; in the main thread, SIGTERM and SIGINT stop it too. Raises like `join`."""
        with stopped_by_signals(self.stop):
            self.start()
            self.join()

    def start(self) -> None:
        """Start in the background."""
        if self._leaser.ident is not None:
            raise InvalidArgumentError(f"the worker of queue {self.queue!r} was started before; create another")
        for thread in (self._leaser, *self._handlers, self._settler, self._extender):
            thread.start()

    def stop(self) -> None:
        """Request a stop, from any thread, handler or signal handler. `join` waits for it."""
        self._stopping.set()
        # Use a separate thread, because a signal handler must not wait for a lock that the interrupted code holds.
        threading.Thread(target=self._cancellation.cancel, name=f"basalt-worker-{self.queue}-stop", daemon=True).start()

    def join(self) -> None:
        """Wait until all running handlers are finished. Raises the error that ended the worker, if any."""
        self._leaser.join()
        for _ in self._handlers:
            self._todo.put(None)
        for thread in self._handlers:
            thread.join()
        self._done.put(None)
        self._settler.join()
        self._all_done.set()
        self._some_held.set()
        self._extender.join()
        self._client.end_session(self._session)
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            # `join` raises the error. The other threads finish their messages.
            with self._lock:
                self._error = self._error or error
            self.stop()

    def _wait_if_retriable(self, error: BasaltError) -> None:
        """Wait after a retriable error; raise any other."""
        if not error.retriable:
            raise error
        _log.warning("queue %r: the worker retries in %.0f s: %s", self.queue, RETRY_S, error)
        self._stopping.wait(RETRY_S)

    def _lease(self) -> None:
        while not self._stopping.is_set():
            count = self._take_room()
            if not count:
                continue
            messages: list[Leased] = []
            try:
                messages = self._client.lease(
                    self.queue,
                    count,
                    wait=POLL_S,
                    visibility_ms=self._visibility_ms,
                    session=self._session,
                    cancellation=self._cancellation,
                )
            except BasaltError as error:
                self._wait_if_retriable(error)
            finally:
                for _ in range(count - len(messages)):
                    self._room.release()
            with self._lock:
                self._held.update({each.id: each for each in messages})
                if messages and self._keep_alive:
                    self._some_held.set()
            for each in messages:
                self._todo.put(each)

    def _take_room(self) -> int:
        """Wait for free slots. Return their number."""
        if not self._room.acquire(timeout=RETRY_S):
            return 0
        count = 1
        while self._room.acquire(blocking=False):
            count += 1
        return count

    def _handle(self) -> None:
        while (message := self._todo.get()) is not None:
            failure: Exception | None = None
            if self._stopping.is_set():
                # The handler was not started, so the message returns with the session.
                self._drop(message)
                continue
            try:
                self._handler(message)
            except Exception as error:
                failure = error
                log_failure(self.queue, message.id, message.attempts, error)
            self._done.put((message, failure))

    def _settle(self) -> None:
        while (first := self._done.get()) is not None:
            done = [first]
            is_last = False
            while len(done) < SETTLE_MAX and not is_last:
                try:
                    more = self._done.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    is_last = True
                else:
                    done.append(more)
            self._respond(done)
            if is_last:
                return

    def _respond(self, done: list[tuple[Leased, Exception | None]]) -> None:
        acked: list[Leased] = []
        for message, failure in done:
            self.handled += 1
            self.failed += failure is not None
            if message.settled:
                continue
            if failure is None:
                acked.append(message)
            else:
                self._settled([message], partial(self._nack, failure))
        for held in by_lease(acked).values():
            self._settled(held, self._client.ack)
        for message, _ in done:
            self._drop(message)

    def _nack(self, failure: Exception, messages: list[Leased]) -> None:
        is_rejected = isinstance(failure, Reject)
        delay_ms = 0 if is_rejected else self._backoff.delay_ms(messages[0].attempts)
        self._client.nack(messages, stored_text(failure), delay_ms=delay_ms, reject=is_rejected)

    def _settled(self, messages: list[Leased], settle: Callable[[list[Leased]], object]) -> None:
        """Settle messages of one lease. If it is stale, settle one by one, so that only expired messages are lost."""
        while True:
            try:
                settle(messages)
            except StaleLeaseError as error:
                if len(messages) > 1:
                    for each in messages:
                        self._settled([each], settle)
                    return
                self.late += 1
                _log.warning("a message was handled after its lease expired and will be redelivered: %s", error)
            except BasaltError as error:
                if not error.retriable or self._stopping.is_set():
                    raise
                self._wait_if_retriable(error)
                continue
            return

    def _drop(self, message: Leased) -> None:
        with self._lock:
            self._held.pop(message.id, None)
        self._room.release()

    def _extend_leases(self) -> None:
        """Extend the leases of held messages until the worker ends."""
        while not self._all_done.is_set():
            self._some_held.wait()
            with self._lock:
                held = [each for each in self._held.values() if not each.settled]
                if not held and not self._all_done.is_set():
                    self._some_held.clear()
            if not held:
                continue
            if self._all_done.wait(min(each.visibility_ms for each in held) / 1000 * KEEP_ALIVE_SHARE):
                return
            with self._lock:
                leases = {(each.queue, each.token) for each in self._held.values() if not each.settled}
            for name, token in leases:
                # Settling detects an expired lease, and the leasing thread detects a lost broker.
                with suppress(BasaltError):
                    # Extend the whole lease to keep its token, which the handlers' threads use meanwhile.
                    self._client.extend_lease(name, token, self._visibility_ms)
