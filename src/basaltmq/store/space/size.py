"""Size events: producers are held while the store is overfull, consumers never (SPEC A11).

    size   overfull_bytes ─────────●─────────────  producers held from here ...
                                    ╲
           underfull_bytes ──────────╲●──────────  ... to here

Between the two marks the state stays what it was, so that it does not flicker. The size is the real one of all
families, files and memory tables, and of the log `beside` the store. The store reports what producers and consumers
write; every `step_bytes` of that the size is measured, which takes 30 to 50 us. So the store may pass its mark by one
step. Nobody reports appends to the log: the owner calls `measure` from time to time.

While overfull a thread reclaims space (`reclaim`) each time consumers have written something, and rests as long as it
worked. It ends when the store is underfull.

Listeners are called by the thread that measured, one event after the other; they must be quick and not call `measure`.
That thread may be in the middle of somebody's write, which is made: a listener that raises is logged, and a store that
cannot be measured says so at its next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from basaltmq.errors import BasaltError, InvalidConfigError, StoreClosedError, StoreOverfullError
from basaltmq.store.families import MIB
from basaltmq.store.space.reclaim import Beside, Reclaimable, reclaim

STEP_BYTES_MIN: Final = 64 * 1024
"""Measured more often than this, the measuring would be seen in the write rate."""

STEP_BYTES_MAX: Final = 8 * MIB
"""The most a store of any size passes its mark by."""

STEPS: Final = 16
"""Measurements between the two marks."""

RECHECK_S: Final = 5.0
"""While overfull: space may come back by means nobody reports, such as a reader letting go of old files."""

CLOSE_WAIT_S: Final = 60.0
"""A compaction of one family that outlasts this at close is left to the store's own close."""

Listener: TypeAlias = Callable[[bool, int], None]
"""Called with whether the store is overfull, and its size in bytes."""

_log: Final = logging.getLogger(__name__)


class Measurable(Reclaimable, Protocol):
    """What the guard needs of a store."""

    def size_bytes(self) -> int: ...

    def on_write(self, listener: Callable[[int], None]) -> None: ...


class SizeGuard:
    """Watches the size of a store and holds its producers."""

    def __init__(
        self,
        store: Measurable,
        *,
        overfull_bytes: int,
        underfull_bytes: int,
        beside: Beside | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < underfull_bytes < overfull_bytes:
            raise InvalidConfigError(
                f"underfull_bytes ({underfull_bytes}) must be above 0 and below overfull_bytes ({overfull_bytes})"
            )
        self.overfull = False
        self.size_bytes = 0
        self.step_bytes = min(max((overfull_bytes - underfull_bytes) // STEPS, STEP_BYTES_MIN), STEP_BYTES_MAX)
        self._overfull_bytes = overfull_bytes
        self._underfull_bytes = underfull_bytes
        self._store = store
        self._beside = beside
        self._clock = clock
        self._unmeasured_bytes = 0
        self._listeners: list[Listener] = []
        self._measuring = threading.Lock()
        self._changed = threading.Condition()
        self._awaiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._end: BasaltError | None = None
        self._written = threading.Event()
        self._thread: threading.Thread | None = None
        self.measure()
        store.on_write(self.wrote)

    def listen(self, listener: Listener) -> None:
        """Call `listener` at every change from now on, and at once if the store is overfull."""
        with self._measuring:
            self._listeners.append(listener)
            if self.overfull:
                _tell(listener, True, self.size_bytes)

    def wrote(self, size_bytes: int) -> None:
        """The store was written to, by a producer or a consumer."""
        self._unmeasured_bytes += size_bytes
        if self.overfull:
            self._written.set()
        elif self._unmeasured_bytes >= self.step_bytes and self._measuring.acquire(blocking=False):
            # If it is held, somebody measures right now.
            try:
                with contextlib.suppress(BasaltError):
                    self._measure()
            finally:
                self._measuring.release()

    def measure(self) -> int:
        """Measure, tell whom it concerns, and return the size."""
        with self._measuring:
            return self._measure()

    def admit(self) -> None:
        """Producers ask before they write."""
        if self.overfull:
            raise StoreOverfullError(
                f"the store holds {self.size_bytes} bytes, its limit is {self._overfull_bytes}; "
                f"it takes messages again once consumers have brought it down to {self._underfull_bytes}"
            )

    def wait_underfull(self, timeout_s: float | None = None) -> bool:
        """Block the calling thread while the store is overfull; False if it still is after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or not self.overfull, timeout_s)
            self._require_open()
            return not self.overfull

    async def until_underfull(self) -> None:
        """Return when the store is not overfull."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self._require_open()
            if not self.overfull:
                return
            future: asyncio.Future[None] = loop.create_future()
            waiter = (loop, future)
            self._awaiting.add(waiter)
        try:
            await future
        finally:
            with self._changed:
                self._awaiting.discard(waiter)
        self._require_open()

    def close(self) -> None:
        """Stop. Whoever waits gets StoreClosedError. Call it before the store is closed."""
        self._stop(StoreClosedError("the store is closing"))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_WAIT_S)

    def _stop(self, error: BasaltError) -> None:
        with self._changed:
            if self._end is None:
                self._end = error
            self._wake()
        self._written.set()

    def _require_open(self) -> None:
        if self._end is not None:
            raise type(self._end)(*self._end.args)

    def _measure(self) -> int:
        self._unmeasured_bytes = 0
        size_bytes = self._store.size_bytes() + (0 if self._beside is None else self._beside.log_bytes())
        self.size_bytes = size_bytes
        if self.overfull and size_bytes <= self._underfull_bytes:
            self._change(overfull=False)
        elif not self.overfull and size_bytes >= self._overfull_bytes:
            self._change(overfull=True)
        return size_bytes

    def _change(self, *, overfull: bool) -> None:
        with self._changed:
            self.overfull = overfull
            if not overfull:
                self._wake()
        if overfull and self._end is None:
            self._written.set()
            self._thread = threading.Thread(target=self._reclaim, name="basalt-reclaim", daemon=True)
            self._thread.start()
        for listener in self._listeners:
            _tell(listener, overfull, self.size_bytes)

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, future in self._awaiting:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                # The loop is closed; nobody waits there any more.
                continue

    def _reclaim(self) -> None:
        """Give back the space of what was deleted, until the store is underfull."""
        thread = threading.current_thread()
        rest_s = 0.0
        # An underfull store may be overfull again, with another thread, before this one looks.
        while self.overfull and self._end is None and self._thread is thread:
            try:
                if self._written.wait(RECHECK_S):
                    with self._changed:
                        self._changed.wait_for(lambda: self._end is not None, rest_s)
                    self._written.clear()
                    begun = self._clock()
                    reclaim(self._store, self._is_enough, beside=self._beside)
                    self.measure()
                    rest_s = self._clock() - begun
                else:
                    self.measure()
            except BasaltError as error:
                # The store is closed or poisoned; nobody need wait for space in it.
                self._stop(error)

    def _is_enough(self) -> bool:
        self.measure()
        return not self.overfull or self._end is not None


def _tell(listener: Listener, overfull: bool, size_bytes: int) -> None:
    try:
        listener(overfull, size_bytes)
    except Exception:
        _log.exception("a listener failed on overfull=%s at %d bytes", overfull, size_bytes)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
