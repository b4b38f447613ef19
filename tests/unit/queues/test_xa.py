"""Branches of distributed transactions over queues: restarts and X/Open errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.queues.conftest import Clock, Planes, TestStore, payloads, settle

from basaltmq.durability import Durability
from basaltmq.errors import (
    CorruptionError,
    QueueHeldError,
    StaleLeaseError,
    StoreStalledError,
    UnknownXidError,
    XaHeuristicCommitError,
    XaHeuristicRollbackError,
    XaInvalidError,
    XaProtocolError,
    XaRolledBackError,
    XidInUseError,
)
from basaltmq.pipeline.audit.queues import audit_queues
from basaltmq.queues.config import Overflow, QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.branch_rows import BranchRow, Hold, decode_branch, encode_branch
from basaltmq.queues.transactions.xa import parse_xid
from basaltmq.queues.transactions.xid import Xid, xid_key
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp

pytestmark = pytest.mark.spec("A6")

X = Xid(1, b"global", b"branch")
Y = Xid(2, b"other", b"")
Make = Callable[..., str]
BIG = b"b" * 9000


@pytest.fixture
def queues(make: Make, plane: QueuePlane) -> None:
    make("in", visibility_timeout_ms=1000, attempts_max=2)
    make("out")
    plane.enqueue("in", [b"1", b"2", b"3"])


def prepared(plane: QueuePlane, xid: Xid = X) -> None:
    """Start a branch that acks the first message of `in` and enqueues two in `out`."""
    session = plane.xa.begin(xid)
    assert [d.payload for d in session.dequeue("in")] == [b"1"]
    session.enqueue("out", [b"a", Draft(payload=BIG, fairness_key="k", delay_ms=0)])
    session.end()
    assert not plane.xa.prepare(xid).read_only


def nothing_of_branches(store: TestStore) -> bool:
    return not store.rows(Family.XIDS) and not store.rows(Family.BRANCH_DRAFTS)


@pytest.mark.promise("P2")
@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("restart", [False, True])
def test_prepared_branch_holds_its_messages_until_commit(
    planes: Planes, plane: QueuePlane, clock: Clock, store: TestStore, restart: bool
) -> None:
    prepared(plane)
    if restart:
        plane = planes.open()
    assert plane.xa.recover() == [X]
    clock.pass_ms(3_600_000)
    settle(plane, clock)
    plane.purge("out")
    assert [d.payload for d in plane.lease("in", 9, visibility_ms=3_600_000)] == [b"2", b"3"]
    assert plane.stats("in")["leased"] == 3
    assert plane.stats("in")["failed"] == 0
    assert plane.lease("out", 9) == []
    before = len(store.batches)
    plane.xa.commit(X)
    assert len(store.batches) == before + 1
    assert plane.stats("in")["leased"] == 2
    assert plane.stats("in")["acked"] == 1
    assert sorted(payloads(plane, "out")) == [b"a", BIG]
    assert plane.xa.recover() == []
    assert nothing_of_branches(store)
    with pytest.raises(UnknownXidError):
        plane.xa.commit(X)


@pytest.mark.promise("P3")
@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("restart", [False, True])
def test_rollback_returns_held_messages_and_discards_drafts(
    planes: Planes, plane: QueuePlane, store: TestStore, restart: bool
) -> None:
    prepared(plane)
    if restart:
        plane = planes.open()
    plane.xa.rollback(X)
    found = plane.lease("in", 9)
    assert [(d.payload, d.attempts) for d in found] == [(b"1", 0), (b"2", 0), (b"3", 0)]
    assert payloads(plane, "out") == []
    assert nothing_of_branches(store)
    assert store.rows(Family.MESSAGE_CONTENT) == []


@pytest.mark.usefixtures("queues")
def test_lease_token_from_before_prepare_is_refused(plane: QueuePlane) -> None:
    held = plane.lease("in", 2, consumer="somebody")
    session = plane.xa.begin(X)
    session.ack("in", held[0].token, [held[0].id])
    session.end()
    plane.xa.prepare(X)
    for answer in (plane.ack, plane.nack, plane.release):
        with pytest.raises(StaleLeaseError):
            answer("in", held[0].token, [held[0].id])
    assert plane.release("in", held[0].token) == 1
    assert [d.payload for d in plane.lease("in", 9)] == [b"2", b"3"]
    plane.xa.rollback(X)
    assert [d.payload for d in plane.lease("in", 9)] == [b"1"]


@pytest.mark.usefixtures("queues")
def test_branch_whose_lease_expired_before_prepare_is_rolled_back(plane: QueuePlane, clock: Clock) -> None:
    session = plane.xa.begin(X)
    session.dequeue("in")
    session.enqueue("out", [b"a"])
    session.end()
    clock.pass_ms(1001)
    settle(plane, clock)
    with pytest.raises(XaRolledBackError, match="lease"):
        plane.xa.prepare(X)
    with pytest.raises(UnknownXidError):
        plane.xa.rollback(X)
    assert payloads(plane, "out") == []
    assert payloads(plane, "in") == [b"1", b"2", b"3"]


@pytest.mark.usefixtures("queues")
def test_one_phase_writes_no_record_and_empty_branch_is_read_only(plane: QueuePlane, store: TestStore) -> None:
    session = plane.xa.begin(X)
    session.dequeue("in")
    session.enqueue("out", [b"a"])
    session.end()
    before = len(store.batches)
    plane.xa.commit(X, one_phase=True)
    assert len(store.batches) == before + 1
    assert payloads(plane, "out") == [b"a"]
    plane.xa.begin(Y).end()
    assert plane.xa.prepare(Y).read_only
    assert plane.xa.recover() == []
    with pytest.raises(UnknownXidError):
        plane.xa.commit(Y)


@pytest.mark.usefixtures("queues")
def test_unprepared_branch_releases_its_leases(plane: QueuePlane) -> None:
    session = plane.xa.begin(X)
    session.dequeue("in", 2)
    session.end()
    plane.xa.rollback(X)
    assert len(plane.lease("in", 9)) == 3


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("commit", [True, False])
def test_heuristic_decision_is_kept_until_forget(planes: Planes, plane: QueuePlane, commit: bool) -> None:
    prepared(plane)
    plane.xa.decide(X, commit=commit)
    assert sorted(m.payload for m in plane.browse("out")) == ([b"a", BIG] if commit else [])
    plane = planes.open()
    wrong = XaHeuristicCommitError if commit else XaHeuristicRollbackError
    for step in (plane.xa.commit, plane.xa.rollback):
        with pytest.raises(wrong):
            step(X)
    (doubt,) = plane.xa.in_doubt()
    assert (doubt.xid, doubt.queues, doubt.held, doubt.to_enqueue) == (X, [], 0, 0)
    plane.delete("out")
    plane.xa.forget(X)
    assert plane.xa.recover() == planes.open().xa.recover() == []


@pytest.mark.usefixtures("queues")
def test_verbs_in_wrong_order_raise_their_errors(plane: QueuePlane) -> None:
    xa = plane.xa
    for step in (xa.prepare, xa.commit, xa.rollback, xa.forget):
        with pytest.raises(UnknownXidError):
            step(X)
    with pytest.raises(XaInvalidError):
        xa.begin(Xid(1, b"", b""))
    session = xa.begin(X)
    with pytest.raises(XidInUseError):
        xa.begin(X)
    for early in (xa.prepare, xa.commit, xa.rollback):
        with pytest.raises(XaProtocolError):
            early(X)
    session.enqueue("out", [b"a"])
    session.end(suspend=True)
    with pytest.raises(XaProtocolError):
        session.enqueue("out", [b"b"])
    session.resume()
    other = xa.begin(X, join=True)
    other.enqueue("out", [b"b"])
    session.end()
    with pytest.raises(XaProtocolError, match="sessions"):
        xa.prepare(X)
    other.end()
    with pytest.raises(XaProtocolError):
        xa.commit(X)
    xa.prepare(X)
    for late in (xa.prepare, xa.forget, lambda xid: xa.commit(xid, one_phase=True)):
        with pytest.raises(XaProtocolError):
            late(X)
    with pytest.raises(XaProtocolError):
        xa.begin(X, join=True)
    xa.commit(X)
    assert payloads(plane, "out") == [b"a", b"b"]


@pytest.mark.usefixtures("queues")
def test_failed_or_lost_session_makes_its_branch_rollback_only(plane: QueuePlane) -> None:
    session = plane.xa.begin(X)
    session.dequeue("in")
    session.end(fail=True)
    with pytest.raises(XaRolledBackError):
        plane.xa.prepare(X)
    gone = plane.xa.begin(Y)
    gone.dequeue("in")
    gone.enqueue("out", [b"a"])
    plane.xa.release(gone)
    with pytest.raises(UnknownXidError):
        plane.xa.prepare(Y)
    assert payloads(plane, "in") == [b"1", b"2", b"3"]


@pytest.mark.spec("C13")
@pytest.mark.usefixtures("queues")
def test_prepared_branch_prevents_deletion_of_its_queues(
    planes: Planes, plane: QueuePlane, clock: Clock, make: Make
) -> None:
    make("goes", expires_ms=1000)
    session = plane.xa.begin(X)
    session.dequeue("in")
    session.enqueue("goes", [b"a"])
    session.end()
    plane.xa.prepare(X)
    for opened in (plane, planes.open()):
        for name in ("in", "goes"):
            with pytest.raises(QueueHeldError, match="1:676c6f62616c:6272616e6368"):
                opened.delete(name)
        clock.pass_ms(5000)
        settle(opened, clock)
        assert opened.stats("goes")["ready"] == 0
    opened.xa.commit(X)
    assert payloads(opened, "goes") == [b"a"]
    clock.pass_ms(5000)
    settle(opened, clock)
    assert "goes" not in {config.name for config in opened.configs()}
    opened.delete("in")


@pytest.mark.spec("E7")
def test_limits_and_scripts_apply_at_prepare_and_commit_cannot_fail(plane: QueuePlane, make: Make) -> None:
    make("full", length_max=1, overflow=Overflow.REJECT_PUBLISH)
    make("head", length_max=2)
    make("keyed", on_enqueue_script='function on_enqueue(msg) return {fairness_key = "from script"} end')
    plane.enqueue("head", [b"old", b"older"])
    session = plane.xa.begin(X)
    session.enqueue("full", [b"promised"])
    session.enqueue("head", [b"new"])
    session.enqueue("keyed", [b"k"])
    session.end()
    plane.xa.prepare(X)
    plane.enqueue("full", [b"faster"])
    late = plane.xa.begin(Y)
    late.enqueue("full", [b"late"])
    late.end()
    with pytest.raises(XaRolledBackError, match="full"):
        plane.xa.prepare(Y)
    plane.xa.commit(X)
    assert payloads(plane, "full") == [b"faster", b"promised"]
    assert payloads(plane, "head") == [b"older", b"new"]
    assert plane.browse("keyed")[0].fairness_key == "from script"


def test_duplicate_dedup_id_is_dropped_at_commit(plane: QueuePlane, make: Make) -> None:
    make("once", dedup_window_ms=60_000)
    session = plane.xa.begin(X)
    session.enqueue("once", [Draft(payload=b"promised", dedup_id=b"1")])
    session.end()
    plane.xa.prepare(X)
    plane.enqueue("once", [Draft(payload=b"faster", dedup_id=b"1")])
    plane.xa.commit(X)
    assert payloads(plane, "once") == [b"faster"]
    assert plane.stats("once")["duplicates"] == 1


@pytest.mark.usefixtures("queues")
def test_failed_step_can_be_repeated(plane: QueuePlane, store: TestStore) -> None:
    session = plane.xa.begin(X)
    session.dequeue("in")
    session.enqueue("out", [b"a"])
    session.end()
    for step in (plane.xa.prepare, plane.xa.commit):
        store.refuse = 1
        with pytest.raises(StoreStalledError):
            step(X)
        step(X)
    assert payloads(plane, "out") == [b"a"]
    assert plane.stats("in")["leased"] == 0


@pytest.mark.spec("E10")
def test_unloaded_queue_keeps_held_messages(planes: Planes) -> None:
    plane = planes.open(loaded_max=1)
    for name in ("in", "out", "x", "y"):
        plane.create(QueueConfig(name=name))
    plane.enqueue("in", [b"1", b"2"])
    prepared(plane)
    for name in ("x", "y") * 20:
        plane.enqueue(name, [b"-"])
    assert plane._loaded.peek("out") is None
    assert [d.payload for d in plane.lease("in", 9)] == [b"2"]
    plane.xa.commit(X)
    assert sorted(payloads(plane, "out")) == [b"a", BIG]


def test_xid_text_round_trips() -> None:
    assert parse_xid(str(X)) == X
    assert parse_xid(str(Y)) == Y
    for text in ("", "1:2", "a:b:c", "1:zz:", "1:67:62:63"):
        with pytest.raises(UnknownXidError, match="format:global:branch"):
            parse_xid(text)


def test_branch_rows_round_trip_and_damage_is_reported(planes: Planes, plane: QueuePlane, make: Make) -> None:
    row = BranchRow(X, 1, 5, 7, [Hold("in", 9, 2), Hold("in", 10, 1)], ["in", "out"])
    raw = encode_branch(row)
    assert decode_branch(xid_key(X), raw) == row
    for damaged in (raw[:-1], raw + b"x", b"\2" + raw[1:], raw[:1] + b"\7" + raw[2:], b""):
        with pytest.raises(CorruptionError, match=str(X)):
            decode_branch(xid_key(X), damaged)
    make("out")
    session = plane.xa.begin(X)
    session.enqueue("out", [b"a", b"b"])
    session.end()
    plane.xa.prepare(X)
    (first, _) = planes.store.rows(Family.BRANCH_DRAFTS)
    batch: Any = Batch()
    batch.delete(Family.BRANCH_DRAFTS, first)
    planes.store.write(batch)
    plane.xa.commit(X)
    assert payloads(plane, "out") == [b"b"]
    (record,) = plane.damage.records()
    assert (record.family, record.key, record.is_missing) == ("branch_drafts", first, True)


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_prepare_writes_a_lease_row_for_a_hold(planes: Planes, plane: QueuePlane, restart: bool, commit: bool) -> None:
    held = plane.lease("in", 2, consumer="somebody", visibility_ms=0)
    session = plane.xa.begin(X)
    session.ack("in", held[0].token, [held[0].id])
    session.end()
    plane.xa.prepare(X)
    if restart:
        plane = planes.open()
    free = [b"2", b"3"] if restart else [b"3"]
    assert [d.payload for d in plane.lease("in", 9, visibility_ms=0)] == free
    (plane.xa.commit if commit else plane.xa.rollback)(X)
    assert [d.payload for d in plane.lease("in", 9)] == ([] if commit else [b"1"])
    assert plane.stats("in")["messages"] == (2 if commit else 3)


@pytest.mark.spec("E3", "E4")
@pytest.mark.promise("P2")
@pytest.mark.parametrize("commit", [True, False])
def test_large_payload_for_many_queues_is_written_once(
    planes: Planes, plane: QueuePlane, make: Make, clock: Clock, store: TestStore, commit: bool
) -> None:
    names = ["a", "b", "again", "late", "memory"]
    for name in names[:2]:
        make(name)
    make("again", dedup_window_ms=60_000)
    make("late")
    plane.create(QueueConfig(name="memory", durability=Durability.MEMORY))
    plane.enqueue("again", [Draft(payload=b"first", dedup_id=b"x")])
    session = plane.xa.begin(X)
    session.enqueue("a", [b"small", BIG])
    session.enqueue("b", [BIG, Draft(payload=BIG, priority=1)])
    session.enqueue("again", [Draft(payload=BIG, dedup_id=b"x")])
    session.enqueue("late", [Draft(payload=BIG, delay_ms=50, transient=True)])
    session.enqueue("memory", [BIG])
    session.end()
    plane.xa.prepare(X)
    assert list(audit_queues(store)) == []
    plane = planes.open()
    assert len(store.rows(Family.MESSAGE_CONTENT)) == 1
    assert all(len(row) < 200 for _, row in store.scan(Family.BRANCH_DRAFTS))
    if not commit:
        plane.xa.rollback(X)
        assert nothing_of_branches(store)
        assert store.rows(Family.MESSAGE_CONTENT) == store.rows(Family.CONTENT_REFS) == []
        assert [payloads(plane, name) for name in names] == [[], [], [b"first"], [], []]
        return
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        plane.xa.commit(X)
    assert len(store.rows(Family.CONTENT_REFS)) == 1
    plane.xa.commit(X)
    operations = [op for batch in store.batches for op in batch.ops]
    written = [value for _, family, _, value in operations if family is Family.MESSAGE_CONTENT]
    assert written == [BIG]
    assert nothing_of_branches(store)
    assert list(audit_queues(store)) == []
    clock.pass_ms(51)
    settle(plane, clock)
    assert len(store.rows(Family.CONTENT_REFS)) == 4
    found = {name: payloads(plane, name) for name in names}
    assert found == {"a": [b"small", BIG], "b": [BIG, BIG], "again": [b"first"], "late": [BIG], "memory": [BIG]}
    assert store.rows(Family.MESSAGE_CONTENT) == store.rows(Family.CONTENT_REFS) == []


def test_draft_with_inline_payload_of_an_older_version_is_enqueued(
    planes: Planes, plane: QueuePlane, make: Make, store: TestStore
) -> None:
    make("out")
    session = plane.xa.begin(X)
    session.enqueue("out", [BIG])
    session.end()
    plane.xa.prepare(X)
    batch = Batch()
    for family in (Family.MESSAGE_CONTENT, Family.CONTENT_REFS):
        batch.delete(family, store.rows(family)[0])
    (key,) = store.rows(Family.BRANCH_DRAFTS)
    batch.put(Family.BRANCH_DRAFTS, key, lp("out") + msgspec.msgpack.encode(Draft(payload=BIG)))
    store.write(batch)
    plane = planes.open()
    plane.xa.commit(X)
    assert payloads(plane, "out") == [BIG]
    assert store.rows(Family.MESSAGE_CONTENT) == []
