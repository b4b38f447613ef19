"""Embedded queues with asyncio: waits without threads, and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.unit.embedded.queue_rig import LONG_S, finish, in_background, payloads, until, waiting

import basaltmq
from basaltmq.embedded.database import Basalt
from basaltmq.embedded.queue import EmbeddedQueue
from basaltmq.errors import (
    InvalidArgumentError,
    QueueNotFoundError,
    StaleLeaseError,
)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Basalt]:
    with basaltmq.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def queue(db: Basalt) -> EmbeddedQueue:
    return db.queue("q")


def test_async_methods_match_the_sync_ones(db: Basalt) -> None:
    queue = db.queue("q", attempts_max=1, dead_letter_queue="dead")

    async def work() -> None:
        one = await queue.enqueue_async("one", headers={"a": "b"})
        ids = await queue.enqueue_async([b"two", b"three", b"four"])
        assert len(await queue.peek_async()) == 4
        messages = await queue.lease_async(4)
        assert [message.id for message in messages] == [one, *ids]
        await queue.extend_async(messages, 60_000)
        assert await queue.ack_async(messages[0]) == 1
        assert await queue.nack_async(messages[1], "no") == 1
        assert await queue.release_async(messages[2:]) == 2
        assert await queue.purge_async() == 2
        assert await db.queue("dead").redrive_async() == 1
        assert (await queue.stats_async())["ready"] == 1
        with pytest.raises(StaleLeaseError):
            await queue.ack_async(messages[0])
        with pytest.raises(InvalidArgumentError):
            await queue.enqueue_async(5)

    asyncio.run(work())


def test_waiting_async_lease_is_woken_or_times_out(queue: EmbeddedQueue) -> None:
    async def work() -> None:
        assert await queue.lease_async(wait=0.02) == []
        async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
            leases = [tasks.create_task(queue.lease_async(wait=None)) for _ in range(50)]
            await queue.enqueue_async([b"%d" % number for number in range(50)])
        assert sorted(lease.result()[0].payload for lease in leases) == sorted(b"%d" % n for n in range(50))

    asyncio.run(work())


def test_waiting_async_lease_ends_with_its_queue(db: Basalt, queue: EmbeddedQueue) -> None:
    async def work() -> None:
        lease = asyncio.create_task(queue.lease_async(wait=None))
        await asyncio.to_thread(until, lambda: waiting(db, "q") == 1)
        await asyncio.to_thread(db.delete_queue, "q")
        async with asyncio.timeout(LONG_S):
            with pytest.raises(QueueNotFoundError):
                await lease

    asyncio.run(work())


def test_cancelled_lease_takes_no_wake_up_from_others(db: Basalt, queue: EmbeddedQueue) -> None:
    async def work() -> None:
        lease = asyncio.create_task(queue.lease_async(wait=None))
        await asyncio.to_thread(until, lambda: waiting(db, "q") == 1)
        lease.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lease

    asyncio.run(work())
    until(lambda: waiting(db, "q") == 0)


def test_wake_up_of_a_cancelled_lease_is_passed_on(db: Basalt, queue: EmbeddedQueue) -> None:
    async def cancelled_at_the_same_moment() -> None:
        lease = asyncio.create_task(queue.lease_async(wait=None))
        await asyncio.to_thread(until, lambda: waiting(db, "q") == 1)
        thread, results = in_background(lambda: payloads(queue.lease(wait=LONG_S)))
        await asyncio.to_thread(until, lambda: waiting(db, "q") == 2)
        # In this thread, so that the task cannot run between the wake-up and the cancellation.
        queue.enqueue(b"x")
        lease.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lease
        await asyncio.to_thread(finish, thread)
        assert results == [[b"x"]]

    asyncio.run(cancelled_at_the_same_moment())


def test_messages_of_a_cancelled_lease_are_released(
    db: Basalt, queue: EmbeddedQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.enqueue(b"x")
    leased, go_on = threading.Event(), threading.Event()
    lease = db.queue_plane.lease

    def slow(*args: Any, **options: Any) -> Any:
        found = lease(*args, **options)
        leased.set()
        assert go_on.wait(LONG_S)
        return found

    monkeypatch.setattr(db.queue_plane, "lease", slow)

    async def work() -> None:
        task = asyncio.create_task(queue.lease_async())
        await asyncio.to_thread(leased.wait, LONG_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(work())
    until(lambda: queue.stats()["ready"] == 1)
    monkeypatch.undo()
    (message,) = queue.lease()
    assert message.attempts == 0


@pytest.mark.promise("P8")
def test_waiting_tasks_use_no_thread(db: Basalt, queue: EmbeddedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    waiters = 300

    async def work() -> None:
        executor = ThreadPoolExecutor(4)
        asyncio.get_running_loop().set_default_executor(executor)
        async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
            leases = [tasks.create_task(queue.lease_async(wait=None)) for _ in range(waiters)]
            await asyncio.to_thread(until, lambda: waiting(db, "q") == waiters)
            # All threads of the loop's executor are free.
            meet = threading.Barrier(4)
            await asyncio.gather(*(asyncio.to_thread(meet.wait, LONG_S) for _ in range(4)))
            go_on = threading.Event()
            sync = db.store.sync

            def slow() -> None:
                assert go_on.wait(LONG_S)
                sync()

            monkeypatch.setattr(db.store, "sync", slow)
            enqueues = [tasks.create_task(queue.enqueue_async(b"%d" % number)) for number in range(waiters)]
            found = await asyncio.gather(*leases)
            # All messages are delivered before any sync, and the threads are free again.
            assert not any(task.done() for task in enqueues)
            await asyncio.gather(*(asyncio.to_thread(meet.wait, LONG_S) for _ in range(4)))
            go_on.set()
        assert sorted(each[0].payload for each in found) == sorted(b"%d" % number for number in range(waiters))

    asyncio.run(work())
