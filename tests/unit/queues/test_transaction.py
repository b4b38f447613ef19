"""Transactions over queues: one batch, invisible before the commit, no effect after an abort."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
from tests.unit.queues.conftest import Clock, Planes, TestStore, payloads

from basaltmq.errors import (
    InvalidArgumentError,
    LimitExceededError,
    QueueFullError,
    QueueNotFoundError,
    StaleLeaseError,
    StoreStalledError,
    TransactionError,
)
from basaltmq.queues.config import Overflow
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions import work
from basaltmq.queues.transactions.transaction import State
from basaltmq.store.families import Family

pytestmark = pytest.mark.spec("A5")

Make = Callable[..., str]


@pytest.fixture
def queues(make: Make, plane: QueuePlane) -> None:
    make("in", visibility_timeout_ms=1000)
    make("out")
    plane.enqueue("in", [b"1", b"2", b"3"])


@pytest.mark.promise("P2")
@pytest.mark.usefixtures("queues")
def test_enqueues_and_acks_of_several_queues_are_one_batch(plane: QueuePlane, store: TestStore) -> None:
    (held,) = plane.lease("in")
    tx = plane.transaction()
    tx.enqueue("out", [b"a"])
    assert tx.ack("in", held.token) == 1
    tx.enqueue("in", [Draft(payload=b"b" * 9000)])
    assert tx.ids == []
    assert plane.stats("out")["ready"] == 0
    before = len(store.batches)
    ids = tx.commit()
    assert len(store.batches) == before + 1
    assert tx.state is State.COMMITTED
    assert ids == tx.ids
    assert ids == [plane.browse("out")[0].id, plane.browse("in")[-1].id]
    assert payloads(plane, "in") == [b"2", b"3", b"b" * 9000]
    assert payloads(plane, "out") == [b"a"]


@pytest.mark.usefixtures("queues")
def test_with_block_commits_and_aborts_on_error(plane: QueuePlane) -> None:
    with plane.transaction() as tx:
        assert [d.payload for d in tx.dequeue("in", 2)] == [b"1", b"2"]
        tx.enqueue("out", [b"a"])
    assert plane.stats("in")["acked"] == 2
    tx = plane.transaction()

    def fails() -> None:
        with tx:
            assert [d.payload for d in tx.dequeue("in", 2)] == [b"3"]
            tx.enqueue("out", [b"b"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert tx.state is State.ABORTED
    assert payloads(plane, "in") == [b"3"]
    assert payloads(plane, "out") == [b"a"]


@pytest.mark.promise("P3")
@pytest.mark.usefixtures("queues")
def test_abort_returns_dequeued_messages_and_keeps_other_leases(plane: QueuePlane) -> None:
    (outside,) = plane.lease("in", consumer="somebody")
    tx = plane.transaction()
    tx.ack("in", outside.token)
    tx.dequeue("in", 5)
    assert plane.stats("in")["leased"] == 3
    tx.abort()
    tx.abort()
    assert plane.stats("in")["leased"] == 1
    assert plane.ack("in", outside.token) == 1
    again = plane.lease("in", 5)
    assert [(d.payload, d.attempts) for d in again] == [(b"2", 0), (b"3", 0)]


@pytest.mark.promise("P4")
@pytest.mark.usefixtures("queues")
def test_commit_after_lease_expiry_changes_nothing(plane: QueuePlane, clock: Clock) -> None:
    (held,) = plane.lease("in")
    tx = plane.transaction()
    tx.ack("in", held.token)
    tx.enqueue("out", [b"a"])
    clock.pass_ms(1001)
    plane.run_due()
    with pytest.raises(StaleLeaseError):
        tx.commit()
    assert tx.state is State.OPEN
    tx.abort()
    assert plane.stats("out")["ready"] == 0
    assert payloads(plane, "in") == [b"1", b"2", b"3"]


@pytest.mark.usefixtures("queues")
def test_full_queue_refuses_the_whole_transaction(plane: QueuePlane, make: Make) -> None:
    for number, overflow in enumerate((Overflow.REJECT_PUBLISH, Overflow.REJECT_PUBLISH_DEAD_LETTER)):
        full = make(f"full-{number}", length_max=1, overflow=overflow, dead_letter_queue="dead")
        tx = plane.transaction()
        tx.dequeue("in")
        tx.enqueue("out", [b"a"])
        tx.enqueue(full, [b"b", b"c"])
        with pytest.raises(QueueFullError):
            tx.commit()
        tx.abort()
        assert plane.stats(full)["ready"] == 0
    assert plane.stats("dead")["ready"] == 0
    assert plane.stats("out")["ready"] == 0
    assert payloads(plane, "in") == [b"1", b"2", b"3"]


@pytest.mark.usefixtures("queues")
def test_acks_make_room_for_enqueues_of_the_same_transaction(plane: QueuePlane, make: Make) -> None:
    make("small", length_max=1, overflow=Overflow.REJECT_PUBLISH)
    plane.enqueue("small", [b"x"])
    with plane.transaction() as tx:
        tx.enqueue("small", [b"y"])
        tx.dequeue("small")
    assert payloads(plane, "small") == [b"y"]


@pytest.mark.usefixtures("queues")
def test_commit_can_be_retried_after_a_write_stall(plane: QueuePlane, store: TestStore) -> None:
    tx = plane.transaction()
    tx.dequeue("in")
    tx.enqueue("out", [b"a"])
    store.refuse = 1
    with pytest.raises(StoreStalledError):
        tx.commit()
    assert tx.state is State.OPEN
    assert plane.stats("out")["ready"] == 0
    tx.commit()
    assert payloads(plane, "out") == [b"a"]
    assert payloads(plane, "in") == [b"2", b"3"]


@pytest.mark.usefixtures("queues")
def test_invalid_operations_are_refused_at_once(plane: QueuePlane) -> None:
    (held,) = plane.lease("in")
    tx = plane.transaction()
    tx.ack("in", held.token)
    with pytest.raises(TransactionError, match="acked twice"):
        tx.ack("in", held.token, [held.id])
    with pytest.raises(StaleLeaseError):
        tx.ack("in", held.token + 1)
    with pytest.raises(StaleLeaseError):
        tx.ack("in", held.token, [bytes(16)])
    with pytest.raises(QueueNotFoundError):
        tx.enqueue("none", [b"x"])
    with pytest.raises(QueueNotFoundError):
        tx.dequeue("none")
    with pytest.raises(InvalidArgumentError):
        tx.enqueue("out", ["text"])  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError):
        tx.enqueue("out", [Draft(payload=b"", ttl_ms=-1)])
    with pytest.raises(LimitExceededError):
        tx.enqueue("out", [b""] * 10_001)
    with patch.object(work, "MESSAGES_MAX", 3), pytest.raises(LimitExceededError, match="begin another"):
        tx.enqueue("out", [b""] * 4)
    tx.commit()
    for late in (tx.commit, lambda: tx.enqueue("out", [b"x"]), lambda: tx.dequeue("in"), tx.abort):
        with pytest.raises(TransactionError, match="is committed"):
            late()
    with plane.change(), pytest.raises(TransactionError):
        plane.transaction().enqueue("out", [b"x"])
    assert payloads(plane, "out") == []


@pytest.mark.promise("P2")
@pytest.mark.usefixtures("queues")
def test_open_transaction_leaves_nothing_after_a_restart(planes: Planes, plane: QueuePlane) -> None:
    tx = plane.transaction()
    tx.dequeue("in", 2, visibility_ms=0)
    tx.enqueue("out", [b"a" * 9000])
    again = planes.open()
    again.run_due()
    assert payloads(again, "out") == []
    assert sorted(payloads(again, "in")) == [b"1", b"2", b"3"]
    assert planes.store.rows(Family.MESSAGE_CONTENT) == []
