"""Embedded transactions and branches: by queue name or object, in `with` blocks, from threads and tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.embedded.queue_rig import payloads

import basaltmq
from basaltmq.embedded.database import Basalt
from basaltmq.embedded.transaction import Transaction
from basaltmq.errors import InvalidArgumentError, StaleLeaseError, XaRolledBackError
from basaltmq.queues.draft import Draft
from basaltmq.queues.transactions.transaction import State
from basaltmq.queues.transactions.xid import Xid

X = Xid(7, b"g", b"b")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Basalt]:
    with basaltmq.open(tmp_path / "data") as opened:
        opened.queue("in").enqueue(["one", "two", "three"])
        opened.queue("out", priorities_max=5)
        yield opened


@pytest.mark.spec("A5")
def test_with_block_commits_atomically(db: Basalt) -> None:
    (outside,) = db.queue("in").lease()
    with db.transaction() as tx:
        (inside,) = tx.dequeue(db.queue("in"))
        assert inside.text() == "two"
        assert tx.ack(outside) == 1
        tx.enqueue("out", "answer", priority=3)
        tx.enqueue("out", ["more", Draft(payload=b"most", priority=5)])
        assert db.queue("out").peek() == []
    assert outside.settled
    assert inside.settled
    assert len(tx.ids) == 3
    assert payloads(db.queue("out").lease(5)) == [b"most", b"answer", b"more"]
    assert payloads(db.queue("in").lease(5)) == [b"three"]


@pytest.mark.spec("A5")
def test_with_block_that_raises_changes_nothing(db: Basalt) -> None:
    def fails(tx: Transaction) -> None:
        with tx:
            tx.dequeue("in", 2)
            tx.enqueue("out", b"x")
            raise ZeroDivisionError

    tx = db.transaction()
    with pytest.raises(ZeroDivisionError):
        fails(tx)
    assert tx.state is State.ABORTED
    assert db.queue("out").peek() == []
    assert payloads(db.queue("in").lease(5)) == [b"one", b"two", b"three"]


@pytest.mark.spec("A5")
def test_async_with_block_commits_and_aborts(db: Basalt) -> None:
    async def work() -> None:
        async with db.transaction() as tx:
            tx.dequeue("in")
            tx.enqueue("out", b"x")
        assert tx.state is State.COMMITTED
        (held,) = db.queue("in").lease()
        late = db.transaction()
        late.dequeue("in")
        late.ack(held)
        db.queue("in").release(held)
        with pytest.raises(StaleLeaseError):
            async with late:
                pass
        assert late.state is State.ABORTED

    asyncio.run(work())
    assert payloads(db.queue("out").lease(5)) == [b"x"]
    assert payloads(db.queue("in").lease(5)) == [b"two", b"three"]


@pytest.mark.spec("A6")
def test_prepared_branch_survives_reopening_and_commits(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.queue("in").enqueue(["one", "two"])
        db.queue("out")
        with db.xa.begin(X) as session:
            session.dequeue("in")
            session.enqueue("out", "answer")
        assert not db.xa.prepare(X).read_only
    with basaltmq.open(tmp_path / "data") as db:
        assert db.xa.recover() == [X]
        assert [doubt.held for doubt in db.xa.in_doubt()] == [1]
        assert payloads(db.queue("in").lease(5)) == [b"two"]
        db.xa.commit(X)
        assert payloads(db.queue("out").lease(5)) == [b"answer"]


@pytest.mark.spec("A6")
def test_session_block_that_raises_makes_the_branch_rollback_only(db: Basalt) -> None:
    def fails() -> None:
        with db.xa.begin(X) as session:
            session.dequeue("in")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with pytest.raises(XaRolledBackError):
        db.xa.prepare(X)
    assert len(db.queue("in").lease(5)) == 3


def test_invalid_queues_messages_and_waits_are_refused(db: Basalt) -> None:
    tx = db.transaction()
    with pytest.raises(InvalidArgumentError, match="must be a name"):
        tx.enqueue(5, b"x")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="lease returned"):
        tx.ack(b"x")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="wait"):
        tx.dequeue("in", wait=-1)
    tx.abort()
