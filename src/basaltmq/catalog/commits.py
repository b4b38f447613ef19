"""Writes changes of the catalog: builds each batch under a lock, and waits for the fsync outside the lock.

Threads that wait at the same time share one fsync:

    with commits.change() as change:      lock
        ... checks, change.put(...)
                                          write; change.after callbacks; unlock; wait until durable

A change is visible as soon as it is written. A change that raises writes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.sync.group_commit import GroupCommit


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

    @contextmanager
    def change(self, *, durable: bool = True) -> Iterator[Change]:
        """Collect one change. It is written when the block ends, and durable on return unless `durable` is False."""
        with self.lock:
            change = Change()
            yield change
            if not len(change):
                return
            self._store.write(change)
            for action in change.after:
                action()
        if durable:
            self._wait()

    def _wait(self) -> None:
        if self._sync is not None:
            self._sync.wait_durable()
        else:
            self._store.sync()
