"""One change at a time: the plane's lock, the change that is open, and its one write.

    do(operation) ──> the lock ──> operation(change) ──> seal ──> store.write ──> memory follows ──> what follows up
                                                                                        └──> group commit, no lock held

Every operation is one batch. Operations of several queues become one by `with changes.change():`; other threads wait
meanwhile. What a change does in memory is change.py's; what comes after one (limits of other queues, eviction,
deadlines, those who are told) is the plane's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from basaltmq.errors import BasaltError, StoreClosedError, TransactionError
from basaltmq.queues.change import Change
from basaltmq.store.api import Store
from basaltmq.store.sync.group_commit import GroupCommit

T = TypeVar("T")


class Changes:
    """The only writer of a plane."""

    def __init__(
        self,
        store: Store,
        commit: GroupCommit,
        clock_ns: Callable[[], int],
        *,
        written: Callable[[Change], None],
        follow_up: Callable[[], None],
        failed: Callable[[str, Exception], BasaltError],
    ) -> None:
        """`written` is called with every change once memory shows it, `follow_up` behind every operation. `failed` is
        called with the queue that an unexpected error hit, and returns what its callers are told."""
        self.lock = threading.RLock()
        self.clock_ns = clock_ns
        self._store = store
        self.commit = commit
        self._written = written
        self._follow_up = follow_up
        self._failed = failed
        self._current: Change | None = None
        self._current_wants_sync = False
        self._current_broken = False
        self._current_blame: tuple[str, Exception] | None = None
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_open(self) -> bool:
        """Whether operations are being gathered into one change."""
        return self._current is not None

    def do(self, operation: Callable[[Change], T], now_ns: int | None = None) -> T:
        """Run an operation as a change of its own, or as part of the change that is open."""
        with self.lock:
            if self._closed:
                self.require_open()
            if self._current is not None:
                return self._do_inside(self._current, operation)
            change, result = self.run(operation, now_ns)
            self._follow_up()
            if change.refusal is not None:
                raise change.refusal
            return result

    def run(self, operation: Callable[[Change], T], now_ns: int | None = None) -> tuple[Change, T]:
        """Run an operation as a change of its own and nothing after it. The lock is held."""
        change = Change(self.clock_ns() if now_ns is None else now_ns)
        try:
            result = operation(change)
        except BaseException as error:
            failed = self._refuse(change, self._blame(change, error))
            if failed is not None:
                raise failed from error
            raise
        self.write(change)
        return change, result

    def _do_inside(self, change: Change, operation: Callable[[Change], T]) -> T:
        change.at = ""
        try:
            return operation(change)
        except BaseException as error:
            self._current_broken = True
            self._current_blame = self._current_blame or self._blame(change, error)
            raise

    def _blame(self, change: Change, error: BaseException) -> tuple[str, Exception] | None:
        """The queue that an error hit that nobody raised on purpose."""
        if not isinstance(error, Exception) or isinstance(error, BasaltError) or change.is_callers_fault:
            return None
        return (change.at, error) if change.at else None

    def _refuse(self, change: Change, blame: tuple[str, Exception] | None) -> BaseException | None:
        """Put memory back. A queue that is to blame, or whose memory is in doubt, fails: the error to raise instead."""
        undone = change.refused()
        if undone is not None:
            self._fail_all(change, undone)
        return None if blame is None else self._failed(*blame)

    def _fail_all(self, change: Change, error: Exception) -> None:
        owners = (getattr(owner, "name", "") for owner in change.owners())
        for name in dict.fromkeys([*owners, *change.ready, change.at]):
            if name:
                self._failed(name, error)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make the operations inside one batch. Nothing of them is seen, by anyone, before the end."""
        with self.lock:
            self.require_alone("change")
            change = self._current = Change(self.clock_ns())
            self._current_wants_sync = self._current_broken = False
            self._current_blame = None
            try:
                yield
                if self._current_broken:
                    raise TransactionError("an operation inside the change failed; nothing of the change is done")
            except BaseException as error:
                failed = self._refuse(change, self._current_blame)
                if failed is not None:
                    raise failed from error
                raise
            finally:
                self._current = None
            self.write(change)
            self._follow_up()
            wants_sync = self._current_wants_sync
        if wants_sync:
            self.commit.wait_durable()

    def write(self, change: Change) -> None:
        """Write a change and let memory follow, or put memory back."""
        try:
            batch = change.seal()
            if batch:
                self._store.write(batch)
        except BaseException as error:
            failed = self._refuse(change, self._blame(change, error))
            if failed is not None:
                raise failed from error
            raise
        failure = change.applied()
        if failure is not None:
            # The change is written; what memory makes of it is read again from disk.
            self._fail_all(change, failure)
        self._written(change)

    def sync(self) -> None:
        """Wait until what was written is durable; inside a change, at its end."""
        with self.lock:
            if self._current is not None:
                self._current_wants_sync = True
                return
        self.commit.wait_durable()

    def close(self) -> None:
        """Refuse further operations. The lock is held."""
        self._closed = True

    def require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the queue plane is closed")

    def require_alone(self, what: str) -> None:
        self.require_open()
        if self._current is not None:
            raise TransactionError(f"{what} is many batches and cannot be part of a change; do it before or after")
