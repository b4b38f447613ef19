"""A transaction is all or nothing, in one batch, and says so when it is used in the wrong order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

import pytest
from tests.fixtures.messages_world import QUEUE_A, QUEUE_B, QUEUE_C, World

from basaltmq.errors import (
    EntryLockedError,
    InvalidArgumentError,
    LimitExceededError,
    MessageNotFoundError,
    StorageError,
    StoreOverfullError,
    StoreStalledError,
    TransactionError,
)
from basaltmq.messages import locks, stored
from basaltmq.transactions import transaction as module
from basaltmq.transactions.transaction import State, Transaction


@pytest.fixture(params=["memory", "rocks"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "store" if request.param == "rocks" else None)
    yield made
    made.close()


@pytest.mark.spec("A5")
@pytest.mark.promise("P1", "P2")
def test_a_commit_is_one_batch_over_all_families_and_survives(world: World) -> None:
    old = world.put(QUEUE_C)
    messages = [world.finished(bytes([at]) * 10) for at in range(3)]
    transaction = Transaction(world.messages)
    for message in messages:
        transaction.enqueue(QUEUE_A, message)
        transaction.enqueue(QUEUE_B, message)
    transaction.dequeue(QUEUE_C, old.id)
    transaction.remove(old)
    world.store.watch()
    before = world.rows()
    assert world.entries() == [(QUEUE_C, old.id)]
    transaction.commit()
    assert len(world.store.batches) == 1
    assert world.rows() != before
    world.reopen()
    ids = [message.id for message in messages]
    assert world.entries() == [(queue, each) for queue in (QUEUE_A, QUEUE_B) for each in ids]
    assert [world.messages.get_content(each) for each in ids] == [bytes([at]) * 10 for at in range(3)]
    with pytest.raises(MessageNotFoundError):
        world.messages.get_message(old.id)


@pytest.mark.spec("A5", "C6")
@pytest.mark.promise("P2")
def test_a_commit_the_store_refuses_changes_nothing_and_can_be_made_again(world: World) -> None:
    old = world.put(QUEUE_C)
    transaction = Transaction(world.messages)
    transaction.enqueue(QUEUE_A, world.finished())
    transaction.dequeue(QUEUE_C, old.id)
    before = world.rows()
    world.store.watch(fail_at=0)
    with pytest.raises(StoreStalledError):
        transaction.commit()
    assert world.rows() == before
    assert transaction.state is State.OPEN
    with pytest.raises(EntryLockedError):
        Transaction(world.messages).dequeue(QUEUE_C, old.id)
    transaction.commit()
    assert [queue for queue, _ in world.entries()] == [QUEUE_A]


@pytest.mark.spec("A5")
def test_a_commit_into_a_broken_store_leaves_a_failed_transaction(world: World) -> None:
    transaction = Transaction(world.messages)
    transaction.enqueue(QUEUE_A, world.finished())
    world.store.watch(fail_at=0)
    world.store.error = StorageError
    with pytest.raises(StorageError):
        transaction.commit()
    assert transaction.state is State.FAILED
    with pytest.raises(TransactionError, match="failed"):
        transaction.commit()
    transaction.abort()
    assert world.rows() == {}


@pytest.mark.spec("A5")
def test_an_abort_leaves_no_trace_and_frees_what_was_held(world: World) -> None:
    old = world.put(QUEUE_C)
    before = world.rows()
    with patch.object(stored, "SPILL_BYTES", 64):
        writer = world.messages.add_message(b"")
        for _ in range(3):
            writer.add_content(b"x" * (1 << 17))
        large = writer.finish()
    assert world.rows() != before
    with Transaction(world.messages) as transaction:
        transaction.enqueue(QUEUE_A, large)
        transaction.dequeue(QUEUE_C, old.id)
    assert transaction.state is State.ABORTED
    assert world.rows() == before
    transaction.abort()
    with pytest.raises(MessageNotFoundError, match="aborted"):
        Transaction(world.messages).enqueue(QUEUE_A, large)
    with Transaction(world.messages) as again:
        again.dequeue(QUEUE_C, old.id)
        again.commit()
    assert world.entries() == []


@pytest.mark.spec("A5")
def test_an_abort_goes_through_although_the_store_takes_no_write() -> None:
    world = World()
    with patch.object(stored, "SPILL_BYTES", 64):
        writer = world.messages.add_message(b"")
        writer.add_content(b"x" * (1 << 17))
        large = writer.finish()
    transaction = Transaction(world.messages)
    transaction.enqueue(QUEUE_A, large)
    world.store.watch(fail_at=0)
    transaction.abort()
    assert transaction.state is State.ABORTED
    assert [family for family, _ in world.rows()] == ["message_metadata", "message_content"]
    world.close()


@pytest.mark.spec("A5")
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_finished_transaction_refuses_everything(world: World, end: str) -> None:
    transaction = Transaction(world.messages)
    message = world.put()
    getattr(transaction, end)()
    calls: list[Callable[[], object]] = [
        lambda: transaction.enqueue(QUEUE_A, message),
        lambda: transaction.dequeue(QUEUE_A, message.id),
        lambda: transaction.remove(message),
        transaction.commit,
    ]
    for call in calls:
        with pytest.raises(TransactionError, match=f"cannot .*{end}"):
            call()
    if end == "commit":
        with pytest.raises(TransactionError, match="cannot abort"):
            transaction.abort()


@pytest.mark.spec("A5")
def test_an_entry_goes_to_one_transaction_only(world: World) -> None:
    message = world.put()
    first, second = Transaction(world.messages), Transaction(world.messages)
    first.dequeue(QUEUE_A, message.id)
    with pytest.raises(TransactionError, match="twice"):
        first.dequeue(QUEUE_A, message.id)
    with pytest.raises(EntryLockedError, match=f"message {message.id} of queue") as refused:
        second.dequeue(QUEUE_A, message.id)
    assert refused.value.retriable
    assert world.messages.locks.is_held(QUEUE_A, message.id)
    first.commit()
    assert len(world.messages.locks) == 0


@pytest.mark.spec("A5")
def test_a_message_that_is_not_stored_belongs_to_one_transaction(world: World) -> None:
    message = world.finished()
    first, second = Transaction(world.messages), Transaction(world.messages)
    first.enqueue(QUEUE_A, message)
    with pytest.raises(TransactionError, match="belongs to another"):
        second.enqueue(QUEUE_B, message)
    with pytest.raises(TransactionError, match="not stored"):
        second.remove(message)
    first.commit()
    second.enqueue(QUEUE_B, message)
    second.commit()
    assert world.entries() == [(QUEUE_A, message.id), (QUEUE_B, message.id)]


@pytest.mark.spec("A5", "A11")
def test_an_overfull_store_holds_producers_and_never_consumers() -> None:
    class Guard:
        overfull = False

    guard = Guard()
    world = World(guard=guard)
    message, waiting = world.put(), world.finished()
    transaction = Transaction(world.messages)
    guard.overfull = True
    with pytest.raises(StoreOverfullError) as held:
        transaction.enqueue(QUEUE_B, waiting)
    assert held.value.retriable
    transaction.dequeue(QUEUE_A, message.id)
    transaction.remove(message)
    transaction.commit()
    assert world.rows() == {}
    world.close()


@pytest.mark.spec("A5")
@pytest.mark.promise("P8")
def test_limits_are_refused_by_name_and_the_transaction_goes_on(world: World) -> None:
    first, second = world.put(content=b"x" * 10), world.put(content=b"x" * 10)
    transaction = Transaction(world.messages)
    with patch.object(module, "TRANSACTION_BYTES_MAX", 100):
        transaction.dequeue(QUEUE_A, first.id)
        with pytest.raises(LimitExceededError, match="begin another"):
            transaction.dequeue(QUEUE_A, second.id)
        with pytest.raises(LimitExceededError, match="begin another"):
            transaction.enqueue(QUEUE_B, world.finished())
    world.messages.locks = locks.EntryLocks(limit=0)
    with pytest.raises(LimitExceededError, match="hold 0 queue entries"):
        Transaction(world.messages).dequeue(QUEUE_A, second.id)
    transaction.commit()
    assert world.entries() == [(QUEUE_A, second.id)]


@pytest.mark.spec("A5")
@pytest.mark.parametrize("queue", ["name", None, b"x" * 16])
def test_a_queue_that_is_no_uuid_is_refused(queue: UUID) -> None:
    world = World()
    with pytest.raises(InvalidArgumentError, match="UUID"):
        Transaction(world.messages).dequeue(queue, 1)
    for wrong in (-1, 1 << 64, "1"):
        with pytest.raises(InvalidArgumentError, match="64 bits"):
            Transaction(world.messages).dequeue(QUEUE_A, wrong)  # type: ignore[arg-type]
    world.close()


@pytest.mark.spec("A5")
def test_an_empty_commit_writes_nothing(world: World) -> None:
    world.store.watch()
    Transaction(world.messages).commit()
    assert world.store.batches == []


@pytest.mark.spec("A5")
@pytest.mark.promise("P1")
def test_async_commits_of_one_turn_are_written_together_and_resolve_when_durable(world: World) -> None:
    world.put()

    async def run() -> None:
        world.store.watch()
        transactions = [Transaction(world.messages) for _ in range(10)]
        for transaction in transactions:
            transaction.enqueue(QUEUE_B, world.finished())
        futures = [transaction.commit_async() for transaction in transactions]
        assert all(transaction.state is State.COMMITTING for transaction in transactions)
        with pytest.raises(TransactionError, match="being committed"):
            transactions[0].commit_async()
        await asyncio.wait_for(asyncio.gather(*futures), 30)
        assert all(transaction.state is State.COMMITTED for transaction in transactions)
        assert len(world.store.batches) == 1
        await asyncio.wait_for(Transaction(world.messages).commit_async(), 30)

    asyncio.run(run())
    world.reopen()
    assert len(world.entries()) == 11


@pytest.mark.spec("A5")
def test_an_async_commit_that_reserves_ids_goes_through_and_one_refused_can_be_made_again() -> None:
    world = World(id_block=1)

    async def run() -> None:
        for fail in (True, False):
            transaction = Transaction(world.messages)
            transaction.enqueue(QUEUE_A, world.finished())
            if fail:
                world.store.watch(fail_at=0)
                with pytest.raises(StoreStalledError):
                    await asyncio.wait_for(transaction.commit_async(), 30)
                assert transaction.state is State.OPEN
            await asyncio.wait_for(transaction.commit_async(), 30)
            assert transaction.state is State.COMMITTED

    asyncio.run(run())
    assert len(world.entries()) == 2
    world.close()


@pytest.mark.spec("A5")
def test_cancelling_the_wait_for_a_commit_does_not_undo_it() -> None:
    world = World()
    world.put()

    async def run() -> None:
        transaction = Transaction(world.messages)
        transaction.enqueue(QUEUE_B, world.finished())
        transaction.commit_async().cancel()
        other = Transaction(world.messages)
        other.enqueue(QUEUE_B, world.finished())
        await asyncio.wait_for(other.commit_async(), 30)
        assert transaction.state is State.COMMITTED

    asyncio.run(run())
    assert len(world.entries()) == 3
    world.close()
