"""The XA state tables allow exactly the transitions of X/Open."""

from __future__ import annotations

import pytest

from basaltmq.errors import XaProtocolError
from basaltmq.queues.transactions.xa_states import (
    BRANCH,
    SESSION,
    BranchState,
    SessionState,
    Verb,
    next_branch_state,
    next_session_state,
)


@pytest.mark.spec("A6")
@pytest.mark.parametrize("state", BranchState)
@pytest.mark.parametrize("verb", Verb)
def test_every_branch_state_and_verb_is_allowed_or_refused(state: BranchState, verb: Verb) -> None:
    if (state, verb) in BRANCH:
        assert next_branch_state("x", state, verb) is BRANCH[state, verb]
    else:
        with pytest.raises(XaProtocolError, match=f"cannot {verb.value}: branch x is {state.value}"):
            next_branch_state("x", state, verb)


@pytest.mark.spec("A6")
@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("verb", Verb)
def test_every_session_state_and_verb_is_allowed_or_refused(state: SessionState, verb: Verb) -> None:
    if (state, verb) in SESSION:
        assert next_session_state("x", state, verb) is SESSION[state, verb]
    else:
        with pytest.raises(XaProtocolError, match=f"cannot {verb.value}: the session is {state.value}"):
            next_session_state("x", state, verb)


@pytest.mark.spec("A6")
def test_every_state_can_return_to_absent() -> None:
    ways_out: set[BranchState] = {BranchState.ABSENT}
    for _ in BranchState:
        ways_out |= {state for (state, _), after in BRANCH.items() if after in ways_out}
    assert ways_out == set(BranchState)


@pytest.mark.spec("A6")
def test_prepared_branch_leaves_its_state_only_by_a_decision() -> None:
    assert {verb for state, verb in BRANCH if state is BranchState.PREPARED} == {
        Verb.COMMIT,
        Verb.ROLLBACK,
        Verb.DECIDE,
    }
