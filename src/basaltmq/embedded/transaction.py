"""Transactions over queues in this process.

    with db.transaction() as tx:
        for message in tx.dequeue("orders", 10):
            tx.enqueue("invoices", invoice_of(message.payload))

All operations take effect together and durably when the block ends, or not at all if it raises. `tx.ack` acknowledges
messages leased outside; they must still be leased at the commit.

Distributed transactions use the verbs of X/Open XA. `db.xa.begin(xid)` returns a session to work in. After its end, the
coordinator prepares the branch and commits it or rolls it back. A prepared branch survives crashes and holds its
messages until it is decided.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from basaltmq.embedded.leased import Leased
from basaltmq.embedded.queue import EmbeddedQueue, Held, drafts_of, leased_list
from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.draft import asks_for_more, require_fit
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.transaction import QueueTransaction, State
from basaltmq.queues.transactions.work import Operations
from basaltmq.queues.transactions.xa import InDoubt, Vote, XaSession
from basaltmq.queues.transactions.xid import Xid
from basaltmq.store.sync.group_commit import GroupCommit


class QueueWork:
    """Operations inside a transaction or branch."""

    def __init__(self, plane: QueuePlane, target: Operations, admit: Callable[[], None]) -> None:
        """`admit` raises an error if there is no disk space for producers."""
        self._plane = plane
        self._target = target
        self._admit = admit
        self._acked: list[Leased] = []

    def enqueue(self, queue: str | EmbeddedQueue, message: Any, **fields: Any) -> None:
        """Enqueue one message or several at the commit. Arguments as for `EmbeddedQueue.enqueue`."""
        self._admit()
        name, drafts = _name(queue), drafts_of(message, fields)[0]
        if asks_for_more(drafts):
            require_fit(self._plane.get(name), drafts)
        self._target.enqueue(name, drafts)

    def ack(self, messages: Held) -> int:
        """Acknowledge leased messages at the commit, if their leases last until then. Return their number."""
        given = leased_list(messages)
        by_lease: dict[tuple[str, int], list[bytes]] = {}
        for each in given:
            by_lease.setdefault((each.queue, each.token), []).append(each.id)
        count = sum(self._target.ack(name, token, ids) for (name, token), ids in by_lease.items())
        self._acked += given
        return count

    def dequeue(
        self,
        queue: str | EmbeddedQueue,
        count: int = 1,
        *,
        wait: float = 0,
        consumer: str = "",
        visibility_ms: int | None = None,
    ) -> list[Leased]:
        """Lease messages that the commit acknowledges and an abort returns to their places."""
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
            raise InvalidArgumentError(f"wait must be 0 seconds or more, not {wait!r:.80}")
        name = _name(queue)
        found = self._target.dequeue(
            name, count, consumer=consumer, visibility_ms=visibility_ms, wait_ms=math.ceil(wait * 1000)
        )
        has_priorities = bool(found) and bool(self._plane.get(name).priorities_max)
        taken = [Leased(name, delivery, has_priorities) for delivery in found]
        self._acked += taken
        return taken

    def _settled(self) -> None:
        for each in self._acked:
            each.settled = True


class Transaction(QueueWork):
    """A transaction over queues, created by `Basalt.transaction`."""

    def __init__(self, plane: QueuePlane, commit: GroupCommit, admit: Callable[[], None]) -> None:
        self._transaction: QueueTransaction = plane.transaction()
        self._group = commit
        super().__init__(plane, self._transaction, admit)

    @property
    def state(self) -> State:
        return self._transaction.state

    @property
    def ids(self) -> list[bytes]:
        """Ids of the enqueued messages, in order; set by the commit."""
        return self._transaction.ids

    def commit(self) -> list[bytes]:
        """Apply all operations. Return the ids of the enqueued messages when they are durable."""
        ids = self._transaction.commit()
        self._settled()
        return ids

    async def commit_async(self) -> list[bytes]:
        """Like `commit`, for a task. Waiting for the disk uses no thread. Cancelling it undoes nothing."""
        if await asyncio.to_thread(self._transaction.write):
            await self._group.durable()
        self._settled()
        return self.ids

    def abort(self) -> None:
        """Discard all operations. Dequeued messages return to their places."""
        self._transaction.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transaction.__exit__(kind, error, trace)
        if self.state is State.COMMITTED:
            self._settled()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.state is State.OPEN:
            try:
                await self.commit_async()
            except Exception as failure:
                await asyncio.to_thread(self._transaction.__exit__, type(failure), failure, None)
                raise
        else:
            await asyncio.to_thread(self._transaction.__exit__, kind, error, trace)


class BranchSession(QueueWork):
    """A session in a branch, created by `Xa.begin`. The context manager ends it, and marks the branch rollback-only if
    the block raises."""

    def __init__(self, plane: QueuePlane, session: XaSession, admit: Callable[[], None]) -> None:
        super().__init__(plane, session, admit)
        self._session = session
        self.xid = session.xid

    def end(self, *, suspend: bool = False, fail: bool = False) -> None:
        """End the session: for good, for a while (`suspend`), or marking the branch rollback-only (`fail`)."""
        self._session.end(suspend=suspend, fail=fail)

    def resume(self) -> None:
        """Continue after `end(suspend=True)`."""
        self._session.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(fail=kind is not None)


class Xa:
    """Branches of distributed transactions over the queues of a store."""

    def __init__(self, plane: Callable[[], QueuePlane], admit: Callable[[], None]) -> None:
        self._plane = plane
        self._admit = admit

    def begin(self, xid: Xid, *, join: bool = False) -> BranchSession:
        """Begin a session in a new branch, or with `join` in one that has other sessions."""
        plane = self._plane()
        return BranchSession(plane, plane.xa.begin(xid, join=join), self._admit)

    def prepare(self, xid: Xid) -> Vote:
        """Prepare a branch durably. A read-only branch is finished by this."""
        return self._plane().xa.prepare(xid)

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """Commit a prepared branch, or with `one_phase` an ended one."""
        self._plane().xa.commit(xid, one_phase=one_phase)

    def rollback(self, xid: Xid) -> None:
        """Roll back a branch: its acked messages return to their places, its enqueued messages are discarded."""
        self._plane().xa.rollback(xid)

    def recover(self) -> list[Xid]:
        """Return branches in doubt: prepared, or decided by an operator and not yet forgotten."""
        return self._plane().xa.recover()

    def in_doubt(self) -> list[InDoubt]:
        """Like `recover`, with the messages that each branch holds."""
        return self._plane().xa.in_doubt()

    def decide(self, xid: Xid, *, commit: bool) -> None:
        """Record an operator's decision for a branch without coordinator. It is kept until `forget`."""
        self._plane().xa.decide(xid, commit=commit)

    def forget(self, xid: Xid) -> None:
        """Delete the record of an operator's decision."""
        self._plane().xa.forget(xid)


def _name(queue: str | EmbeddedQueue) -> str:
    name = queue.name if isinstance(queue, EmbeddedQueue) else queue
    if not isinstance(name, str):
        raise InvalidArgumentError(f"queue must be a name or a queue of db.queue, not {type(queue).__name__}")
    return name
