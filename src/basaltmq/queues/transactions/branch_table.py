"""The branches a resource knows, and the sessions that work in them: who may do what when, for any kind of resource.

What a branch changes, and how it is stored, prepared and carried out, is the resource's: `xa` for the message store,
`basaltmq.queues.xa` for queues. The order of verbs is in `xa_states`; here they are applied. A session works in one
branch at a time; a branch can have many sessions, and is decided when none is left in it. Everything is done under
the lock handed in, which the resource may share with what is below it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from basaltmq.errors import (
    LimitExceededError,
    UnknownXidError,
    XaHeuristicCommitError,
    XaHeuristicRollbackError,
    XaInvalidError,
    XaProtocolError,
    XidInUseError,
)
from basaltmq.messages.branches import (
    HEURISTICALLY_COMMITTED,
    HEURISTICALLY_ROLLED_BACK,
    PREPARED,
    Xid,
    check_xid,
)
from basaltmq.queues.transactions.xa_states import (
    BranchState,
    SessionState,
    Verb,
    next_branch_state,
    next_session_state,
)

BRANCHES_MAX: Final = 10_000
"""Branches at a time: each waits for a coordinator; so many mean that none is coming. Recovered ones always fit."""


@dataclass(eq=False, slots=True)
class TableBranch:
    """What every branch has, whatever it changes."""

    xid: Xid
    state: BranchState = BranchState.ABSENT
    sessions: dict[Hashable, SessionState] = field(default_factory=dict)
    decision: int = PREPARED
    busy: bool = False
    """It takes a step whose end is not known yet."""

    def require_work(self, session: Hashable) -> None:
        """The session may change something in the branch."""
        next_session_state(self.xid, self.sessions.get(session, SessionState.OUTSIDE), Verb.WORK)
        next_branch_state(self.xid, self.state, Verb.WORK)


B = TypeVar("B", bound=TableBranch)


class BranchTable(Generic[B]):
    """All branches of a resource."""

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self._branches: dict[Xid, B] = {}
        self._working: dict[Hashable, B] = {}
        self._lock = lock or threading.RLock()

    def _make(self, xid: Xid) -> B:
        raise NotImplementedError

    def start(self, xid: Xid, session: Hashable, *, join: bool = False, resume: bool = False) -> B:
        """Make a session part of a branch: of a fresh one, of one that exists (join), or again (resume)."""
        check_xid(xid)
        if join and resume:
            raise XaInvalidError(f"start of branch {xid}: join and resume exclude each other")
        with self._lock:
            if join or resume:
                branch = self._known(xid)
                verb = Verb.JOIN if join else Verb.RESUME
            else:
                if xid in self._branches:
                    raise XidInUseError(f"branch {xid} exists and is {self._branches[xid].state.value}; join it")
                if len(self._branches) >= BRANCHES_MAX:
                    raise LimitExceededError(f"there are {BRANCHES_MAX} branches; complete some before starting more")
                branch = self._make(xid)
                verb = Verb.START
            self._require_outside(session, branch)
            state = next_branch_state(xid, branch.state, verb)
            part = next_session_state(xid, branch.sessions.get(session, SessionState.OUTSIDE), verb)
            branch.state = state
            branch.sessions[session] = part
            self._working[session] = branch
            self._branches[xid] = branch
            return branch

    def end(self, xid: Xid, session: Hashable, *, suspend: bool = False, fail: bool = False) -> None:
        """Take a session out of a branch, for a while (suspend) or for good; `fail` dooms the branch."""
        if suspend and fail:
            raise XaInvalidError(f"end of branch {xid}: suspend and fail exclude each other")
        with self._lock:
            branch = self._known(xid)
            verb = Verb.SUSPEND if suspend else Verb.FAIL if fail else Verb.END
            part = next_session_state(xid, branch.sessions.get(session, SessionState.OUTSIDE), verb)
            if part is SessionState.OUTSIDE and len(branch.sessions) == 1:
                verb = Verb.FAIL_LAST if fail else Verb.END_LAST
            branch.state = next_branch_state(xid, branch.state, verb)
            if self._working.get(session) is branch:
                del self._working[session]
            if part is SessionState.OUTSIDE:
                del branch.sessions[session]
            else:
                branch.sessions[session] = part

    def recover(self) -> list[Xid]:
        """Branches in doubt: prepared, or decided by an operator and not forgotten."""
        with self._lock:
            doubt = (BranchState.PREPARED, BranchState.HEURISTIC)
            return sorted(xid for xid, branch in self._branches.items() if branch.state in doubt)

    def state(self, xid: Xid) -> BranchState:
        with self._lock:
            branch = self._branches.get(xid)
            return BranchState.ABSENT if branch is None else branch.state

    def _drop(self, branch: B) -> None:
        branch.state = BranchState.ABSENT
        self._branches.pop(branch.xid, None)

    def _known(self, xid: Xid) -> B:
        check_xid(xid)
        try:
            return self._branches[xid]
        except KeyError:
            raise UnknownXidError(f"no branch {xid} is known; it may be finished, or was never prepared") from None

    def _idle_branch(self, xid: Xid) -> B:
        branch = self._known(xid)
        if branch.busy:
            raise XaProtocolError(f"branch {xid} is taking a step; wait for its answer")
        return branch

    def _ended_branch(self, xid: Xid) -> B:
        branch = self._idle_branch(xid)
        if branch.sessions:
            raise XaProtocolError(f"branch {xid} has {len(branch.sessions)} sessions in it; end them first")
        return branch

    def _require_outside(self, session: Hashable, target: B) -> None:
        """A session works in one branch at a time."""
        branch = self._working.get(session)
        if branch is not None and branch is not target:
            raise XaProtocolError(f"the session works in branch {branch.xid}; end or suspend that first")

    def _require_undecided(self, branch: B) -> None:
        if branch.decision == HEURISTICALLY_COMMITTED:
            raise XaHeuristicCommitError(f"an operator committed branch {branch.xid}; forget it")
        if branch.decision == HEURISTICALLY_ROLLED_BACK:
            raise XaHeuristicRollbackError(f"an operator rolled branch {branch.xid} back; forget it")
