"""Branches of distributed transactions (SPEC A6, the store's part).

A branch gathers changes like a local transaction, under the name of an xid and by any number of sessions that start,
join, suspend, resume and end. Prepare makes it survive a crash: one batch stores the content of its messages and its
record; the messages are in no queue, and the entries it takes are locked. Commit and rollback are one batch each:

    prepare     message rows, record                       commit     entries put and deleted, record deleted
    one phase   message rows, entries put and deleted      rollback   record and the branch's own messages deleted
    decide      as commit or rollback, and the record keeps the decision until it is forgotten

What is allowed when is in `xa_states`; sessions and the table of branches are `branch_table`'s. A step that the store
refuses whole (stalled) leaves the branch as it was, to be tried again. The plane above makes entries visible from the
outcome it is given. A branch that was not prepared is gone after a crash, as X/Open wants. Safe to share between
threads; a branch takes one step at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Self, TypeVar
from uuid import UUID

from basaltmq.errors import (
    LimitExceededError,
    XaRolledBackError,
)
from basaltmq.messages.branches import (
    ACTIONS_MAX,
    DEQUEUE,
    ENQUEUE,
    ENQUEUE_SHARED,
    HEURISTICALLY_COMMITTED,
    HEURISTICALLY_ROLLED_BACK,
    PREPARED,
    Action,
    PreparedBranch,
    Xid,
    encode_branch,
    xid_key,
)
from basaltmq.messages.metadata import decode_metadata, delete_rows
from basaltmq.messages.store import MessageStore
from basaltmq.messages.stored import StoredMessage
from basaltmq.queues.transactions.branch_table import BranchTable, TableBranch
from basaltmq.queues.transactions.xa_states import BranchState, Verb, next_branch_state
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.transactions.transaction import NOTHING_WRITTEN, Changes

_CHECK_ROWS: Final = 1024
_T = TypeVar("_T")


class Vote(NamedTuple):
    """A branch's answer to prepare. A read-only one is finished and hears no more of it."""

    read_only: bool


class Outcome(NamedTuple):
    """What became of a branch, for the plane above to follow."""

    xid: Xid
    committed: bool
    actions: list[Action]


@dataclass(eq=False, slots=True)
class Branch(TableBranch):
    """A branch. Sessions work through it; it is moved on by `XaBranches`."""

    changes: Changes = field(init=False)
    actions: list[Action] = field(default_factory=list)

    def enqueue(self, session: Hashable, queue_id: UUID, message: StoredMessage) -> None:
        """Put a message into a queue when the branch commits."""
        self._require_work(session)
        kind = ENQUEUE_SHARED if message.is_stored else ENQUEUE
        self.changes.enqueue(queue_id, message)
        self.actions.append(Action(kind, queue_id, message.id))

    def dequeue(self, session: Hashable, queue_id: UUID, message_id: int) -> None:
        """Take an entry out of a queue when the branch commits; nobody else may until then."""
        self._require_work(session)
        self.changes.dequeue(queue_id, message_id)
        self.actions.append(Action(DEQUEUE, queue_id, message_id))

    def brought(self) -> set[int]:
        """Messages that are stored by this branch, and removed with it."""
        return {action.message_id for action in self.actions if action.kind == ENQUEUE}

    def _require_work(self, session: Hashable) -> None:
        self.require_work(session)
        if len(self.actions) >= ACTIONS_MAX:
            raise LimitExceededError(f"branch {self.xid} has {ACTIONS_MAX} actions; a branch takes no more")


@dataclass(slots=True)
class _Step(Generic[_T]):
    """A change of a branch that becomes true once its batch is durable."""

    branch: Branch
    batch: Batch
    top_id: int
    done: Callable[[], _T]


class XaBranches(BranchTable[Branch]):
    """All branches of a message store."""

    def __init__(self, messages: MessageStore, clock_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__()
        self._messages = messages
        self._clock_ns = clock_ns

    @classmethod
    def open(cls, messages: MessageStore, clock_ns: Callable[[], int] = time.time_ns) -> Self:
        """With the branches that were prepared before the last stop, which hold their entries again."""
        branches = cls(messages, clock_ns)
        messages.visit_distributed_transactions(branches._take_recovered)
        return branches

    def _make(self, xid: Xid) -> Branch:
        branch = Branch(xid)
        branch.changes = Changes(self._messages, branch)
        return branch

    def release(self, session: Hashable) -> None:
        """A session is gone: what it had not ended is doomed, and rolled back once no session is left in it."""
        with self._lock:
            left = [branch for branch in self._branches.values() if session in branch.sessions]
            for branch in left:
                self.end(branch.xid, session, fail=True)
                if not branch.sessions:
                    self.rollback(branch.xid)

    def prepare(self, xid: Xid) -> Vote:
        """Make a branch survive until it is decided. Blocks the calling thread."""
        return self._run(self._prepare(xid))

    def prepare_async(self, xid: Xid) -> asyncio.Future[Vote]:
        return self._run_async(self._prepare(xid))

    def commit(self, xid: Xid, *, one_phase: bool = False) -> Outcome:
        """Carry a prepared branch out, or one that ended when `one_phase`. Blocks the calling thread."""
        return self._run(self._commit(xid, one_phase))

    def commit_async(self, xid: Xid, *, one_phase: bool = False) -> asyncio.Future[Outcome]:
        return self._run_async(self._commit(xid, one_phase))

    def rollback(self, xid: Xid) -> Outcome:
        """Undo a branch. Blocks the calling thread."""
        return self._run(self._rollback(xid))

    def rollback_async(self, xid: Xid) -> asyncio.Future[Outcome]:
        return self._run_async(self._rollback(xid))

    def decide(self, xid: Xid, *, commit: bool) -> Outcome:
        """An operator's decision for a prepared branch whose coordinator does not come. Kept until `forget`."""
        return self._run(self._decide(xid, commit))

    def forget(self, xid: Xid) -> None:
        """Drop the memory of a heuristic decision. Blocks the calling thread."""
        with self._lock:
            branch = self._idle_branch(xid)
            next_branch_state(xid, branch.state, Verb.FORGET)
            batch = Batch()
            batch.delete(Family.XIDS, xid_key(xid))
            step = self._step(branch, batch, 0, lambda: self._drop(branch))
        self._run(step)

    def _prepare(self, xid: Xid) -> _Step[Vote]:
        with self._lock:
            branch = self._ended_branch(xid)
            self._require_sound(branch)
            if not branch.actions:
                next_branch_state(xid, branch.state, Verb.PREPARE_NOTHING)
                return self._step(branch, Batch(), 0, lambda: self._voted(branch, read_only=True))
            next_branch_state(xid, branch.state, Verb.PREPARE)
            self._require_entries(branch)
            batch = Batch()
            for message in branch.changes.pending.values():
                message.put_rows(batch)
            batch.put(Family.XIDS, xid_key(xid), encode_branch(PREPARED, self._now_ms(), branch.actions))
            return self._step(branch, batch, branch.changes.top_id, lambda: self._voted(branch, read_only=False))

    def _commit(self, xid: Xid, one_phase: bool) -> _Step[Outcome]:
        with self._lock:
            branch = self._ended_branch(xid)
            self._require_undecided(branch)
            if one_phase:
                self._require_sound(branch)
            next_branch_state(xid, branch.state, Verb.COMMIT_ONE_PHASE if one_phase else Verb.COMMIT)
            if one_phase:
                self._require_entries(branch)
                batch, top_id = branch.changes.rows(), branch.changes.top_id
            else:
                batch, top_id = _commit_rows(branch.actions), 0
                batch.delete(Family.XIDS, xid_key(xid))
            return self._step(branch, batch, top_id, lambda: self._finished(branch, committed=True))

    def _rollback(self, xid: Xid) -> _Step[Outcome]:
        with self._lock:
            branch = self._ended_branch(xid)
            self._require_undecided(branch)
            next_branch_state(xid, branch.state, Verb.ROLLBACK)
            batch = Batch()
            if branch.state is BranchState.PREPARED:
                batch = self._rollback_rows(branch)
                batch.delete(Family.XIDS, xid_key(xid))
            return self._step(branch, batch, 0, lambda: self._finished(branch, committed=False))

    def _decide(self, xid: Xid, commit: bool) -> _Step[Outcome]:
        with self._lock:
            branch = self._ended_branch(xid)
            self._require_undecided(branch)
            state = next_branch_state(xid, branch.state, Verb.DECIDE)
            decision = HEURISTICALLY_COMMITTED if commit else HEURISTICALLY_ROLLED_BACK
            batch = _commit_rows(branch.actions) if commit else self._rollback_rows(branch)
            batch.put(Family.XIDS, xid_key(xid), encode_branch(decision, self._now_ms(), []))

            def decided() -> Outcome:
                outcome = self._finished(branch, committed=commit)
                branch.state, branch.decision, branch.actions = state, decision, []
                self._branches[xid] = branch
                return outcome

            return self._step(branch, batch, 0, decided)

    def _voted(self, branch: Branch, *, read_only: bool) -> Vote:
        if read_only:
            self._drop(branch)
        else:
            branch.state = BranchState.PREPARED
            branch.changes.set_stored()
            self._own(branch)
        return Vote(read_only)

    def _finished(self, branch: Branch, *, committed: bool) -> Outcome:
        if committed:
            branch.changes.set_stored()
        elif branch.state is BranchState.PREPARED:
            for message in branch.changes.pending.values():
                message.set_removed()
        for message_id in branch.brought():
            self._messages.owners.pop(message_id, None)
        branch.changes.discard()
        self._drop(branch)
        return Outcome(branch.xid, committed, branch.actions)

    def _rollback_rows(self, branch: Branch) -> Batch:
        """Delete the messages the branch brought."""
        batch = Batch()
        for message_id in sorted(branch.brought()):
            raw = self._messages.store.get(Family.MESSAGE_METADATA, keys.metadata_key(message_id))
            if raw is not None:
                delete_rows(batch, message_id, decode_metadata(message_id, raw))
        return batch

    def _step(self, branch: Branch, batch: Batch, top_id: int, done: Callable[[], _T]) -> _Step[_T]:
        branch.busy = True
        return _Step(branch, batch, top_id, done)

    def _run(self, step: _Step[_T]) -> _T:
        if len(step.batch):
            try:
                self._messages.commit(step.batch, step.top_id)
            except BaseException as error:
                self._failed(step.branch, error)
                raise
        return self._done(step)

    def _run_async(self, step: _Step[_T]) -> asyncio.Future[_T]:
        try:
            told: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        except RuntimeError:
            # Called without a loop: nothing was begun.
            step.branch.busy = False
            raise
        if not len(step.batch):
            told.set_result(self._done(step))
            return told
        try:
            durable = self._messages.commit_async(step.batch, step.top_id)
        except BaseException as error:
            self._failed(step.branch, error)
            raise

        def tell(done: asyncio.Future[None]) -> None:
            error = done.exception()
            if error is not None:
                self._failed(step.branch, error)
                if not told.done():
                    told.set_exception(error)
                return
            result = self._done(step)
            if not told.done():
                told.set_result(result)

        durable.add_done_callback(tell)
        return told

    def _done(self, step: _Step[_T]) -> _T:
        with self._lock:
            step.branch.busy = False
            return step.done()

    def _failed(self, branch: Branch, error: BaseException) -> None:
        # After any other failure the branch stays busy: whether the step is on disk only recovery can tell.
        branch.busy = not isinstance(error, NOTHING_WRITTEN)

    def _take_recovered(self, found: PreparedBranch) -> None:
        branch = self._make(found.xid)
        branch.actions = found.actions
        branch.decision = found.state
        branch.state = BranchState.PREPARED if found.state == PREPARED else BranchState.HEURISTIC
        branch.changes.locked = {action.entry for action in found.actions if action.kind == DEQUEUE}
        self._messages.locks.take_recovered(branch.changes.locked)
        self._own(branch)
        self._branches[found.xid] = branch

    def _own(self, branch: Branch) -> None:
        """What a prepared branch brought goes nowhere else until the branch is decided."""
        self._messages.owners.update(dict.fromkeys(branch.brought(), branch))

    def _require_sound(self, branch: Branch) -> None:
        if branch.state is BranchState.ROLLBACK_ONLY:
            self._finished(branch, committed=False)
            raise XaRolledBackError(f"branch {branch.xid} had failed and was rolled back")

    def _require_entries(self, branch: Branch) -> None:
        """Every entry the branch takes is there, or comes from the branch itself."""
        own: set[bytes] = set()
        taken: list[bytes] = []
        for action in branch.actions:
            if action.kind != DEQUEUE:
                own.add(action.entry)
            elif action.entry not in own:
                taken.append(action.entry)
        for at in range(0, len(taken), _CHECK_ROWS):
            some = taken[at : at + _CHECK_ROWS]
            for entry, value in zip(some, self._messages.store.get_many(Family.QUEUE_ENTRIES, some), strict=True):
                if value is None:
                    queue_id, message_id = keys.decode_queue_entry_key(entry)
                    self._finished(branch, committed=False)
                    raise XaRolledBackError(
                        f"message {message_id} is not in queue {queue_id}; branch {branch.xid} was rolled back"
                    )

    def _now_ms(self) -> int:
        return self._clock_ns() // 1_000_000


def _commit_rows(actions: list[Action]) -> Batch:
    batch = Batch()
    for action in actions:
        if action.kind == DEQUEUE:
            batch.delete(Family.QUEUE_ENTRIES, action.entry)
        else:
            batch.put(Family.QUEUE_ENTRIES, action.entry, b"")
    return batch
