"""Group commit: batches concurrent commits into one write and one fsync.

    asyncio:  commit_async ─> collected until the end of the tick ─> one write ─┐
    threads:  commit, submit ───────────────────────────────────────────────────┤ the open group
    planes:   write to the store or a lane, then durable(), wait_durable() ─────┘
                                                                                │
    sync thread: take the group, open a new one, write the threads' batches as one, sync, notify every member

The next group collects members while a sync runs. A lone commit is synced at once. Threads notified together usually
commit again together, one after the other as they acquire the GIL. A sync that starts with the first of them would
leave the others to a second sync. So the next group waits for as many threads as were notified, for at most the
duration of the last sync. If they do not return, the wait is suspended for some groups. Coroutines need no wait: those
of one loop turn join together.

A member joins its group before the group is taken, and the group is taken before its sync begins. So a sync covers
every write that it confirms. A failed sync fails its waiting members and poisons the store: only recovery can tell
whether their bytes reached the disk. If the store rejects the combined batch (one batch is malformed, or the sum is too
large), the batches are written one by one, so that only the faulty one fails. A stall fails all; nothing is written.

Cancelling a future does not revoke its batch. If the event loop closes while it waits, its batch is still written and
made durable, without a notification.

Measured with `bench commits` on two busy cores: one loop serves 64 committers at 35 to 45 us each, including the write
and the committer itself. That is about 20 times the rate of one committer. 64 threads cost about 90 us each, mostly for
GIL handover, and reach 8 to 11 times the rate of one thread. The GIL is the limit, not the disk.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

from basaltmq.errors import (
    BasaltError,
    InvalidArgumentError,
    LimitExceededError,
    StorageError,
    StoreClosedError,
    StoreStalledError,
)
from basaltmq.store.api import Store
from basaltmq.store.batch import BATCH_BYTES_MAX, Batch
from basaltmq.store.forks import in_child

GROUP_BYTES_MAX: Final = BATCH_BYTES_MAX
"""Bytes that may wait for one sync through `submit`. Beyond it `submit` raises StoreStalledError."""

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


class _Member(Protocol):
    """A waiter that handed over a batch."""

    batch: Batch

    def settle(self, error: BasaltError | None) -> None: ...


class _Thread:
    """A thread blocked on its own lock, which is the cheapest way to wake it."""

    __slots__ = ("_done", "batch", "error")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.error: BasaltError | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def settle(self, error: BasaltError | None) -> None:
        self.error = error
        self._done.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until settled. Return False if `timeout_s` seconds pass first; negative means no limit."""
        if not self._done.acquire(timeout=timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True


class _FutureMember:
    """A future for a thread that does not block."""

    __slots__ = ("batch", "future")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()

    def settle(self, error: BasaltError | None) -> None:
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class _Awaiter:
    """The future of a coroutine. Only the thread of its loop may touch it."""

    __slots__ = ("batch", "future")

    def __init__(self, batch: Batch, future: asyncio.Future[None]) -> None:
        self.batch = batch
        self.future = future

    def settle(self, error: BasaltError | None) -> None:
        resolve(self.future, error)


class Group:
    """The members that wait for one sync."""

    __slots__ = ("callbacks", "members", "submitted_bytes", "threads")

    def __init__(self) -> None:
        self.members: list[_Member] = []
        self.threads = 0
        """The number of members that are blocked threads."""
        self.submitted_bytes = 0
        self.callbacks: dict[asyncio.AbstractEventLoop, list[Synced]] = {}

    def __bool__(self) -> bool:
        return bool(self.members or self.callbacks)


class _Tick:
    """The commits of one event loop since its last turn."""

    __slots__ = ("awaiters", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.awaiters: list[_Awaiter] = []


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
        return self._held.acquire(timeout=timeout_s)


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
            if group.threads >= self._notified or not group.threads:
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
            if group.threads * 2 < self._notified:
                self._missed += 1
                self._skips = min(1 << self._missed, RETURN_WAITS_SKIPPED_MAX)


class GroupSync:
    """Waits for durability on any target with `sync`: a store or a lane of the log."""

    def __init__(self, target: Syncable) -> None:
        self._target = target
        self._group = Group()
        self._lock = threading.Lock()
        self._wake = _Signal()
        self._idle = True
        self._closing = False
        self._returning = _Returning()
        self._thread = threading.Thread(target=self._run, name="basalt-sync", daemon=True)
        self._thread.start()
        in_child(self._cut_off)

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

        Return False if `timeout_s` seconds pass first; negative means no limit.
        """
        member = _Thread(Batch())
        self._join(member)
        return member.wait(timeout_s)

    def close(self) -> None:
        """Sync the pending group, then stop the thread. The target stays open."""
        with self._lock:
            self._closing = True
            self._wake_up()
        self._thread.join(CLOSE_WAIT_S)
        if self._thread.is_alive():
            raise StorageError(f"the last sync has not returned within {CLOSE_WAIT_S:.0f} s; the disk does not respond")

    def _join(self, member: _Member) -> None:
        if threading.get_ident() == self._thread.ident:
            raise InvalidArgumentError(
                "a callback of a commit cannot wait for another commit: it runs on the thread that syncs; use submit"
            )
        with self._lock:
            self._require_open()
            group = self._group
            group.members.append(member)
            group.threads += 1
            self._wake_up()
            self._returning.joined(group.threads)

    def _cut_off(self) -> None:
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
            self._returning.notified(group.threads, time.monotonic() - started)
            self._finish_sync()

    def _hand_over(self) -> bool:
        """Whether another thread serves the pending group. The lock is held."""
        return False

    def _finish_sync(self) -> None:
        """Do the work after a sync that no caller waits for."""

    def _write(self, members: Sequence[_Member]) -> Sequence[_Member]:
        """Write the members' batches and return the members whose result depends on the sync."""
        return members

    def _serve(self, group: Group) -> None:
        members = self._write(group.members)
        error: BasaltError | None = None
        if members or group.callbacks:
            try:
                self._target.sync()
            except BasaltError as failure:
                self._target.poison(failure)
                error = failure
            except Exception as failure:
                self._target.poison(failure)
                error = StorageError(f"the sync failed: {failure}")
        for member in members:
            member.settle(error)
        for loop, callbacks in group.callbacks.items():
            self._notify(loop, callbacks, error)

    def _notify(self, loop: asyncio.AbstractEventLoop, callbacks: list[Synced], error: BasaltError | None) -> None:
        """Call back on a loop, in its own thread."""
        try:
            loop.call_soon_threadsafe(call_all, callbacks, error)
        except RuntimeError:
            # The loop is closed, so nobody waits there.
            return


class GroupCommit(GroupSync):
    """Durable commits on a store, for threads and for asyncio."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._local = threading.local()
        super().__init__(store)

    def commit(self, batch: Batch) -> None:
        """Write a batch and block the calling thread until it is durable."""
        member = _Thread(batch)
        self._join(member)
        member.wait()

    def submit(self, batch: Batch) -> Future[None]:
        """Hand over a batch from any thread. The future resolves when the batch is written and durable.

        Raises StoreStalledError, without taking the batch, when too many bytes wait already.
        """
        member = _FutureMember(batch)
        size_bytes = batch.size_bytes()
        with self._lock:
            self._require_open()
            group = self._group
            if group.members and group.submitted_bytes + size_bytes > GROUP_BYTES_MAX:
                raise StoreStalledError(
                    f"{group.submitted_bytes} bytes already wait for the disk; wait for a future before the next batch"
                )
            group.submitted_bytes += size_bytes
            group.members.append(member)
            self._wake_up()
        return member.future

    def commit_async(self, batch: Batch) -> asyncio.Future[None]:
        """Write a batch at the end of the running loop's turn. The future resolves when the batch is durable.

        Does not wait during a write stall: StoreStalledError requires the caller to block its publishers.
        """
        loop = asyncio.get_running_loop()
        tick: _Tick | None = getattr(self._local, "tick", None)
        if tick is None or tick.loop is not loop:
            tick = self._local.tick = _Tick(loop)
        if not tick.awaiters:
            loop.call_soon(self._end_tick, tick)
        future: asyncio.Future[None] = loop.create_future()
        tick.awaiters.append(_Awaiter(batch, future))
        return future

    def _end_tick(self, tick: _Tick) -> None:
        awaiters, tick.awaiters = tick.awaiters, []
        if self._closing:
            _settle_all(awaiters, StoreClosedError("the store is closing; nothing was written"))
            return
        written = _write_together(self._store, awaiters, wait_ms=0)
        if written:
            try:
                self.after_sync(tick.loop, [awaiter.settle for awaiter in written])
            except StoreClosedError as error:
                for awaiter in written:
                    awaiter.settle(error)

    def _write(self, members: Sequence[_Member]) -> Sequence[_Member]:
        return _write_together(self._store, members, wait_ms=None)


_M = TypeVar("_M", bound=_Member)


def _write_together(store: Store, members: Sequence[_M], wait_ms: int | None) -> Sequence[_M]:
    """Write the members' batches, as one if the store accepts that. Settle rejected members and return the others."""
    if not members:
        return members
    together = Batch()
    for member in members:
        together.extend(member.batch)
    try:
        store.write(together, wait_ms=wait_ms)
    except BasaltError as error:
        if len(members) > 1 and isinstance(error, (InvalidArgumentError, LimitExceededError)):
            return [member for each in members for member in _write_together(store, [each], wait_ms)]
        _settle_all(members, error)
        return []
    except Exception as error:
        store.poison(error)
        _settle_all(members, StorageError(f"the write failed: {error}"))
        return []
    return members


def _settle_all(members: Sequence[_Member], error: BasaltError) -> None:
    for member in members:
        member.settle(error)


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
