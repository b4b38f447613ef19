"""Supervision of virtual hosts: restarts one that fails, without effect on the others (SPEC E9, P11).

    starting ─> running ─> (disk error) ─> restarting ─> running
                                               └─ too often ─> down ─> (operator) ─> starting

A virtual host restarts at most `restarts_max` times within `window_s`, with growing pauses. Then it stays down until an
operator starts it (`vhosts.on_failure = "continue"`), or the node stops (`"stop_node"`). A restart that cannot open the
store counts too. A virtual host that cannot be opened when the node starts is restarted in the same way.

Restarts after a full disk do not count, because the cause is outside the virtual host. They repeat until there is
space, with pauses that grow to FULL_PAUSE_S_MAX.

The node's own store, with users and virtual hosts, is opened again in the same way (`SupervisedStore`). Meanwhile
virtual hosts keep running, but logins that need a row fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from basaltmq.broker.vhost import VHost
from basaltmq.errors import BasaltError, StorageError, VHostDownError, is_disk_full
from basaltmq.store.open import reopen_store
from basaltmq.store.rocks import RocksStore

FULL_REMEMBERED: Final = 16
"""Restarts on a full disk that lengthen the next pause. Fewer are enough to reach FULL_PAUSE_S_MAX."""

PAUSE_S: Final = 0.2
"""Pause before the second restart in the window. It roughly doubles with each further one; the first has none."""

SETTLE_S: Final = 60.0
"""Maximum time that a start by an operator waits for restarts in progress. The default of three restarts pauses 0.8 s
in total; the rest is for opening the store."""

FULL_PAUSE_S_MAX: Final = 5.0
"""Maximum pause between restarts on a full disk, and so the maximum downtime after space becomes free."""

_log: Final = logging.getLogger(__name__)


class VHostState(enum.StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    DOWN = "down"
    STOPPED = "stopped"


class Supervised:
    """A supervised virtual host and its state."""

    def __init__(
        self,
        name: str,
        open_vhost: Callable[[], Awaitable[VHost]],
        close_store: Callable[[VHost], Awaitable[None]],
        *,
        restarts_max: int,
        window_s: float,
        gave_up: Callable[[Supervised], None],
        changed: Callable[[Supervised], None],
        disk_full: Callable[[Supervised], None] = lambda _: None,
        clock_s: Callable[[], float] = time.monotonic,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`gave_up` is called when it stays down, `changed` when its state changes, `disk_full` to free disk space."""
        self.name = name
        self.state = VHostState.STARTING
        self.error: BaseException | None = None
        self.restarts = 0
        """Number of restarts since the node started."""
        self._open_vhost = open_vhost
        self._close_store = close_store
        self._restarts_max = restarts_max
        self._window_s = window_s
        self._gave_up = gave_up
        self._changed = changed
        self._disk_full = disk_full
        self._clock_s = clock_s
        self._pause_s = pause_s
        self._vhost: VHost | None = None
        self._recent: deque[float] = deque()
        self._full_since: deque[float] = deque(maxlen=FULL_REMEMBERED)
        """Times of failures by a full disk within the window."""
        self._restarting: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._operator = asyncio.Lock()
        """Serializes starts and restarts by an operator."""
        self._settled = asyncio.Event()
        """Set while no start or restart is in progress."""
        self._is_pausing = False

    def vhost(self) -> VHost:
        if self.state is VHostState.RUNNING and self._vhost is not None:
            return self._vhost
        reason = "" if self.error is None else f": {self.error}"
        remedy = "; fix the cause, then start it" if self.state is VHostState.DOWN else ""
        raise VHostDownError(f"vhost '{self.name}' is {self.state}{reason}{remedy}")

    async def start(self) -> None:
        """Open it. If that fails, it is restarted within the limits."""
        async with self._lock:
            if self.state is VHostState.RUNNING:
                return
            self._recent.clear()
            self._enter(VHostState.STARTING)
        await self._try_open()

    async def start_by_hand(self) -> None:
        """Open it unless it runs. Raises VHostDownError with the reason if it does not run afterwards."""
        async with self._operator:
            await self.start()
            await self.require_running()

    async def restart_by_hand(self) -> None:
        """Close and reopen it. Raises VHostDownError with the reason if it does not run afterwards."""
        async with self._operator:
            await self.stop()
            await self.start()
            await self.require_running()

    async def require_running(self, timeout_s: float = SETTLE_S) -> None:
        """Wait for restarts in progress. Raises VHostDownError with the reason if it does not run afterwards."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        self.vhost()

    async def stop(self) -> None:
        """Close it, cleanly if it runs."""
        self._enter(VHostState.STOPPED)
        if self._restarting is not None:
            # Cancel a restart only in its pause. A thread that opens the store cannot be cancelled, and the store would
            # stay open and locked.
            if self._is_pausing:
                self._restarting.cancel()
            await asyncio.wait([self._restarting])
            self._restarting = None
        async with self._lock:
            vhost, self._vhost = self._vhost, None
            if vhost is not None:
                await vhost.close()
                await self._close_store(vhost)

    async def _try_open(self) -> None:
        await self._close_failed()
        try:
            async with self._lock:
                if self._is_stopped():
                    return
                vhost = await self._open_vhost()
                vhost.on_failed = self._failed
                self._vhost = vhost
                if self._is_stopped():
                    # `stop` waits for the lock and then closes the virtual host.
                    return
                vhost.start()
                self.error = None
                self._enter(VHostState.RUNNING)
        except (BasaltError, OSError) as error:
            _log.error("cannot open vhost %r: %s", self.name, error)
            self._failed(error)
        except Exception as error:
            _log.exception("cannot open vhost %r", self.name)
            self._failed(error)

    def _is_stopped(self) -> bool:
        return self.state is VHostState.STOPPED

    def _failed(self, error: BaseException) -> None:
        self.error = error
        if self.state in (VHostState.STOPPED, VHostState.DOWN):
            return
        now_s = self._clock_s()
        while self._recent and self._recent[0] <= now_s - self._window_s:
            self._recent.popleft()
        if is_disk_full(error):
            self._await_space(now_s)
            return
        if len(self._recent) >= self._restarts_max:
            self._enter(VHostState.DOWN)
            _log.error(
                "vhost %r failed %d times within %g s and stays down until an operator starts it: %s",
                self.name,
                len(self._recent) + 1,
                self._window_s,
                error,
            )
            self._restarting = asyncio.get_running_loop().create_task(self._close_failed())
            self._gave_up(self)
            return
        pause_s = self._pause_s * (2 ** len(self._recent) - 1)
        self._recent.append(now_s)
        self.restarts += 1
        self._enter(VHostState.RESTARTING)
        self._restarting = asyncio.get_running_loop().create_task(self._restart(pause_s))

    def _await_space(self, now_s: float) -> None:
        """Restart after a full disk, without a limit on the number of restarts."""
        while self._full_since and self._full_since[0] <= now_s - self._window_s:
            self._full_since.popleft()
        pause_s = min(self._pause_s * (2 ** len(self._full_since) - 1), FULL_PAUSE_S_MAX)
        self._full_since.append(now_s)
        self.restarts += 1
        self._disk_full(self)
        self._enter(VHostState.RESTARTING)
        self._restarting = asyncio.get_running_loop().create_task(self._restart(pause_s))

    async def _restart(self, pause_s: float) -> None:
        if pause_s:
            self._is_pausing = True
            try:
                await asyncio.sleep(pause_s)
            finally:
                self._is_pausing = False
        await self._try_open()

    async def _close_failed(self) -> None:
        """Close the failed virtual host, so that its store can be reopened."""
        async with self._lock:
            vhost, self._vhost = self._vhost, None
            if vhost is not None:
                try:
                    await vhost.close()
                    await self._close_store(vhost)
                except Exception as error:
                    _log.error("cannot close failed vhost %r: %s", self.name, error)

    def _enter(self, state: VHostState) -> None:
        if state in (VHostState.STARTING, VHostState.RESTARTING):
            self._settled.clear()
        else:
            self._settled.set()
        if state is not self.state:
            self.state = state
            self._changed(self)


class SupervisedStore:
    """Opens a store again after an I/O error, for all objects that hold it."""

    def __init__(
        self,
        store: RocksStore,
        *,
        restarts_max: int,
        window_s: float,
        disk_full: Callable[[], None],
        reopened: Callable[[], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`disk_full` is called to free disk space, `reopened` when the store serves again. Both run on the loop."""
        self._store = store
        self._restarts_max = restarts_max
        self._window_s = window_s
        self._disk_full = disk_full
        self._reopened = reopened
        self._clock_s = clock_s
        self._recent: deque[float] = deque(maxlen=restarts_max)
        self._cause: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_given_up = False

    def step(self) -> None:
        """Start to open the store again if it failed. Call it periodically on the loop."""
        error = self._error()
        if error is None or self._is_given_up or (self._task is not None and not self._task.done()):
            return
        if self._cause is None:
            self._cause = error
            _log.error("the store at %s failed and is opened again: %s", self._store.path, error)
        if is_disk_full(self._cause):
            self._disk_full()
        elif not self._may_try():
            self._is_given_up = True
            _log.error(
                "the store at %s failed %d times within %g s; restart the broker after the cause is fixed: %s",
                self._store.path, self._restarts_max, self._window_s, self._cause,
            )  # fmt: skip
            return
        self._task = asyncio.get_running_loop().create_task(self._try_open())

    async def close(self) -> None:
        """Wait for a running attempt: its thread cannot be cancelled, and the store would stay locked."""
        self._is_given_up = True
        if self._task is not None:
            await asyncio.wait([self._task])

    def _error(self) -> StorageError | None:
        try:
            self._store.require_open()
        except StorageError as error:
            return error
        return None

    def _may_try(self) -> bool:
        now_s = self._clock_s()
        if len(self._recent) == self._restarts_max and (not self._recent or now_s - self._recent[0] < self._window_s):
            return False
        self._recent.append(now_s)
        return True

    async def _try_open(self) -> None:
        try:
            await asyncio.to_thread(reopen_store, self._store)
            self._reopened()
        except (BasaltError, OSError) as error:
            self._cause = error
            _log.error("cannot open the store at %s again: %s", self._store.path, error)
            return
        self._cause = None
        _log.warning("the store at %s serves again", self._store.path)
