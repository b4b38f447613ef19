"""Group commit: one write and one sync serve everyone who waits.

    asyncio:  commit_async ─> gathered for the rest of the tick ─> one write ─┐
    threads:  commit, submit ─────────────────────────────────────────────────┤ the gathering group
    planes:   write to the store or a lane, then durable(), wait_durable() ───┘
                                                                              │
    sync thread: take the group, begin a new one, write what threads handed over as one batch, sync, tell every member

While a sync runs the next group gathers; a lone commit is synced at once. Threads that were told together mostly come
back together, one after the other as they get the interpreter's lock: a sync that begins with the first of them leaves
the others to the next one, two syncs where one would do. So the next group waits for as many as were told, no longer
than the sync took; if they do not come back, it stops waiting for a while. Coroutines need none of this: those of one
turn of their loop join together. A member joins its group
before the group is taken, and the group is taken before its sync begins, so what it confirms was written before the
sync. A failed sync fails exactly those who were waiting and poisons the store: whether their bytes reached the disk
is not known, and only recovery can tell. Batches written together that the store refuses (one is malformed, all
together are too large) are written again one by one, so that only the culprit fails. A stall is nobody's fault and
fails them all, with nothing written.

Cancelling a future does not take its batch back. A loop that was closed while it waited gets no answer; its batch is
written and durable like the others.

Budget, measured by `bench commits` on two busy cores: one loop serves 64 committers at 35 to 45 us each, the write and
the committer itself included, some 20 times the rate of one committer. 64 threads cost about 90 us each, most of it
the interpreter lock changing hands, and reach 8 to 11 times the rate of one: that is CPython's limit, not the disk's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar

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
"""What `submit` lets wait for one sync; past it the disk is behind and the submitter is told so."""

RETURN_WAIT_S_MAX: Final = 0.002
"""What a group waits for threads that were told before, however slow the disk: they come back in tens of us each."""

RETURN_WAITS_SKIPPED_MAX: Final = 64
"""Groups that do not wait after waiting was in vain so often: then it costs a hundredth at most."""

CLOSE_WAIT_S: Final = 60.0
"""A sync that takes longer than this at close is a disk that has gone away."""


class Syncable(Protocol):
    """Something written to first and made durable later."""

    def sync(self) -> None: ...

    def poison(self, error: BaseException) -> None: ...


class _Member(Protocol):
    """Somebody who handed over a batch and waits for it to be durable."""

    batch: Batch

    def settle(self, error: BasaltError | None) -> None: ...


class _Thread:
    """A thread blocked on a lock of its own, the cheapest thing to wake it by."""

    __slots__ = ("_done", "batch", "error")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.error: BasaltError | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def settle(self, error: BasaltError | None) -> None:
        self.error = error
        self._done.release()

    def wait(self) -> None:
        self._done.acquire()
        if self.error is not None:
            raise self.error


class _Promise:
    """A future of a thread that goes on."""

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
    """A coroutine's future; only its own loop's thread may touch it."""

    __slots__ = ("batch", "future")

    def __init__(self, batch: Batch, future: asyncio.Future[None]) -> None:
        self.batch = batch
        self.future = future

    def settle(self, error: BasaltError | None) -> None:
        _resolve(self.future, error)


class Group:
    """Those who wait for one sync."""

    __slots__ = ("futures", "members", "submitted_bytes", "threads")

    def __init__(self) -> None:
        self.members: list[_Member] = []
        self.threads = 0
        """Members that are blocked threads."""
        self.submitted_bytes = 0
        self.futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def __bool__(self) -> bool:
        return bool(self.members or self.futures)


class _Tick:
    """What one event loop has gathered since its last turn."""

    __slots__ = ("awaiters", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.awaiters: list[_Awaiter] = []


class _Signal:
    """Wakes one thread that waits for it. A lock held from the start: the cheapest there is."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()

    def give(self) -> None:
        """Once per `wait`."""
        self._held.release()

    def wait(self, timeout_s: float = -1) -> bool:
        return self._held.acquire(timeout=timeout_s)


class _Returning:
    """How many threads the next group waits for. The group's lock guards `_wanted`; the rest is the sync thread's."""

    __slots__ = ("_complete", "_limit_s", "_missed", "_skips", "_told", "_wanted")

    def __init__(self) -> None:
        self._complete = _Signal()
        self._wanted = 0
        self._told = 0
        self._limit_s = 0.0
        self._missed = 0
        self._skips = 0

    def joined(self, threads: int) -> None:
        if threads == self._wanted:
            self._wanted = 0
            self._complete.give()

    def told(self, threads: int, took_s: float) -> None:
        self._told = threads
        self._limit_s = min(took_s, RETURN_WAIT_S_MAX)

    def wait(self, lock: threading.Lock, group: Group) -> None:
        """Wait for those told last to come back, for as long as that sync took."""
        if self._told < 2:
            return
        if self._skips:
            self._skips -= 1
            return
        with lock:
            if group.threads >= self._told or not group.threads:
                return
            self._wanted = self._told
        if self._complete.wait(self._limit_s):
            self._missed = 0
            return
        with lock:
            if not self._wanted:
                # The last one came after all, and gave the signal.
                self._complete.wait()
            self._wanted = 0
            if group.threads * 2 < self._told:
                self._missed += 1
                self._skips = min(1 << self._missed, RETURN_WAITS_SKIPPED_MAX)


class GroupSync:
    """Waits for durability on anything that can be synced: a store, a lane of the log."""

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
        """A future of the running loop that resolves when everything written so far is durable."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.resolve_durable(loop, [future])
        return future

    def resolve_durable(self, loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]]) -> None:
        """Have futures of this thread's loop resolved together when everything written so far is durable."""
        with self._lock:
            self._require_open()
            self._group.futures.setdefault(loop, []).extend(futures)
            self._wake_up()

    def wait_durable(self) -> None:
        """Return when everything written so far is durable. Blocks the calling thread."""
        member = _Thread(Batch())
        self._join(member)
        member.wait()

    def close(self) -> None:
        """Sync what waits, then stop. The target stays open."""
        with self._lock:
            self._closing = True
            self._wake_up()
        self._thread.join(CLOSE_WAIT_S)
        if self._thread.is_alive():
            raise StorageError(f"the last sync has not returned within {CLOSE_WAIT_S:.0f} s; the disk does not answer")

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
        """This is a forked child, without the sync thread: nothing can be confirmed here."""
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
            self._returning.told(group.threads, time.monotonic() - started)
            self._tidy_up()

    def _hand_over(self) -> bool:
        """Whether somebody else serves the group that waits. Under the lock."""
        return False

    def _tidy_up(self) -> None:
        """What is left to do after a sync, and nobody waits for."""

    def _write(self, members: Sequence[_Member]) -> Sequence[_Member]:
        """Write what members handed over; return those whose fate hangs on the sync."""
        return members

    def _serve(self, group: Group) -> None:
        members = self._write(group.members)
        error: BasaltError | None = None
        if members or group.futures:
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
        for loop, futures in group.futures.items():
            self._tell(loop, futures, error)

    def _tell(
        self, loop: asyncio.AbstractEventLoop, futures: list[asyncio.Future[None]], error: BasaltError | None
    ) -> None:
        """Resolve the futures of a loop, in its own thread."""
        try:
            loop.call_soon_threadsafe(resolve_all, futures, error)
        except RuntimeError:
            # The loop is closed; nobody waits there any more.
            return


class GroupCommit(GroupSync):
    """Durable commits on a store, for threads and for asyncio."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._local = threading.local()
        super().__init__(store)

    def commit(self, batch: Batch) -> None:
        """Write and return when durable. Blocks the calling thread."""
        member = _Thread(batch)
        self._join(member)
        member.wait()

    def submit(self, batch: Batch) -> Future[None]:
        """Hand a batch over from any thread; the future resolves when it is written and durable.

        Raises StoreStalledError, with nothing taken, when too much waits already.
        """
        member = _Promise(batch)
        size_bytes = batch.size_bytes()
        with self._lock:
            self._require_open()
            group = self._group
            if group.members and group.submitted_bytes + size_bytes > GROUP_BYTES_MAX:
                raise StoreStalledError(
                    f"{group.submitted_bytes} bytes wait for the disk already; wait for a future before the next batch"
                )
            group.submitted_bytes += size_bytes
            group.members.append(member)
            self._wake_up()
        return member.future

    def commit_async(self, batch: Batch) -> asyncio.Future[None]:
        """Write at the end of this turn of the running loop; the future resolves when durable.

        Does not wait for a stalled store: StoreStalledError tells the caller to hold its producers.
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
                self.resolve_durable(tick.loop, [awaiter.future for awaiter in written])
            except StoreClosedError as error:
                for awaiter in written:
                    awaiter.settle(error)

    def _write(self, members: Sequence[_Member]) -> Sequence[_Member]:
        return _write_together(self._store, members, wait_ms=None)


_M = TypeVar("_M", bound=_Member)


def _write_together(store: Store, members: Sequence[_M], wait_ms: int | None) -> Sequence[_M]:
    """Write every member's batch, as one if the store takes it so; settle those it refuses, return the others."""
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


def resolve_all(futures: list[asyncio.Future[None]], error: BasaltError | None) -> None:
    for future in futures:
        _resolve(future, error)


def _resolve(future: asyncio.Future[None], error: BasaltError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
