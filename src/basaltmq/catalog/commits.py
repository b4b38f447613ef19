"""How a change of the catalog reaches the disk: the one seam between building a batch and waiting for it.

A method checks and builds under the lock, the batch is written before the lock is let go, and the wait for the sync
comes after, so that many threads share one sync:

    with commits.change() as change:      lock
        ... checks, change.put(...)
                                          write; change.after callbacks; unlock; wait until durable

The same methods serve asyncio: `await commits.durably(method, ...)` runs the method with its wait left out, then
awaits the sync. What is written is visible at once in both cases. A change that raised has written nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.sync.group_commit import GroupSync

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Change(Batch):
    """A batch under construction, the names it claims, and what to do once it is written."""

    __slots__ = ("after", "claimed")

    def __init__(self) -> None:
        super().__init__()
        self.claimed: set[bytes] = set()
        """Name rows this change puts: a second claim in the same change finds them here, not in the store."""
        self.after: list[Callable[[], None]] = []


class Commits:
    """Changes to a store: checked and written one after the other, durable together.

    With `sync` (a GroupCommit or GroupSync of the same store) those who wait share its syncs.
    """

    def __init__(self, store: Store, sync: GroupSync | None = None) -> None:
        self.lock = threading.RLock()
        self._store = store
        self._sync = sync
        self._local = threading.local()

    @contextmanager
    def change(self, *, durable: bool = True) -> Iterator[Change]:
        """Collect one change; written when the block ends, and durable on return unless told otherwise."""
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
        """Run a blocking operation without its wait, then await the sync. Never waits for a stalled store.

        The sync is awaited whatever the operation found to do: what its answer rests on may be written by another
        and not be durable yet.
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
