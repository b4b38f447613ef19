"""A worker: leases messages, hands each to a function in one of its threads, and settles it.

    worker = Worker(client, "jobs", handle, concurrency=8)
    worker.run()                                   until SIGTERM, SIGINT or worker.stop()

    handler returns             the message is acked
    handler raises Reject       it is given up: dead-lettered, or dropped if the queue has no dead-letter queue
    handler raises an Exception it is logged with its traceback and nacked with its text, which is kept with the message
                                as `x-last-error`; it is tried again later (see below)
    handler settled it itself   nothing more is done

    one thread leases ──> `concurrency` threads handle ──> one thread settles what is done, many at once
                                    one thread extends the leases of what is held

The first retry waits `retry_delay_ms` (1 s), each further one twice as long as the one before, up to
`retry_delay_max_ms` (5 minutes); a random share of up to a half is taken off. A script of the queue may choose another
wait. After the `attempts_max` of the queue a message is dead-lettered.

Leases are extended while handlers run, so that a long one keeps its message; with `keep_alive=False` a handler that
hangs loses it instead. A process that dies gives everything back at once.

Stopping is graceful: handlers that run are finished and their messages settled; messages not begun go back to their
places, and no attempt is counted. An error that may pass (the broker is restarted) is logged and tried again; any other
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

from basaltmq.client.client import Client
from basaltmq.client.leased import Leased, by_lease
from basaltmq.client.worker_session import GiveUp
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

CONCURRENCY_MAX: Final = 1024
"""Threads of one worker; beyond it another process is the better answer."""

KEEP_ALIVE_SHARE: Final = 1 / 3
"""Of the visibility timeout, between two extensions: one may fail and the next still comes in time."""

POLL_S: Final = 20.0
"""One long poll."""

RETRY_S: Final = 1.0
"""Before an error that may pass is met again."""

SETTLE_MAX: Final = 1_000
"""Messages settled together."""

Handler: TypeAlias = Callable[[Leased], object]

_log = logging.getLogger("basaltmq")


class Worker:
    """Handles the messages of a queue until it is stopped. Works once: make another to go on."""

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
        """`ahead` is how many messages are leased beyond those being handled, so that threads need not wait for one."""
        if not callable(handler) or inspect.iscoroutinefunction(handler):
            raise InvalidArgumentError("a handler is a function of a message; for a coroutine function use AsyncWorker")
        for name, value, low, high in (("concurrency", concurrency, 1, CONCURRENCY_MAX), ("ahead", ahead, 0, 10_000)):
            if type(value) is not int or not low <= value <= high:
                raise InvalidArgumentError(f"{name} of a worker is {low} to {high}, not {value!r:.80}")
        self.queue = queue_name
        self.handled = 0
        self.failed = 0
        """Messages whose handler raised."""
        self.late = 0
        """Messages whose lease was over before they were settled: they are handled again."""
        self._client = client
        self._handler = handler
        self._visibility_ms = visibility_ms
        self._backoff = Backoff(retry_delay_ms, retry_delay_max_ms)
        self._keep_alive = keep_alive
        self._concurrency = concurrency
        self._attendance = client.attend()
        self._give_up = GiveUp()
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
        self._settler = self._thread(self._settle, "answers")
        self._keeper = self._thread(self._keep, "extends")

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(
            target=self._guarded, args=(target,), name=f"basalt-worker-{self.queue}-{name}", daemon=True
        )

    def run(self) -> None:
        """Work until stopped; in the main thread also by SIGTERM and SIGINT. Raises as `join`."""
        with stopped_by_signals(self.stop):
            self.start()
            self.join()

    def start(self) -> None:
        """Begin in the background."""
        if self._leaser.ident is not None:
            raise InvalidArgumentError(f"the worker of queue {self.queue!r} was started before; make another")
        for thread in (self._leaser, *self._handlers, self._settler, self._keeper):
            thread.start()

    def stop(self) -> None:
        """Ask to stop, from anywhere, a handler or a signal handler included; `join` waits for it."""
        self._stopping.set()
        # In a thread of its own: a signal handler must not wait for a lock that the interrupted code holds.
        threading.Thread(target=self._give_up.now, name=f"basalt-worker-{self.queue}-stop", daemon=True).start()

    def join(self) -> None:
        """Wait until everything that runs is finished; raises the error that ended the worker, if one did."""
        self._leaser.join()
        for _ in self._handlers:
            self._todo.put(None)
        for thread in self._handlers:
            thread.join()
        self._done.put(None)
        self._settler.join()
        self._all_done.set()
        self._some_held.set()
        self._keeper.join()
        self._attendance.close()
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
            # Whoever joins gets it; the other threads finish what they have.
            with self._lock:
                self._error = self._error or error
            self.stop()

    def _passing(self, error: BasaltError) -> None:
        """Wait before an error that may pass is met again; raise any other."""
        if not error.retriable:
            raise error
        _log.warning("the worker of queue %r goes on in %.0f s: %s", self.queue, RETRY_S, error)
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
                    attendance=self._attendance,
                    give_up=self._give_up,
                )
            except BasaltError as error:
                self._passing(error)
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
        """Wait until something may be leased; how much."""
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
                # Not begun: it goes back with the attendance.
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
            self._answer(done)
            if is_last:
                return

    def _answer(self, done: list[tuple[Leased, Exception | None]]) -> None:
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
        self._client.nack(messages, text_of(failure), delay_ms=delay_ms, reject=is_rejected)

    def _settled(self, messages: list[Leased], settle: Callable[[list[Leased]], object]) -> None:
        """Settle messages of one lease; one that is over costs only those it is over for."""
        while True:
            try:
                settle(messages)
            except StaleLeaseError as error:
                if len(messages) > 1:
                    for each in messages:
                        self._settled([each], settle)
                    return
                self.late += 1
                _log.warning("a message was handled after its lease was over and comes again: %s", error)
            except BasaltError as error:
                if not error.retriable or self._stopping.is_set():
                    raise
                self._passing(error)
                continue
            return

    def _drop(self, message: Leased) -> None:
        with self._lock:
            self._held.pop(message.id, None)
        self._room.release()

    def _keep(self) -> None:
        """Extend the leases of what is held, until all is done."""
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
                # A lease that is over is noticed when its messages are settled, a broker that is away by the leaser.
                with suppress(BasaltError):
                    # The whole of a lease, so that its token stays: the handlers' threads answer with it meanwhile.
                    self._client.extend_lease(name, token, self._visibility_ms)
