"""Runs changes one at a time: holds the plane's lock, the open change, and writes each change as one batch.

    do(operation) ──> lock ──> operation(change) ──> seal ──> store.write ──> update memory ──> follow-up work
                                                                    └──> group commit, without the lock

Every operation is one batch. `with runner.change():` merges operations on several queues into one batch; other threads
wait meanwhile. `Change` holds the memory updates. The plane does the follow-up work: limits of other queues, eviction,
deadlines and notifications.
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


class ChangeRunner:
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
        """`written` is called with every change once memory shows it, `follow_up` after every operation. `failed` is
        called with the name of the queue that an unexpected error hit, and returns the error for callers."""
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
        """Whether a change is open that collects operations."""
        return self._current is not None

    def do(self, operation: Callable[[Change], T], now_ns: int | None = None) -> T:
        """Run an operation as part of the open change, or as a new change if none is open."""
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
        """Run an operation as a new change, without follow-up work. The caller holds the lock."""
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
        """Return the queue that an unexpected error hit, with the error; None for expected errors."""
        if not isinstance(error, Exception) or isinstance(error, BasaltError) or change.is_callers_fault:
            return None
        return (change.at, error) if change.at else None

    def _refuse(self, change: Change, blame: tuple[str, Exception] | None) -> BaseException | None:
        """Undo the change in memory. Queues that caused the error, or whose memory may be wrong, fail. Return the error
        to raise instead of the original one."""
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
        """Merge the operations inside into one batch. They become visible together at the end."""
        with self.lock:
            self.require_alone("change")
            change = self._current = Change(self.clock_ns())
            self._current_wants_sync = self._current_broken = False
            self._current_blame = None
            try:
                yield
                if self._current_broken:
                    raise TransactionError(
                        "an operation inside the change failed, so none of its operations took effect"
                    )
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
        """Write a change and update memory, or undo the change in memory."""
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
            # The change is written. The failed queues are reloaded from disk.
            self._fail_all(change, failure)
        self._written(change)

    def sync(self) -> None:
        """Wait until everything written is durable. Inside a change, wait at its end."""
        with self.lock:
            if self._current is not None:
                self._current_wants_sync = True
                return
        self.commit.wait_durable()

    def close(self) -> None:
        """Refuse further operations. The caller holds the lock."""
        self._closed = True

    def require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the queue plane is closed")

    def require_alone(self, what: str) -> None:
        self.require_open()
        if self._current is not None:
            raise TransactionError(f"{what} is many batches and cannot be part of a change; do it before or after")
