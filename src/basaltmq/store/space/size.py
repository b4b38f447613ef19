"""The size guard: blocks publishers while the store is overfull, never consumers (SPEC A11).

    size   overfull_bytes ─────────●─────────────  publishers blocked from here ...
                                    ╲
           underfull_bytes ──────────╲●──────────  ... to here

Between the two limits the state does not change, which prevents flapping. The size is that of all families (files and
memtables) plus its log. The store reports every write. After every `step_bytes` of writes the guard
measures the size, which takes 30 to 50 us. So the store may exceed its limit by one step. Appends to the log are not
reported: the owner calls `measure` periodically.

Until the store is underfull, a thread reclaims space (`reclaim`) after each write and pauses as long as it worked.

The measuring thread calls the listeners, one event at a time. Listeners must be quick and must not call `measure`. The
thread may be inside a write that is already applied, so a listener's exception is logged. If a store cannot be
measured, its next call raises the error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from basaltmq.errors import BasaltError, InvalidConfigError, StoreOverfullError
from basaltmq.store.families import MIB
from basaltmq.store.space.reclaim import LogSpace, Reclaimable, reclaim

STEP_BYTES_MIN: Final = 64 * 1024
"""Minimum bytes between two measurements. More frequent measurements would reduce the write rate."""

STEP_BYTES_MAX: Final = 8 * MIB
"""Largest overshoot of the limit, for a store of any size."""

STEPS: Final = 16
"""Number of measurements between the two limits."""

RECHECK_S: Final = 5.0
"""Interval between checks while overfull: space can be freed without a report (a reader closes old files)."""

CLOSE_WAIT_S: Final = 60.0
"""How long `close` waits for a compaction of one family. The store's own close handles a longer one."""

Listener: TypeAlias = Callable[[bool, int], None]
"""Receives whether the store is overfull, and its size in bytes."""

_log: Final = logging.getLogger(__name__)


class Measurable(Reclaimable, Protocol):
    """The store operations that the guard uses."""

    def size_bytes(self) -> int: ...

    def on_write(self, listener: Callable[[int], None]) -> None: ...


class SizeGuard:
    """Measures the size of a store and blocks its publishers."""

    def __init__(
        self,
        store: Measurable,
        *,
        overfull_bytes: int,
        underfull_bytes: int,
        log: LogSpace | None = None,
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
        self._log = log
        self._clock = clock
        self._unmeasured_bytes = 0
        self._listeners: list[Listener] = []
        self._measuring = threading.Lock()
        self._stopping = threading.Event()
        self._written = threading.Event()
        self._thread: threading.Thread | None = None
        self.measure()
        store.on_write(self.wrote)

    def listen(self, listener: Listener) -> None:
        """Call `listener` at every change from now on, and at once if the store is overfull."""
        with self._measuring:
            self._listeners.append(listener)
            if self.overfull:
                _notify(listener, True, self.size_bytes)

    def wrote(self, size_bytes: int) -> None:
        """Record a write by a publisher or a consumer."""
        self._unmeasured_bytes += size_bytes
        if self.overfull:
            self._written.set()
        elif self._unmeasured_bytes >= self.step_bytes and self._measuring.acquire(blocking=False):
            # If the lock is held, another thread is measuring.
            try:
                with contextlib.suppress(BasaltError):
                    self._measure()
            finally:
                self._measuring.release()

    def measure(self) -> int:
        """Measure the size, notify listeners of a change, and return the size."""
        with self._measuring:
            return self._measure()

    def admit(self) -> None:
        """Raise StoreOverfullError if publishers are blocked. Call it before a publish."""
        if self.overfull:
            raise StoreOverfullError(
                f"the store holds {self.size_bytes} bytes, its limit is {self._overfull_bytes}; "
                f"publishing resumes when consumers have reduced it to {self._underfull_bytes}"
            )

    def close(self) -> None:
        """Stop the guard. Call it before the store is closed."""
        self._stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_WAIT_S)

    def _stop(self) -> None:
        self._stopping.set()
        self._written.set()

    def _measure(self) -> int:
        self._unmeasured_bytes = 0
        size_bytes = self._store.size_bytes() + (0 if self._log is None else self._log.log_bytes())
        self.size_bytes = size_bytes
        if self.overfull and size_bytes <= self._underfull_bytes:
            self._change(overfull=False)
        elif not self.overfull and size_bytes >= self._overfull_bytes:
            self._change(overfull=True)
        return size_bytes

    def _change(self, *, overfull: bool) -> None:
        self.overfull = overfull
        if overfull and not self._stopping.is_set():
            self._written.set()
            self._thread = threading.Thread(target=self._reclaim, name="basalt-reclaim", daemon=True)
            self._thread.start()
        for listener in self._listeners:
            _notify(listener, overfull, self.size_bytes)

    def _reclaim(self) -> None:
        """Reclaim space until the store is underfull."""
        thread = threading.current_thread()
        rest_s = 0.0
        # The store may become overfull again, with a new thread, before this thread checks.
        while self.overfull and not self._stopping.is_set() and self._thread is thread:
            try:
                if self._written.wait(RECHECK_S):
                    self._stopping.wait(rest_s)
                    self._written.clear()
                    begun = self._clock()
                    reclaim(self._store, self._is_enough, log=self._log)
                    self.measure()
                    rest_s = self._clock() - begun
                else:
                    self.measure()
            except BasaltError:
                # The store is closed or poisoned: its next call raises the error.
                self._stop()

    def _is_enough(self) -> bool:
        self.measure()
        return not self.overfull or self._stopping.is_set()


def _notify(listener: Listener, overfull: bool, size_bytes: int) -> None:
    try:
        listener(overfull, size_bytes)
    except Exception:
        _log.exception("a listener failed on overfull=%s at %d bytes", overfull, size_bytes)
