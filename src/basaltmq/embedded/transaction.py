"""Transactions over queues as a program in this process uses them.

    with db.transaction() as tx:
        for message in tx.dequeue("orders", 10):
            tx.enqueue("invoices", invoice_of(message.payload))

Everything inside happens together when the block ends, durably, or not at all when it raises. Messages leased elsewhere
are acked with `tx.ack`; they must still be leased at the commit.

Distributed ones have the verbs of X/Open: `db.xa.begin(xid)` gives a session to work in; after its end the branch is
prepared, and committed or rolled back by whoever coordinates. A prepared branch survives anything and holds its
messages until it is decided.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from basaltmq.embedded.leased import Leased
from basaltmq.embedded.queue import EmbeddedQueue, Held, drafts_of
from basaltmq.errors import InvalidArgumentError
from basaltmq.messages.branches import Xid
from basaltmq.queues.draft import Draft, asks_for_more, require_fit
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.transaction import QueueTransaction
from basaltmq.queues.transactions.xa import InDoubt, XaSession
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.transactions.transaction import State
from basaltmq.transactions.xa import Vote


class Gathering(Protocol):
    """What work is gathered in: a transaction of the plane, or a session in a branch."""

    def enqueue(self, name: str, drafts: Sequence[Draft | bytes]) -> None: ...

    def ack(self, name: str, token: int, ids: Sequence[bytes] | None = None) -> int: ...

    def dequeue(
        self,
        name: str,
        count: int = 1,
        *,
        consumer: str = "",
        visibility_ms: int | None = None,
        wait_ms: int = 0,
    ) -> list[Delivery]: ...


class QueueWork:
    """What can be done inside of a transaction or branch."""

    def __init__(self, plane: QueuePlane, target: Gathering, admit: Callable[[], None]) -> None:
        """`admit` raises if there is no room for what producers write."""
        self._plane = plane
        self._target = target
        self._admit = admit
        self._acked: list[Leased] = []

    def enqueue(self, queue: str | EmbeddedQueue, message: Any, **fields: Any) -> None:
        """One message or many for a queue, as `EmbeddedQueue.enqueue` takes them."""
        self._admit()
        name, drafts = _name(queue), drafts_of(message, fields)[0]
        if asks_for_more(drafts):
            require_fit(self._plane.get(name), drafts)
        self._target.enqueue(name, drafts)

    def ack(self, messages: Held) -> int:
        """Messages that were leased are done, if their leases last until the end; how many."""
        given: list[Any] = list(messages) if isinstance(messages, list | tuple) else [messages]
        by_lease: dict[tuple[str, int], list[bytes]] = {}
        for each in given:
            if not isinstance(each, Leased):
                raise InvalidArgumentError(
                    f"give what lease returned, one message or a list, not {type(each).__name__}"
                )
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
        """Lease messages that are done at the end and go back to their places if it does not come to that."""
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
            raise InvalidArgumentError(f"wait is a number of seconds, 0 or more, not {wait!r:.80}")
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
    """A transaction over queues. Made by `Basalt.transaction`."""

    def __init__(self, plane: QueuePlane, commit: GroupCommit, admit: Callable[[], None]) -> None:
        self._transaction: QueueTransaction = plane.transaction()
        self._group = commit
        super().__init__(plane, self._transaction, admit)

    @property
    def state(self) -> State:
        return self._transaction.state

    @property
    def ids(self) -> list[bytes]:
        """Of the messages enqueued, in order; filled by the commit."""
        return self._transaction.ids

    def commit(self) -> list[bytes]:
        """Do everything; the ids of what was enqueued, once it is durable."""
        ids = self._transaction.commit()
        self._settled()
        return ids

    async def commit_async(self) -> list[bytes]:
        """The same for a task. Waiting for the disk holds no thread; cancelling it undoes nothing."""
        if await asyncio.to_thread(self._transaction.write):
            await self._group.durable()
        self._settled()
        return self.ids

    def abort(self) -> None:
        """Give everything up; what was dequeued goes back to its places."""
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
    """Work in a branch. Made by `Xa.begin`; as a context manager it ends, and dooms the branch if the block raises."""

    def __init__(self, plane: QueuePlane, session: XaSession, admit: Callable[[], None]) -> None:
        super().__init__(plane, session, admit)
        self._session = session
        self.xid = session.xid

    def end(self, *, suspend: bool = False, fail: bool = False) -> None:
        """Leave the branch: for good, for a while (`suspend`), or dooming it (`fail`)."""
        self._session.end(suspend=suspend, fail=fail)

    def resume(self) -> None:
        """Go on after `end(suspend=True)`."""
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
        """Work in a branch: a fresh one, or one that others work in (`join`)."""
        plane = self._plane()
        return BranchSession(plane, plane.xa.begin(xid, join=join), self._admit)

    def prepare(self, xid: Xid) -> Vote:
        """Make a branch survive until it is decided; a read-only one is finished with this."""
        return self._plane().xa.prepare(xid)

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """Carry out a prepared branch, or with `one_phase` one that has ended."""
        self._plane().xa.commit(xid, one_phase=one_phase)

    def rollback(self, xid: Xid) -> None:
        """Undo a branch: what it took goes back to its places, what it brought is gone."""
        self._plane().xa.rollback(xid)

    def recover(self) -> list[Xid]:
        """Branches in doubt: prepared, or decided by an operator and not forgotten."""
        return self._plane().xa.recover()

    def in_doubt(self) -> list[InDoubt]:
        """The same with what they hold, for people."""
        return self._plane().xa.in_doubt()

    def decide(self, xid: Xid, *, commit: bool) -> None:
        """An operator's decision for a branch whose coordinator does not come; remembered until `forget`."""
        self._plane().xa.decide(xid, commit=commit)

    def forget(self, xid: Xid) -> None:
        """Drop the memory of an operator's decision."""
        self._plane().xa.forget(xid)


def _name(queue: str | EmbeddedQueue) -> str:
    name = queue.name if isinstance(queue, EmbeddedQueue) else queue
    if not isinstance(name, str):
        raise InvalidArgumentError(f"a queue is given by name, or as db.queue returned it, not {type(queue).__name__}")
    return name
