"""Group commit: one fsync makes the writes of many callers durable.

    coroutines:  write to the store or a lane, then durable() or after_sync() ─┐
                                                                               ├ the open group
    threads:     write to the store or a lane, then wait_durable() ────────────┘
                                                                               │
    sync thread: take the group, open a new one, sync, notify every member

The next group collects members while a sync runs. A lone member is served at once. Threads notified together usually
write again together, one after the other as they acquire the GIL. A sync that starts with the first of them would
leave the others to a second sync. So the next group waits for as many threads as were notified, for at most the
duration of the last sync. If they do not return, the wait is suspended for some groups. Coroutines need no wait: those
of one loop turn join together.

A member joins its group before the group is taken, and the group is taken before its sync begins. So a sync covers
every write that it confirms. A failed sync fails its waiting members and poisons the target: only recovery can tell
whether their bytes reached the disk. If an event loop closes while it waits, the sync runs without a notification.

Measured with `bench commits` on two busy cores: one loop serves 64 committers at 35 to 45 us each, including the write
and the committer itself. That is about 20 times the rate of one committer. 64 threads cost about 90 us each, mostly for
GIL handover, and reach 8 to 11 times the rate of one thread. The GIL is the limit, not the disk.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeAlias

from basaltmq.errors import BasaltError, StorageError, StoreClosedError
from basaltmq.store.forks import in_child

RETURN_WAIT_S_MAX: Final = 0.002
"""Longest wait of a group for notified threads, on any disk. Each thread returns within tens of us."""

RETURN_WAITS_SKIPPED_MAX: Final = 64
"""Most groups that skip the wait after repeated timeouts, which bounds its cost to about 1 %."""

CLOSE_WAIT_S: Final = 60.0
"""How long `close` waits for a sync. A longer one means that the disk does not respond."""


Synced: TypeAlias = Callable[[BasaltError | None], None]
"""Called after a sync, with its error if it failed. Must not raise."""


class Syncable(Protocol):
    """A target that is written first and made durable later."""

    def sync(self) -> None: ...

    def poison(self, error: BaseException) -> None: ...


class _Signal:
    """Wakes one waiting thread. A lock that starts acquired is the cheapest primitive."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()

    def give(self) -> None:
        """Wake the waiter. Call it once per `wait`."""
        self._held.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Return False if `timeout_s` seconds pass without the signal. Negative means no limit."""
        return self._held.acquire(timeout=timeout_s)


class _Thread:
    """A blocked thread."""

    __slots__ = ("error", "synced")

    def __init__(self) -> None:
        self.error: BasaltError | None = None
        self.synced = _Signal()


class Group:
    """The members that wait for one sync."""

    __slots__ = ("callbacks", "threads")

    def __init__(self) -> None:
        self.threads: list[_Thread] = []
        self.callbacks: dict[asyncio.AbstractEventLoop, list[Synced]] = {}

    def __bool__(self) -> bool:
        return bool(self.threads or self.callbacks)


class _Returning:
    """Decides how many threads a group waits for. The group's lock guards `_wanted`; the sync thread owns the rest."""

    __slots__ = ("_complete", "_limit_s", "_missed", "_notified", "_skips", "_wanted")

    def __init__(self) -> None:
        self._complete = _Signal()
        self._wanted = 0
        self._notified = 0
        self._limit_s = 0.0
        self._missed = 0
        self._skips = 0

    def joined(self, threads: int) -> None:
        if threads == self._wanted:
            self._wanted = 0
            self._complete.give()

    def notified(self, threads: int, took_s: float) -> None:
        self._notified = threads
        self._limit_s = min(took_s, RETURN_WAIT_S_MAX)

    def wait(self, lock: threading.Lock, group: Group) -> None:
        """Wait for the threads notified last to join again, for at most the duration of the last sync."""
        if self._notified < 2:
            return
        if self._skips:
            self._skips -= 1
            return
        with lock:
            if len(group.threads) >= self._notified or not group.threads:
                return
            self._wanted = self._notified
        if self._complete.wait(self._limit_s):
            self._missed = 0
            return
        with lock:
            if not self._wanted:
                # The last thread joined after the timeout and has given the signal.
                self._complete.wait()
            self._wanted = 0
            if len(group.threads) * 2 < self._notified:
                self._missed += 1
                self._skips = min(1 << self._missed, RETURN_WAITS_SKIPPED_MAX)


class GroupCommit:
    """Waits for durability on any target with `sync`: a store, or a lane of the log.

    `finish` runs after each sync, when its members are notified: work that no member waits for.
    """

    def __init__(self, target: Syncable, finish: Callable[[], None] | None = None) -> None:
        self._target = target
        self._finish = finish
        self._group = Group()
        self._lock = threading.Lock()
        self._wake = _Signal()
        self._idle = True
        self._closing = False
        self._returning = _Returning()
        self._thread = threading.Thread(target=self._run, name="basalt-sync", daemon=True)
        self._thread.start()
        in_child(self._disable_in_child)

    def durable(self) -> asyncio.Future[None]:
        """Return a future of the running loop that resolves when everything written so far is durable."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.after_sync(loop, [partial(resolve, future)])
        return future

    def after_sync(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced]) -> None:
        """Call back on this thread's loop when everything written so far is durable, or when the sync failed.

        The callbacks run in the loop turn that is notified of the sync. Callbacks of a future would run a turn later.
        """
        with self._lock:
            self._require_open()
            self._group.callbacks.setdefault(loop, []).extend(callbacks)
            self._wake_up()

    def wait_durable(self, timeout_s: float = -1) -> bool:
        """Block the calling thread until everything written so far is durable.

        Return False if `timeout_s` seconds pass first. Negative means no limit.
        """
        assert threading.get_ident() != self._thread.ident, "the sync thread cannot wait for its own sync"
        member = _Thread()
        with self._lock:
            self._require_open()
            threads = self._group.threads
            threads.append(member)
            self._wake_up()
            self._returning.joined(len(threads))
        if not member.synced.wait(timeout_s):
            return False
        if member.error is not None:
            raise member.error
        return True

    def close(self) -> None:
        """Sync the pending group, then stop the thread. The target stays open."""
        with self._lock:
            self._closing = True
            self._wake_up()
        self._thread.join(CLOSE_WAIT_S)
        if self._thread.is_alive():
            raise StorageError(f"the last sync has not returned within {CLOSE_WAIT_S:.0f} s; the disk does not respond")

    def _disable_in_child(self) -> None:
        """Disable this object in a forked child, which has no sync thread and can confirm nothing."""
        self._lock = threading.Lock()
        self._closing = True
        self._group = Group()

    def _require_open(self) -> None:
        if self._closing:
            raise StoreClosedError("the store is closing; the change is not confirmed")

    def _wake_up(self) -> None:
        if self._idle:
            self._idle = False
            self._wake.give()

    def _run(self) -> None:
        while True:
            with self._lock:
                idle = self._idle = not self._group
                if idle and self._closing:
                    return
                idle = idle or self._hand_over()
            if idle:
                self._wake.wait()
                continue
            self._returning.wait(self._lock, self._group)
            with self._lock:
                group, self._group = self._group, Group()
            started = time.monotonic()
            self._serve(group)
            self._returning.notified(len(group.threads), time.monotonic() - started)
            del group  # Otherwise its callbacks keep closed connections in memory until the next sync of this thread.
            self._finish_sync()

    def _hand_over(self) -> bool:
        """Whether another thread serves the pending group. The lock is held."""
        return False

    def _finish_sync(self) -> None:
        if self._finish is not None:
            # A failure poisons the target, and the next write raises.
            with suppress(BasaltError):
                self._finish()

    def _serve(self, group: Group) -> None:
        error: BasaltError | None = None
        if group:
            try:
                self._target.sync()
            except BasaltError as failure:
                self._target.poison(failure)
                error = failure
            except Exception as failure:
                self._target.poison(failure)
                error = StorageError(f"the sync failed: {failure}")
        for thread in group.threads:
            thread.error = error
            thread.synced.give()
        for loop, callbacks in group.callbacks.items():
            self._notify(loop, callbacks, error)

    def _notify(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced], error: BasaltError | None) -> None:
        """Call back on a loop, in its own thread."""
        # A closed loop has no waiters.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(call_all, callbacks, error)


def call_all(callbacks: list[Synced], error: BasaltError | None) -> None:
    for callback in callbacks:
        callback(error)


def resolve(future: asyncio.Future[None], error: BasaltError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
