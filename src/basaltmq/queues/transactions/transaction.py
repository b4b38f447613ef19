"""Transactions over queues (SPEC A5): enqueues and acks over any queues, all or nothing.

    OPEN ──commit──> COMMITTED
      │  └────────> FAILED      the store failed; only reopening it shows the outcome
      └──abort──> ABORTED

A commit is one batch, durable on return. A refused commit (an expired lease, a full or missing queue, a stalled store)
changes nothing and leaves the transaction open: abort it, or commit again later. An abort releases messages that the
transaction dequeued. A message leased outside and acked inside stays with its consumer. Leases are the only locks
before the commit. A transaction belongs to one thread or event loop.
"""

from __future__ import annotations

import enum
from contextlib import suppress
from types import TracebackType
from typing import Self

from basaltmq.errors import BasaltError, StorageError, TransactionError
from basaltmq.queues.transactions.work import NOTHING_WRITTEN, Operations, Plane, Work
from basaltmq.store.sync.group_commit import GroupCommit


class State(enum.Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    FAILED = "failed"


class QueueTransaction(Operations):
    """A transaction over the queues of a plane. The context manager commits, or aborts if the block raises."""

    def __init__(self, plane: Plane, commit: GroupCommit) -> None:
        self._plane = plane
        self._commit = commit
        self._work = Work(plane)
        self.state = State.OPEN
        self.ids: list[bytes] = []
        """Ids of the enqueued messages, in the order of the calls; set by the commit."""

    def _work_for(self, operation: str) -> Work:
        self._require_open(operation)
        return self._work

    def commit(self) -> list[bytes]:
        """Apply all operations and wait until they are durable. Return the ids of the enqueued messages."""
        wants_sync = self.write()
        if wants_sync:
            try:
                self._commit.wait_durable()
            except BaseException:
                self.state = State.FAILED
                raise
        return self.ids

    def write(self) -> bool:
        """Apply all operations without waiting for the disk. Return whether there is something to wait for."""
        self._require_open("commit")
        if not self._work:
            self.state = State.COMMITTED
            return False
        try:
            self.ids = self._plane.apply(self._work.run)
        except BaseException as error:
            self._failed(error)
            raise
        self.state = State.COMMITTED
        return True

    def abort(self) -> None:
        """Discard all operations. Aborting twice is allowed; a committed transaction cannot be aborted."""
        if self.state in (State.ABORTED, State.FAILED):
            return
        self._require_open("abort")
        self.state = State.ABORTED
        if self._work.took:
            self._plane.apply(self._work.give_back)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state is not State.OPEN:
            return
        if kind is None:
            try:
                self.commit()
            except BaseException:
                self._abort_quietly()
                raise
        else:
            self._abort_quietly()

    def _abort_quietly(self) -> None:
        # A failed release must not mask the original error. Unreleased leases expire.
        with suppress(BasaltError):
            self.abort()

    def _failed(self, error: BaseException) -> None:
        is_doubtful = isinstance(error, StorageError) and not isinstance(error, NOTHING_WRITTEN)
        self.state = State.FAILED if is_doubtful else State.OPEN

    def _require_open(self, verb: str) -> None:
        if self.state is not State.OPEN:
            raise TransactionError(f"cannot {verb}: the transaction is {self.state.value}; begin another")
