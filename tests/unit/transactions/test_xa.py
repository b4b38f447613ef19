"""Branches of distributed transactions: what they hold, what survives, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.messages_world import QUEUE_A, QUEUE_B, QUEUE_C, World

from basaltmq.errors import (
    CorruptionError,
    EntryLockedError,
    LimitExceededError,
    MessageNotFoundError,
    StoreStalledError,
    TransactionError,
    UnknownXidError,
    XaError,
    XaHeuristicCommitError,
    XaHeuristicRollbackError,
    XaInvalidError,
    XaProtocolError,
    XaRolledBackError,
    XidInUseError,
)
from basaltmq.messages import branches, stored
from basaltmq.messages.branches import (
    DEQUEUE,
    ENQUEUE,
    ENQUEUE_SHARED,
    Action,
    PreparedBranch,
    Xid,
    decode_branch,
    encode_branch,
    xid_key,
)
from basaltmq.messages.stored import StoredMessage
from basaltmq.queues.transactions import branch_table
from basaltmq.queues.transactions.xa_states import BranchState
from basaltmq.transactions import xa
from basaltmq.transactions.transaction import Transaction

XID = Xid(1, b"global", b"branch")
OTHER = Xid(1, b"global", b"other")


@pytest.fixture(params=["memory", "rocks"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "store" if request.param == "rocks" else None)
    yield made
    made.close()


def ended(world: World, xid: Xid = XID) -> tuple[StoredMessage, StoredMessage]:
    """A branch that brings one message to queue A and takes another from queue C, ended."""
    old, fresh = world.put(QUEUE_C), world.finished(b"fresh")
    branch = world.xa.start(xid, "s")
    branch.enqueue("s", QUEUE_A, fresh)
    branch.enqueue("s", QUEUE_B, fresh)
    branch.dequeue("s", QUEUE_C, old.id)
    world.xa.end(xid, "s")
    return old, fresh


@pytest.mark.spec("A6")
@pytest.mark.promise("P1", "P2")
def test_a_prepared_branch_survives_and_holds_what_it_will_do(world: World) -> None:
    old, fresh = ended(world)
    world.store.watch()
    assert not world.xa.prepare(XID).read_only
    assert len(world.store.batches) == 1
    for _ in range(2):
        assert world.xa.recover() == [XID]
        assert world.entries() == [(QUEUE_C, old.id)]
        assert world.messages.get_content(fresh.id) == b"fresh"
        with pytest.raises(EntryLockedError):
            Transaction(world.messages).dequeue(QUEUE_C, old.id)
        world.reopen()
    world.store.watch()
    outcome = world.xa.commit(XID)
    assert len(world.store.batches) == 1
    assert outcome.committed
    assert outcome.actions == [
        Action(ENQUEUE, QUEUE_A, fresh.id),
        Action(ENQUEUE, QUEUE_B, fresh.id),
        Action(DEQUEUE, QUEUE_C, old.id),
    ]
    world.reopen()
    assert world.entries() == [(QUEUE_A, fresh.id), (QUEUE_B, fresh.id)]
    assert world.xa.recover() == []
    assert len(world.messages.locks) == 0


@pytest.mark.spec("A6")
@pytest.mark.promise("P2")
@pytest.mark.parametrize("reopen", [False, True])
@pytest.mark.parametrize("prepare", [False, True])
def test_a_rollback_gives_everything_back(world: World, prepare: bool, reopen: bool) -> None:
    old, fresh = ended(world)
    if prepare:
        world.xa.prepare(XID)
    if reopen:
        world.reopen()
    if prepare or not reopen:
        assert not world.xa.rollback(XID).committed
    with pytest.raises(UnknownXidError, match=str(XID)):
        world.xa.rollback(XID)
    families = [family for family, _ in world.rows()]
    assert families == ["message_metadata", "message_content", "queue_entries"]
    assert world.entries() == [(QUEUE_C, old.id)]
    with pytest.raises(MessageNotFoundError):
        world.messages.get_message(fresh.id)
    with Transaction(world.messages) as transaction:
        transaction.dequeue(QUEUE_C, old.id)
        transaction.commit()


@pytest.mark.spec("A6")
@pytest.mark.promise("P2")
def test_one_phase_is_one_batch(world: World) -> None:
    _, fresh = ended(world)
    world.store.watch()
    assert world.xa.commit(XID, one_phase=True).committed
    assert len(world.store.batches) == 1
    assert world.entries() == [(QUEUE_A, fresh.id), (QUEUE_B, fresh.id)]
    assert world.xa.state(XID) is BranchState.ABSENT
    assert fresh.is_stored


@pytest.mark.spec("A6", "C6")
@pytest.mark.promise("P2")
@pytest.mark.parametrize("step", ["prepare", "one_phase", "commit", "rollback", "decide", "forget"])
def test_a_step_the_store_refuses_changes_nothing_and_can_be_made_again(world: World, step: str) -> None:
    ended(world)
    steps: dict[str, Callable[[], object]] = {
        "prepare": lambda: world.xa.prepare(XID),
        "one_phase": lambda: world.xa.commit(XID, one_phase=True),
        "commit": lambda: world.xa.commit(XID),
        "rollback": lambda: world.xa.rollback(XID),
        "decide": lambda: world.xa.decide(XID, commit=True),
        "forget": lambda: world.xa.forget(XID),
    }
    if step not in ("prepare", "one_phase"):
        world.xa.prepare(XID)
    if step == "forget":
        world.xa.decide(XID, commit=False)
    before, state = world.rows(), world.xa.state(XID)
    world.store.watch(fail_at=0)
    with pytest.raises(StoreStalledError):
        steps[step]()
    assert (world.rows(), world.xa.state(XID)) == (before, state)
    steps[step]()
    assert len(world.store.batches) == 1
    assert world.rows() != before


@pytest.mark.spec("A6")
def test_a_branch_without_changes_votes_read_only_and_is_gone(world: World) -> None:
    world.xa.start(XID, "s")
    world.xa.end(XID, "s")
    world.store.watch()
    assert world.xa.prepare(XID).read_only
    assert world.store.batches == []
    with pytest.raises(UnknownXidError):
        world.xa.commit(XID)


@pytest.mark.spec("A6")
def test_sessions_join_suspend_resume_and_end(world: World) -> None:
    branch = world.xa.start(XID, "one")
    assert world.xa.start(XID, "two", join=True) is branch
    branch.enqueue("two", QUEUE_A, world.finished())
    world.xa.end(XID, "one", suspend=True)
    with pytest.raises(XaProtocolError, match="the session is suspended"):
        branch.enqueue("one", QUEUE_A, world.finished())
    other = world.xa.start(OTHER, "one")
    other.enqueue("one", QUEUE_B, world.finished())
    with pytest.raises(XaProtocolError, match=f"works in branch {OTHER}"):
        world.xa.start(XID, "one", resume=True)
    world.xa.end(OTHER, "one")
    world.xa.start(XID, "one", resume=True)
    branch.enqueue("one", QUEUE_A, world.finished())
    world.xa.end(XID, "one")
    with pytest.raises(XaProtocolError, match="1 sessions in it"):
        world.xa.prepare(XID)
    world.xa.end(XID, "two")
    world.xa.prepare(XID)
    world.xa.commit(XID)
    world.xa.commit(OTHER, one_phase=True)
    assert [queue for queue, _ in world.entries()] == [QUEUE_A, QUEUE_A, QUEUE_B]


@pytest.mark.spec("A6")
@pytest.mark.parametrize("step", ["prepare", "commit", "rollback"])
def test_a_failed_branch_can_only_be_rolled_back(world: World, step: str) -> None:
    old, fresh = world.put(QUEUE_C), world.finished()
    branch = world.xa.start(XID, "s")
    world.xa.start(XID, "t", join=True)
    branch.enqueue("s", QUEUE_A, fresh)
    branch.dequeue("s", QUEUE_C, old.id)
    world.xa.end(XID, "s", fail=True)
    with pytest.raises(XaProtocolError, match="to be rolled back"):
        branch.enqueue("t", QUEUE_A, world.finished())
    world.xa.end(XID, "t")
    if step == "rollback":
        world.xa.rollback(XID)
    else:
        doomed: Callable[[], object] = lambda: world.xa.commit(XID, one_phase=True)  # noqa: E731
        if step == "prepare":
            doomed = lambda: world.xa.prepare(XID)  # noqa: E731
        with pytest.raises(XaRolledBackError, match="was rolled back"):
            doomed()
    assert world.xa.state(XID) is BranchState.ABSENT
    assert world.entries() == [(QUEUE_C, old.id)]
    assert len(world.messages.locks) == 0


@pytest.mark.spec("A6")
def test_what_a_lost_session_had_not_ended_is_rolled_back(world: World) -> None:
    old = world.put(QUEUE_C)
    world.xa.start(XID, "s").dequeue("s", QUEUE_C, old.id)
    world.xa.end(XID, "s", suspend=True)
    world.xa.start(OTHER, "s")
    world.xa.start(OTHER, "t", join=True)
    world.xa.release("s")
    assert world.xa.state(XID) is BranchState.ABSENT
    assert world.xa.state(OTHER) is BranchState.ROLLBACK_ONLY
    assert len(world.messages.locks) == 0
    world.xa.start(XID, "s")


@pytest.mark.spec("A6")
@pytest.mark.parametrize("commit", [True, False])
def test_an_operators_decision_is_carried_out_and_remembered_until_forgotten(world: World, commit: bool) -> None:
    old, fresh = ended(world)
    world.xa.prepare(XID)
    world.store.watch()
    assert world.xa.decide(XID, commit=commit).committed is commit
    assert len(world.store.batches) == 1
    expected = [(QUEUE_A, fresh.id), (QUEUE_B, fresh.id)] if commit else [(QUEUE_C, old.id)]
    told = XaHeuristicCommitError if commit else XaHeuristicRollbackError
    for _ in range(2):
        assert world.entries() == expected
        assert world.xa.recover() == [XID]
        assert len(world.messages.locks) == 0
        for step in (world.xa.commit, world.xa.rollback):
            with pytest.raises(told, match="forget"):
                step(XID)
        with pytest.raises(XidInUseError):
            world.xa.start(XID, "s")
        world.reopen()
    world.xa.forget(XID)
    world.reopen()
    assert world.xa.recover() == []
    with pytest.raises(UnknownXidError):
        world.xa.forget(XID)


@pytest.mark.spec("A6")
def test_an_entry_that_is_not_there_fails_the_prepare_and_rolls_back(world: World) -> None:
    old = world.put(QUEUE_C)
    branch = world.xa.start(XID, "s")
    branch.dequeue("s", QUEUE_C, old.id)
    branch.dequeue("s", QUEUE_C, 999)
    world.xa.end(XID, "s")
    with pytest.raises(XaRolledBackError, match="message 999 is not in queue"):
        world.xa.prepare(XID)
    assert world.xa.state(XID) is BranchState.ABSENT
    assert len(world.messages.locks) == 0
    assert world.entries() == [(QUEUE_C, old.id)]


@pytest.mark.spec("A6")
def test_a_branch_may_take_what_it_brought(world: World) -> None:
    fresh = world.finished()
    branch = world.xa.start(XID, "s")
    branch.enqueue("s", QUEUE_A, fresh)
    branch.dequeue("s", QUEUE_A, fresh.id)
    world.xa.end(XID, "s")
    world.xa.prepare(XID)
    world.xa.commit(XID)
    assert world.entries() == []


@pytest.mark.spec("A6")
def test_a_message_stored_before_outlives_the_rollback(world: World) -> None:
    message = world.put(QUEUE_C)
    world.xa.start(XID, "s").enqueue("s", QUEUE_A, message)
    world.xa.end(XID, "s")
    world.xa.prepare(XID)
    world.reopen()
    world.xa.rollback(XID)
    assert world.messages.get_content(message.id) == b"content"
    assert world.entries() == [(QUEUE_C, message.id)]


@pytest.mark.spec("A6")
def test_a_message_of_a_prepared_branch_can_go_nowhere_else(world: World) -> None:
    _, fresh = ended(world)
    world.xa.prepare(XID)
    for reopen in (False, True):
        if reopen:
            world.reopen()
        for handle in (fresh, world.messages.get_message(fresh.id)):
            with pytest.raises(TransactionError, match="belongs to another"):
                Transaction(world.messages).enqueue(QUEUE_C, handle)
            with pytest.raises(TransactionError, match="belongs to another"):
                Transaction(world.messages).remove(handle)
        fresh = world.messages.get_message(fresh.id)
    world.xa.commit(XID)
    assert world.messages.owners == {}
    with Transaction(world.messages) as transaction:
        transaction.enqueue(QUEUE_C, fresh)
        transaction.commit()


@pytest.mark.spec("A6")
def test_large_content_spilled_ahead_goes_with_a_rollback(world: World) -> None:
    with patch.object(stored, "SPILL_BYTES", 64):
        writer = world.messages.add_message(b"")
        writer.add_content(b"x" * (3 << 17))
        large = writer.finish()
    world.xa.start(XID, "s").enqueue("s", QUEUE_A, large)
    world.xa.end(XID, "s")
    world.xa.prepare(XID)
    world.reopen()
    assert world.messages.get_message(large.id).get_content() == b"x" * (3 << 17)
    world.xa.rollback(XID)
    assert world.rows() == {}


@pytest.mark.spec("A6")
def test_wrong_orders_and_unknown_branches_are_refused_by_name(world: World) -> None:
    for call in (world.xa.prepare, world.xa.commit, world.xa.rollback, world.xa.forget):
        with pytest.raises(UnknownXidError, match=str(XID)):
            call(XID)
    with pytest.raises(UnknownXidError):
        world.xa.start(XID, "s", join=True)
    with pytest.raises(UnknownXidError):
        world.xa.end(XID, "s")
    with pytest.raises(XaInvalidError, match="exclude"):
        world.xa.start(XID, "s", join=True, resume=True)
    branch = world.xa.start(XID, "s")
    with pytest.raises(XidInUseError, match="join it"):
        world.xa.start(XID, "t")
    with pytest.raises(XaProtocolError, match="not part of it"):
        branch.enqueue("t", QUEUE_A, world.finished())
    with pytest.raises(XaInvalidError, match="exclude"):
        world.xa.end(XID, "s", suspend=True, fail=True)
    with pytest.raises(XaProtocolError, match="sessions in it"):
        world.xa.commit(XID, one_phase=True)
    branch.enqueue("s", QUEUE_A, world.finished())
    world.xa.end(XID, "s")
    for wrong in (world.xa.commit, world.xa.forget):
        with pytest.raises(XaProtocolError, match="is ended"):
            wrong(XID)
    world.xa.prepare(XID)
    for again in (world.xa.prepare, world.xa.forget):
        with pytest.raises(XaProtocolError, match="is prepared"):
            again(XID)
    with pytest.raises(XaProtocolError, match="is prepared"):
        world.xa.commit(XID, one_phase=True)
    with pytest.raises(XaProtocolError, match="is prepared"):
        world.xa.start(XID, "s", join=True)
    world.xa.commit(XID)


@pytest.mark.spec("A6")
@pytest.mark.parametrize(
    "xid",
    [
        Xid(-1, b"g", b"b"),
        Xid(1 << 63, b"g", b"b"),
        Xid(1, b"", b"b"),
        Xid(1, b"g" * 65, b"b"),
        Xid(1, b"g", b"b" * 65),
        Xid(1, "g", b"b"),  # type: ignore[arg-type]
        Xid("1", b"g", b"b"),  # type: ignore[arg-type]
    ],
)
def test_an_xid_beyond_what_xopen_allows_is_refused(xid: Xid) -> None:
    world = World()
    with pytest.raises(XaInvalidError, match="xid's"):
        world.xa.start(xid, "s")
    world.close()


@pytest.mark.spec("A6")
@pytest.mark.promise("P8")
def test_limits_on_branches_and_actions_are_refused_by_name() -> None:
    world = World()
    with patch.object(xa, "ACTIONS_MAX", 1), patch.object(branch_table, "BRANCHES_MAX", 1):
        branch = world.xa.start(XID, "s")
        branch.enqueue("s", QUEUE_A, world.finished())
        with pytest.raises(LimitExceededError, match="1 actions"):
            branch.enqueue("s", QUEUE_A, world.finished())
        with pytest.raises(LimitExceededError, match="1 branches"):
            world.xa.start(OTHER, "t")
    world.close()


@pytest.mark.spec("A6")
@pytest.mark.promise("P1")
def test_steps_on_a_loop_resolve_when_durable_and_exclude_each_other(world: World) -> None:
    _, fresh = ended(world)

    async def run() -> None:
        preparing = world.xa.prepare_async(XID)
        with pytest.raises(XaProtocolError, match="taking a step"):
            world.xa.rollback_async(XID)
        assert not (await asyncio.wait_for(preparing, 30)).read_only
        world.store.watch(fail_at=0)
        with pytest.raises(StoreStalledError):
            await asyncio.wait_for(world.xa.commit_async(XID), 30)
        assert (await asyncio.wait_for(world.xa.commit_async(XID), 30)).committed
        world.xa.start(OTHER, "s")
        world.xa.end(OTHER, "s")
        assert not (await asyncio.wait_for(world.xa.rollback_async(OTHER), 30)).committed

    asyncio.run(run())
    world.reopen()
    assert world.entries() == [(QUEUE_A, fresh.id), (QUEUE_B, fresh.id)]


@pytest.mark.spec("A7")
def test_a_visit_of_branches_stops_when_told(world: World) -> None:
    for xid in (XID, OTHER):
        ended(world, xid)
        world.xa.prepare(xid)
    seen: list[Xid] = []

    def stop(branch: PreparedBranch) -> bool:
        seen.append(branch.xid)
        return False

    world.messages.visit_distributed_transactions(stop)
    assert len(seen) == 1


@pytest.mark.spec("A6")
@given(
    st.builds(Xid, st.integers(0, (1 << 63) - 1), st.binary(min_size=1, max_size=64), st.binary(max_size=64)),
    st.integers(1, 3),
    st.integers(0, (1 << 64) - 1),
    st.lists(
        st.builds(
            Action, st.sampled_from([ENQUEUE, ENQUEUE_SHARED, DEQUEUE]), st.uuids(), st.integers(0, (1 << 64) - 1)
        ),
        max_size=5,
    ),
)
def test_branch_records_round_trip_and_refuse_truncation(
    xid: Xid, state: int, decided_ms: int, actions: list[Action]
) -> None:
    raw = encode_branch(state, decided_ms, actions)
    assert decode_branch(xid_key(xid), raw) == PreparedBranch(xid, state, decided_ms, actions)
    for size in range(len(raw)):
        with pytest.raises(CorruptionError, match="the record of branch"):
            decode_branch(xid_key(xid), raw[:size])
    for at, wrong in ((0, 9), (1, 0), (1, 4)):
        with pytest.raises(CorruptionError):
            decode_branch(xid_key(xid), raw[:at] + bytes([wrong]) + raw[at + 1 :])
    if actions:
        with pytest.raises(CorruptionError, match="unknown kind"):
            decode_branch(xid_key(xid), raw[:14] + b"\x09" + raw[15:])


@pytest.mark.spec("A6", "C5")
def test_errors_carry_xopens_numbers() -> None:
    numbers = {error.code: error.xa_code for error in XaError.__subclasses__()}
    assert numbers == {
        "xa_unknown_xid": -4,
        "xa_invalid": -5,
        "xa_protocol": -6,
        "xa_duplicate_xid": -8,
        "xa_rolled_back": 100,
        "xa_heuristic_commit": 7,
        "xa_heuristic_rollback": 6,
    }
    assert branches.XID_PART_BYTES_MAX == 64


@pytest.mark.spec("A6")
def test_a_step_asked_for_without_a_loop_leaves_the_branch_as_it_was(world: World) -> None:
    ended(world)
    with pytest.raises(RuntimeError, match="no running event loop"):
        world.xa.prepare_async(XID)
    assert not world.xa.prepare(XID).read_only
    with pytest.raises(RuntimeError, match="no running event loop"):
        world.xa.commit_async(XID)
    assert world.xa.commit(XID).committed


@pytest.mark.spec("A6")
def test_what_a_prepared_branch_brought_cannot_be_removed_under_it(world: World) -> None:
    _, fresh = ended(world)
    world.xa.prepare(XID)
    for _ in range(2):
        with pytest.raises(TransactionError, match="belongs to a prepared branch"):
            world.messages.remove(world.messages.get_message(fresh.id))
        world.reopen()
    world.xa.commit(XID)
    assert world.messages.get_content(fresh.id) == b"fresh"
