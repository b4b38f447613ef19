"""The table of branches, and the sessions that work in them.

`xa_states` defines the allowed order of verbs; this module applies it. `xa` prepares and commits branches. A session
works in one branch at a time. A branch can have many sessions, and is decided after the last one ended. Every method
takes the lock of the queue plane.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from basaltmq.errors import (
    LimitExceededError,
    UnknownXidError,
    XaHeuristicCommitError,
    XaHeuristicRollbackError,
    XaInvalidError,
    XaProtocolError,
    XidInUseError,
)
from basaltmq.queues.transactions.branch_rows import BranchRow
from basaltmq.queues.transactions.work import Plane, Work
from basaltmq.queues.transactions.xa_states import (
    BranchState,
    SessionState,
    Verb,
    next_branch_state,
    next_session_state,
)
from basaltmq.queues.transactions.xid import (
    HEURISTICALLY_COMMITTED,
    HEURISTICALLY_ROLLED_BACK,
    PREPARED,
    Xid,
    check_xid,
)

BRANCHES_MAX: Final = 10_000
"""Maximum number of branches. So many mean that no coordinator finishes them. Recovered branches always fit."""


@dataclass(eq=False, slots=True)
class Branch:
    """A branch and its state in memory."""

    xid: Xid
    work: Work
    row: BranchRow = field(init=False)
    """The row on disk, once prepared."""
    state: BranchState = BranchState.ABSENT
    sessions: dict[Hashable, SessionState] = field(default_factory=dict)
    decision: int = PREPARED
    busy: bool = False
    """Whether a step is in progress whose result is not known yet."""

    def require_work(self, session: Hashable) -> None:
        """Raise an error unless the session may work in the branch."""
        next_session_state(self.xid, self.sessions.get(session, SessionState.OUTSIDE), Verb.WORK)
        next_branch_state(self.xid, self.state, Verb.WORK)


class BranchTable:
    """All branches over the queues of a plane."""

    def __init__(self, plane: Plane, lock: threading.RLock) -> None:
        self._branches: dict[Xid, Branch] = {}
        self._working: dict[Hashable, Branch] = {}
        self._plane = plane
        self._lock = lock

    def start(self, xid: Xid, session: Hashable, *, join: bool = False, resume: bool = False) -> Branch:
        """Add a session to a branch: a new one, an existing one (join), or again (resume)."""
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
                    raise LimitExceededError(
                        f"{BRANCHES_MAX} branches exist, which is the limit; complete some before starting more"
                    )
                branch = Branch(xid, Work(self._plane))
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
        """Remove a session from a branch, temporarily (suspend) or for good. `fail` marks the branch rollback-only."""
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
        """Return branches in doubt: prepared, or decided by an operator and not yet forgotten."""
        with self._lock:
            doubt = (BranchState.PREPARED, BranchState.HEURISTIC)
            return sorted(xid for xid, branch in self._branches.items() if branch.state in doubt)

    def state(self, xid: Xid) -> BranchState:
        with self._lock:
            branch = self._branches.get(xid)
            return BranchState.ABSENT if branch is None else branch.state

    def _drop(self, branch: Branch) -> None:
        branch.state = BranchState.ABSENT
        self._branches.pop(branch.xid, None)

    def _known(self, xid: Xid) -> Branch:
        check_xid(xid)
        try:
            return self._branches[xid]
        except KeyError:
            raise UnknownXidError(f"branch {xid} is unknown; it may be finished, or was never prepared") from None

    def _idle_branch(self, xid: Xid) -> Branch:
        branch = self._known(xid)
        if branch.busy:
            raise XaProtocolError(f"branch {xid} has a step in progress; wait for its answer")
        return branch

    def _ended_branch(self, xid: Xid) -> Branch:
        branch = self._idle_branch(xid)
        if branch.sessions:
            raise XaProtocolError(f"branch {xid} still has {len(branch.sessions)} sessions; end them first")
        return branch

    def _require_outside(self, session: Hashable, target: Branch) -> None:
        """Raise an error if the session works in another branch."""
        branch = self._working.get(session)
        if branch is not None and branch is not target:
            raise XaProtocolError(f"the session works in branch {branch.xid}; end or suspend that first")

    def _require_undecided(self, branch: Branch) -> None:
        if branch.decision == HEURISTICALLY_COMMITTED:
            raise XaHeuristicCommitError(f"an operator committed branch {branch.xid}; forget it")
        if branch.decision == HEURISTICALLY_ROLLED_BACK:
            raise XaHeuristicRollbackError(f"an operator rolled branch {branch.xid} back; forget it")
