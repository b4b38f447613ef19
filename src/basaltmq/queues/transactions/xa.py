"""Branches of distributed transactions over queues (SPEC A6).

Sessions (begin, join, suspend, resume, end) collect operations in a branch (`Work`). Prepare makes the branch survive
until it is decided. Every step is one batch, durable on return:

    prepare     holds the messages to ack (`leases/prepared.py`), stores the messages to enqueue as invisible drafts
                with large payloads in their final place (`branch_rows.py`), and writes the record
    commit      acks the held messages, enqueues the drafts (with the enqueue time of the commit), deletes the record
    one phase   applies the operations like a transaction, without a record
    rollback    returns the held messages to their places without counting an attempt, deletes drafts and record
    decide      commit or rollback by an operator; the record keeps the decision until it is forgotten

A commit of a prepared branch cannot fail. Scripts and limits apply at prepare. At the commit, a queue that rejects
when full exceeds its limit, and one that drops its head drops afterwards. A prepared branch prevents the deletion of
its queues. Held messages count as leased, also after kill -9 and power loss.

A branch that cannot be prepared (an expired lease, a full or missing queue) is rolled back with an error. An unprepared
branch does not survive a crash; its acked messages stay leased until their leases expire. The order of verbs is in
`xa_states`, sessions are in `branch_table`. All methods take the plane's lock and wait outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Self, TypeVar

import msgspec

from basaltmq.clock import NS_PER_MS
from basaltmq.durability import Durability
from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    LimitExceededError,
    QueueFullError,
    QueueNotFoundError,
    StaleLeaseError,
    StorageError,
    UnknownXidError,
    XaRolledBackError,
)
from basaltmq.queues.change import Change
from basaltmq.queues.content import Content
from basaltmq.queues.draft import Draft
from basaltmq.queues.entries.quarantine import Quarantine
from basaltmq.queues.entries.rows import NO_BODY
from basaltmq.queues.leases.prepared import hold, is_held
from basaltmq.queues.leases.table import LeaseCall
from basaltmq.queues.lifecycle import limits, script_results
from basaltmq.queues.queue import ENQUEUE_MAX, Queue
from basaltmq.queues.transactions import branch_rows
from basaltmq.queues.transactions.branch_rows import BranchRow, Hold, KeptDraft
from basaltmq.queues.transactions.branch_table import Branch, BranchTable
from basaltmq.queues.transactions.work import NOTHING_WRITTEN, Find, Operations, Plane, Work
from basaltmq.queues.transactions.xa_states import BranchState, Verb, next_branch_state
from basaltmq.queues.transactions.xid import HEURISTICALLY_COMMITTED, HEURISTICALLY_ROLLED_BACK, PREPARED, Xid, xid_key
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp
from basaltmq.store.sync.group_commit import GroupCommit

T = TypeVar("T")


class Vote(NamedTuple):
    """A branch's answer to prepare, which finishes a read-only branch."""

    read_only: bool


class InDoubt(NamedTuple):
    """A branch that waits for its coordinator, for display."""

    xid: Xid
    state: str
    since_ms: int
    queues: list[str]
    held: int
    to_enqueue: int

    def shown(self) -> dict[str, object]:
        """Return the fields with the xid as text."""
        return self._asdict() | {"xid": str(self.xid)}


class XaSession(Operations):
    """A session in a branch, created by `QueueXa.begin`."""

    def __init__(self, table: QueueXa, xid: Xid) -> None:
        self._table = table
        self.xid = xid

    def _work_for(self, operation: str) -> Work:
        return self._table.work_of(self)

    def end(self, *, suspend: bool = False, fail: bool = False) -> None:
        """End the session: for good, for a while (`suspend`), or marking the branch rollback-only (`fail`)."""
        self._table.end(self.xid, self, suspend=suspend, fail=fail)

    def resume(self) -> None:
        """Continue after `end(suspend=True)`."""
        self._table.start(self.xid, self, resume=True)


class QueueXa(BranchTable):
    """Prepares, commits and rolls back branches."""

    def __init__(
        self,
        store: Store,
        commit: GroupCommit,
        plane: Plane,
        lock: threading.RLock,
        clock_ns: Callable[[], int],
        quarantine: Quarantine,
    ) -> None:
        super().__init__(plane, lock)
        self._quarantine = quarantine
        self._store = store
        self._commit = commit
        self._clock_ns = clock_ns
        self._content = Content(store)
        self._queues: dict[str, set[Xid]] = {}

    @classmethod
    def open(
        cls,
        store: Store,
        commit: GroupCommit,
        plane: Plane,
        lock: threading.RLock,
        clock_ns: Callable[[], int],
        quarantine: Quarantine,
    ) -> Self:
        """Load the prepared branches from disk."""
        table = cls(store, commit, plane, lock, clock_ns, quarantine)
        for row in branch_rows.read_branches(store, quarantine):
            branch = Branch(row.xid, Work(plane))
            branch.decision = row.state
            branch.state = BranchState.PREPARED if row.state == PREPARED else BranchState.HEURISTIC
            table._keep(branch, row)
            table._branches[row.xid] = branch
        return table

    def begin(self, xid: Xid, *, join: bool = False) -> XaSession:
        """Begin a session in a new branch, or with `join` in one that has other sessions."""
        session = XaSession(self, xid)
        self.start(xid, session, join=join)
        return session

    def prepare(self, xid: Xid) -> Vote:
        """Prepare a branch durably. Blocks the calling thread."""
        return self._wait(*self._prepare(xid))

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """Commit a prepared branch, or with `one_phase` an ended one. Blocks the calling thread."""
        self._wait(*self._commit_branch(xid, one_phase))

    def rollback(self, xid: Xid) -> None:
        """Roll back a branch. Blocks the calling thread."""
        self._wait(*self._rollback(xid))

    def decide(self, xid: Xid, *, commit: bool) -> None:
        """Record an operator's decision for a prepared branch without coordinator. It is kept until `forget`."""
        self._wait(*self._decide(xid, commit))

    def forget(self, xid: Xid) -> None:
        """Delete the record of a heuristic decision. Blocks the calling thread."""
        with self._lock:
            branch = self._idle_branch(xid)
            next_branch_state(xid, branch.state, Verb.FORGET)
            self._step(branch, lambda change, find: change.batch.delete(Family.XIDS, xid_key(xid)))
            self._drop(branch)
        self._wait(branch, None)

    def in_doubt(self) -> list[InDoubt]:
        """Return branches that are prepared or decided by an operator, ordered by xid, with what they hold."""
        with self._lock:
            rows = [(self._branches[xid].state, self._branches[xid].row) for xid in self.recover()]
        named = {HEURISTICALLY_COMMITTED: "committed by an operator", HEURISTICALLY_ROLLED_BACK: "rolled back by one"}
        return [
            InDoubt(
                row.xid,
                named.get(row.state, state.value),
                row.decided_ms,
                row.queues,
                sum(each.messages for each in row.holds),
                row.drafts,
            )
            for state, row in rows
        ]

    def holders_of(self, queue: str) -> list[Xid]:
        """Return the prepared branches that prevent a queue's deletion. The plane calls this with its lock."""
        return sorted(self._queues.get(queue, ()))

    def is_orphan(self, call: LeaseCall) -> bool:
        """Whether a lease is held for an unknown branch, whose record was damaged."""
        if not is_held(call):
            return False
        rows = [branch.row for branch in self._branches.values() if branch.state is BranchState.PREPARED]
        return all(call.token != each.token for row in rows for each in row.holds)

    def work_of(self, session: XaSession) -> Work:
        """Return the collected operations of a session; raise an error if it may not work."""
        with self._lock:
            branch = self._known(session.xid)
            branch.require_work(session)
            return branch.work

    def release(self, session: Hashable) -> None:
        """Remove a session that is gone. Its unended branches become rollback-only, and are rolled back without
        sessions."""
        with self._lock:
            left = [branch for branch in self._branches.values() if session in branch.sessions]
            for branch in left:
                self.end(branch.xid, session, fail=True)
        for branch in left:
            if not branch.sessions:
                self.rollback(branch.xid)

    def _prepare(self, xid: Xid) -> tuple[Branch, Vote]:
        with self._lock:
            branch = self._ended_branch(xid)
            self._require_sound(branch)
            if not branch.work:
                next_branch_state(xid, branch.state, Verb.PREPARE_NOTHING)
                self._undo(branch)
                return branch, Vote(read_only=True)
            state = next_branch_state(xid, branch.state, Verb.PREPARE)
            row = self._try(branch, lambda change, find: self._put(change, find, branch))
            branch.state = state
            branch.work = Work(self._plane)
            self._keep(branch, row)
            return branch, Vote(read_only=False)

    def _put(self, change: Change, find: Find, branch: Branch) -> BranchRow:
        """Hold the messages to ack, store those to enqueue, and write the record."""
        xid, work = branch.xid, branch.work
        holds: list[Hold] = []
        for name, token, ids in work.acks:
            held = hold(find(name), change, token, ids, f"xa {xid}")
            holds.append(Hold(name, held.token, len(held.entries)))
        drafts: list[tuple[str, Draft | bytes]] = []
        sizes: dict[str, list[int]] = {}
        for name, given in work.enqueues:
            drafts += [(name, draft) for draft in script_results.on_enqueue(find(name), given)]
            sizes.setdefault(name, []).extend(len(d if isinstance(d, bytes) else d.payload) for d in given)
        for name, each in sizes.items():
            limits.require_room(find(name), len(each), sum(each))
        count = 0
        if drafts:
            count = branch_rows.put_drafts(change, self._content, find(drafts[0][0]).shared.ids, xid, drafts)
        queues = sorted({each.queue for each in holds} | {name for name, _ in drafts})
        row = BranchRow(xid, PREPARED, self._clock_ns() // NS_PER_MS, count, holds, queues)
        branch_rows.put_branch(change.batch, row)
        return row

    def _commit_branch(self, xid: Xid, one_phase: bool) -> tuple[Branch, None]:
        with self._lock:
            branch = self._ended_branch(xid)
            self._require_undecided(branch)
            if one_phase:
                self._require_sound(branch)
            next_branch_state(xid, branch.state, Verb.COMMIT_ONE_PHASE if one_phase else Verb.COMMIT)
            if one_phase:
                self._try(branch, branch.work.run)
                self._drop(branch)
            else:
                self._finish(branch, commit=True)
            return branch, None

    def _rollback(self, xid: Xid) -> tuple[Branch, None]:
        with self._lock:
            branch = self._ended_branch(xid)
            self._require_undecided(branch)
            next_branch_state(xid, branch.state, Verb.ROLLBACK)
            if branch.state is BranchState.PREPARED:
                self._finish(branch, commit=False)
            else:
                self._undo(branch)
            return branch, None

    def _decide(self, xid: Xid, commit: bool) -> tuple[Branch, None]:
        with self._lock:
            branch = self._ended_branch(xid)
            self._require_undecided(branch)
            state = next_branch_state(xid, branch.state, Verb.DECIDE)
            decision = HEURISTICALLY_COMMITTED if commit else HEURISTICALLY_ROLLED_BACK
            row = BranchRow(xid, decision, self._clock_ns() // NS_PER_MS, 0, [], [])
            self._finish(branch, commit=commit, leaving=row)
            branch.state, branch.decision, branch.row = state, decision, row
            self._branches[xid] = branch
            return branch, None

    def _finish(self, branch: Branch, *, commit: bool, leaving: BranchRow | None = None) -> None:
        """Commit or roll back a prepared branch."""

        def finish(change: Change, find: Find) -> None:
            row = branch.row
            for each in row.holds:
                with suppress(StaleLeaseError, QueueNotFoundError):
                    # A hold with a damaged row is in quarantine, and its messages are ready again.
                    queue = find(each.queue)
                    if commit:
                        queue.ack(change, each.token)
                    else:
                        queue.release(change, each.token)
            if row.drafts:

                def damaged(key: bytes, raw: bytes | None, reason: str) -> None:
                    self._quarantine.keep(change, Family.BRANCH_DRAFTS, key, raw, reason)

                drafts = branch_rows.read_drafts(self._store, row.xid, row.drafts, damaged)
                if commit:
                    self._enqueue(change, find, drafts)
                branch_rows.release_bodies(change, self._content, drafts)
            if leaving is None:
                branch_rows.delete_branch(change.batch, row.xid, row.drafts)
            else:
                branch_rows.delete_drafts(change.batch, row.xid, row.drafts)
                branch_rows.put_branch(change.batch, leaving)

        self._step(branch, finish)
        for name in branch.row.queues:
            waiting = self._queues[name]
            waiting.discard(branch.xid)
            if not waiting:
                del self._queues[name]
        self._drop(branch)

    def _enqueue(self, change: Change, find: Find, kept: list[KeptDraft]) -> None:
        """Enqueue the prepared messages."""
        for (name, body_id, body_bytes), group in groupby(kept, key=itemgetter(0, 2, 3)):
            queue = find(name)
            drafts: list[Draft | bytes] = [each.draft for each in group]
            if body_id == NO_BODY:
                for at in range(0, len(drafts), ENQUEUE_MAX):
                    queue.enqueue(change, drafts[at : at + ENQUEUE_MAX], prepared=True)
            else:
                self._enqueue_large(change, queue, drafts, body_id, body_bytes)

    def _enqueue_large(
        self, change: Change, queue: Queue, drafts: list[Draft | bytes], body_id: bytes, body_bytes: int | None
    ) -> None:
        """Enqueue drafts whose payload is stored outside the row, and keep it there unless they are transient."""
        try:
            payload = self._content.read(body_id, body_bytes)
        except CorruptionError as error:
            for draft in drafts:
                raw = lp(queue.name) + msgspec.msgpack.encode(draft)
                self._quarantine.keep(change, Family.BRANCH_DRAFTS, body_id, raw, str(error), queue=queue.name)
            return
        in_memory = queue.config.durability is Durability.MEMORY
        for draft in drafts:
            assert isinstance(draft, Draft), "drafts with bodies are stored as Draft"
            whole = msgspec.structs.replace(draft, payload=payload)
            is_transient = (draft.transient or in_memory) and not draft.delay_ms
            queue.enqueue(change, [whole], NO_BODY if is_transient else body_id, prepared=True)

    def _try(self, branch: Branch, operation: Callable[[Change, Find], T]) -> T:
        """Run a step that ends the branch if it fails."""
        try:
            return self._step(branch, operation)
        except BasaltError as error:
            if isinstance(error, (StorageError, LimitExceededError)) and not isinstance(error, QueueFullError):
                raise
            self._undo(branch)
            raise XaRolledBackError(f"branch {branch.xid} was rolled back: {error}") from error

    def _step(self, branch: Branch, operation: Callable[[Change, Find], T]) -> T:
        """Write rows. The branch is busy until they are durable."""
        branch.busy = True
        try:
            return self._plane.apply(operation)
        except BaseException as error:
            # If the store fails, the branch stays busy. Only recovery can tell whether the step is on disk.
            branch.busy = isinstance(error, StorageError) and not isinstance(error, NOTHING_WRITTEN)
            raise

    def _undo(self, branch: Branch) -> None:
        """Roll back an unprepared branch. Messages it leased are released, or their leases expire."""
        if branch.work.took:
            with suppress(BasaltError):
                self._plane.apply(branch.work.give_back)
        self._drop(branch)

    def _require_sound(self, branch: Branch) -> None:
        if branch.state is BranchState.ROLLBACK_ONLY:
            self._undo(branch)
            raise XaRolledBackError(f"branch {branch.xid} had failed and was rolled back")

    def _keep(self, branch: Branch, row: BranchRow) -> None:
        branch.row = row
        for name in row.queues:
            self._queues.setdefault(name, set()).add(row.xid)

    def _wait(self, branch: Branch, result: T) -> T:
        if branch.busy:
            self._commit.wait_durable()
            branch.busy = False
        return result


def parse_xid(text: str) -> Xid:
    """Parse the text of an xid: format, global id and branch id in hex, separated by colons."""
    parts = text.split(":")
    try:
        format_id, global_id, branch_id = parts
        return Xid(int(format_id), bytes.fromhex(global_id), bytes.fromhex(branch_id))
    except ValueError:
        raise UnknownXidError(f"{text!r:.200} is not an xid: write format:global:branch, the ids in hex") from None
