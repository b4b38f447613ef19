"""The state machines of X/Open XA, as two tables: for branches and for sessions.

A branch (X/Open's S0 to S5):

    ABSENT ──start──> ACTIVE ──end of the last session──> IDLE ──prepare──> PREPARED ──commit, rollback──> ABSENT
                        ^  │ end(fail)                    │ │ ^               │ an operator decides
                        │  └─────> ROLLBACK_ONLY <────────┘ │ │               └──> HEURISTIC ──forget──> ABSENT
                        └────────────── join, resume ───────┘ └ commit(one phase), rollback ──> ABSENT

A session (T0 to T2): OUTSIDE ──start──> INSIDE ──suspend──> SUSPENDED ──resume──> INSIDE; end leads OUTSIDE from both.

A pair of state and verb that is not in its table is a protocol error. `xa` implements the effects of verbs, and leaves
all decisions about allowed verbs to this module.
"""

from __future__ import annotations

import enum
from typing import Final

from basaltmq.errors import XaProtocolError


class BranchState(enum.Enum):
    ABSENT = "not begun"
    ACTIVE = "active"
    IDLE = "ended"
    ROLLBACK_ONLY = "to be rolled back"
    PREPARED = "prepared"
    HEURISTIC = "decided by an operator"


class SessionState(enum.Enum):
    OUTSIDE = "not part of it"
    INSIDE = "part of it"
    SUSPENDED = "suspended"


class Verb(enum.Enum):
    START = "start"
    JOIN = "join"
    RESUME = "resume"
    SUSPEND = "suspend"
    END = "end"
    END_LAST = "end as the last session"
    FAIL = "end with failure"
    FAIL_LAST = "end with failure as the last session"
    PREPARE = "prepare"
    PREPARE_NOTHING = "prepare without changes"
    COMMIT = "commit"
    COMMIT_ONE_PHASE = "commit in one phase"
    ROLLBACK = "roll back"
    DECIDE = "decide heuristically"
    FORGET = "forget"
    WORK = "work"


_B = BranchState
_S = SessionState
_V = Verb

BRANCH: Final = {
    (_B.ABSENT, _V.START): _B.ACTIVE,
    (_B.ACTIVE, _V.JOIN): _B.ACTIVE,
    (_B.ACTIVE, _V.RESUME): _B.ACTIVE,
    (_B.ACTIVE, _V.SUSPEND): _B.ACTIVE,
    (_B.ACTIVE, _V.WORK): _B.ACTIVE,
    (_B.ACTIVE, _V.END): _B.ACTIVE,
    (_B.ACTIVE, _V.END_LAST): _B.IDLE,
    (_B.ACTIVE, _V.FAIL): _B.ROLLBACK_ONLY,
    (_B.ACTIVE, _V.FAIL_LAST): _B.ROLLBACK_ONLY,
    (_B.IDLE, _V.JOIN): _B.ACTIVE,
    (_B.IDLE, _V.PREPARE): _B.PREPARED,
    (_B.IDLE, _V.PREPARE_NOTHING): _B.ABSENT,
    (_B.IDLE, _V.COMMIT_ONE_PHASE): _B.ABSENT,
    (_B.IDLE, _V.ROLLBACK): _B.ABSENT,
    (_B.ROLLBACK_ONLY, _V.END): _B.ROLLBACK_ONLY,
    (_B.ROLLBACK_ONLY, _V.END_LAST): _B.ROLLBACK_ONLY,
    (_B.ROLLBACK_ONLY, _V.FAIL): _B.ROLLBACK_ONLY,
    (_B.ROLLBACK_ONLY, _V.FAIL_LAST): _B.ROLLBACK_ONLY,
    (_B.ROLLBACK_ONLY, _V.SUSPEND): _B.ROLLBACK_ONLY,
    (_B.ROLLBACK_ONLY, _V.RESUME): _B.ROLLBACK_ONLY,
    (_B.ROLLBACK_ONLY, _V.ROLLBACK): _B.ABSENT,
    (_B.PREPARED, _V.COMMIT): _B.ABSENT,
    (_B.PREPARED, _V.ROLLBACK): _B.ABSENT,
    (_B.PREPARED, _V.DECIDE): _B.HEURISTIC,
    (_B.HEURISTIC, _V.FORGET): _B.ABSENT,
}

SESSION: Final = {
    (_S.OUTSIDE, _V.START): _S.INSIDE,
    (_S.OUTSIDE, _V.JOIN): _S.INSIDE,
    (_S.INSIDE, _V.WORK): _S.INSIDE,
    (_S.INSIDE, _V.SUSPEND): _S.SUSPENDED,
    (_S.INSIDE, _V.END): _S.OUTSIDE,
    (_S.INSIDE, _V.FAIL): _S.OUTSIDE,
    (_S.SUSPENDED, _V.RESUME): _S.INSIDE,
    (_S.SUSPENDED, _V.END): _S.OUTSIDE,
    (_S.SUSPENDED, _V.FAIL): _S.OUTSIDE,
}


def next_branch_state(xid: object, state: BranchState, verb: Verb) -> BranchState:
    try:
        return BRANCH[state, verb]
    except KeyError:
        raise XaProtocolError(f"cannot {verb.value}: branch {xid} is {state.value}") from None


def next_session_state(xid: object, state: SessionState, verb: Verb) -> SessionState:
    try:
        return SESSION[state, verb]
    except KeyError:
        raise XaProtocolError(f"cannot {verb.value}: the session is {state.value} in branch {xid}") from None
