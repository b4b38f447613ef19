"""Transactions over queues (SPEC A5): enqueue here, ack there, all or nothing.

    OPEN ──commit──> COMMITTED
      │  └────────> FAILED      the store broke; only opening it again tells what became of it
      └──abort──> ABORTED

A commit is one batch, durable when it returns. One that is refused (a lease has expired, a queue is full or gone, the
store is stalled) has changed nothing and leaves the transaction open: abort it, or commit again when it helps. Aborting
gives back what the transaction dequeued; a message that was leased outside and acked inside stays with its consumer.
No message is locked before the commit but by its lease. Used by one thread or one loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from basaltmq.errors import BasaltError, StorageError, TransactionError
from basaltmq.queues.draft import Draft
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.transactions.work import Plane, Work
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.transactions.transaction import NOTHING_WRITTEN, State


class QueueTransaction:
    """A transaction over the queues of a plane. As a context manager it commits, or aborts if the block raises."""

    def __init__(self, plane: Plane, commit: GroupCommit) -> None:
        self._plane = plane
        self._commit = commit
        self._work = Work(plane)
        self.state = State.OPEN
        self.ids: list[bytes] = []
        """Of the messages enqueued, in the order they were handed in; filled by the commit."""

    def enqueue(self, name: str, drafts: Sequence[Draft | bytes]) -> None:
        """Messages come into a queue with the commit. Their ids are in `ids` then."""
        self._require_open("enqueue")
        self._work.enqueue(name, drafts)

    def ack(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int:
        """Messages of a lease (all by default) are done with the commit, if the lease lasts that long."""
        self._require_open("ack")
        return self._work.ack(name, token, ids)

    def dequeue(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str = "",
        visibility_ms: int | None = None,
        wait_ms: int = 0,
    ) -> list[Delivery]:
        """Lease up to `count` messages that are acked by the commit and released by an abort."""
        self._require_open("dequeue")
        return self._work.dequeue(name, count, consumer=consumer, visibility_ms=visibility_ms, wait_ms=wait_ms)

    def commit(self) -> list[bytes]:
        """Do everything, and return when it is durable: the ids of what was enqueued. Blocks the calling thread."""
        wants_sync = self.write()
        if wants_sync:
            try:
                self._commit.wait_durable()
            except BaseException:
                self.state = State.FAILED
                raise
        return self.ids

    def commit_async(self) -> asyncio.Future[list[bytes]]:
        """Do everything at once, in this thread; the future of the running loop resolves when it is durable."""
        told: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        if not self.write():
            told.set_result(self.ids)
            return told

        def tell(done: asyncio.Future[None]) -> None:
            error = done.exception()
            if error is not None:
                self.state = State.FAILED
            if told.done():
                return
            if error is None:
                told.set_result(self.ids)
            else:
                told.set_exception(error)

        self._commit.durable().add_done_callback(tell)
        return told

    def write(self) -> bool:
        """Do everything without waiting for the disk; whether there is something to wait for."""
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
        """Give everything up. Aborting twice is fine; what is committed cannot be aborted."""
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
        # What failed first is what the caller is to hear of; leases that could not be given back expire.
        with suppress(BasaltError):
            self.abort()

    def _failed(self, error: BaseException) -> None:
        is_doubtful = isinstance(error, StorageError) and not isinstance(error, NOTHING_WRITTEN)
        self.state = State.FAILED if is_doubtful else State.OPEN

    def _require_open(self, verb: str) -> None:
        if self.state is not State.OPEN:
            raise TransactionError(f"cannot {verb}: the transaction is {self.state.value}; begin another")
