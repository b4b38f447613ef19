"""Writes changes of the catalog: builds each batch under a lock, and waits for the fsync outside the lock.

Threads that wait at the same time share one fsync:

    with commits.change() as change:      lock
        ... checks, change.put(...)
                                          write; change.after callbacks; unlock; wait until durable

asyncio uses the same methods: `await commits.durably(method, ...)` runs the method without its wait, then awaits the
fsync. A change is visible as soon as it is written. A change that raises writes nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.sync.group_commit import GroupCommit

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Change(Batch):
    """A batch under construction, the names it claims, and callbacks for after the write."""

    __slots__ = ("after", "claimed")

    def __init__(self) -> None:
        super().__init__()
        self.claimed: set[bytes] = set()
        """Name rows that this change puts, so that a second claim in the same change is detected."""
        self.after: list[Callable[[], None]] = []


class Commits:
    """Changes to a store, checked and written one at a time. With `sync`, waiting callers share fsyncs."""

    def __init__(self, store: Store, sync: GroupCommit | None = None) -> None:
        self.lock = threading.RLock()
        self._store = store
        self._sync = sync
        self._local = threading.local()

    @contextmanager
    def change(self, *, durable: bool = True) -> Iterator[Change]:
        """Collect one change. It is written when the block ends, and durable on return unless `durable` is False."""
        with self.lock:
            change = Change()
            yield change
            if not len(change):
                return
            self._store.write(change, wait_ms=0 if self._is_deferred() else None)
            for action in change.after:
                action()
        if durable and not self._is_deferred():
            self._wait()

    async def durably(self, operation: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a blocking operation without its wait, then await the fsync. Never waits for a stalled store.

        The fsync is awaited even if the operation wrote nothing, because its result may depend on another change that
        is written but not yet durable.
        """
        self._local.deferred = True
        try:
            result = operation(*args, **kwargs)
        finally:
            self._local.deferred = False
        if self._sync is not None:
            await self._sync.durable()
        else:
            await asyncio.to_thread(self._store.sync)
        return result

    def _is_deferred(self) -> bool:
        return getattr(self._local, "deferred", False)

    def _wait(self) -> None:
        if self._sync is not None:
            self._sync.wait_durable()
        else:
            self._store.sync()
