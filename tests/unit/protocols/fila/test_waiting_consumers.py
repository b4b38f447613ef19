"""Distribution of messages: the least loaded consumer first, no starvation, and no loss if a caller disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from basaltmq.durability import Durability
from basaltmq.errors import AccessRefusedError, QueueNotFoundError
from basaltmq.protocols.grpc.services.waiting_consumers import LOAD_SOFT_MAX, PushConsumer, WaitingConsumers
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit


class Bench:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.commit = GroupCommit(self.store)
        self.plane = QueuePlane(self.store, self.commit)
        self.plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
        self.consumers = WaitingConsumers(self.plane, asyncio.get_running_loop())

    def fill(self, count: int) -> None:
        self.plane.enqueue("q", [b"%d" % i for i in range(count)])

    def push_consumer(self, load: int = 0) -> PushConsumer:
        push_consumer = PushConsumer()
        push_consumer.load = load
        self.consumers.join("q", push_consumer)
        return push_consumer

    def take(
        self, count: int = 1, push_consumer: PushConsumer | None = None, timeout_s: float | None = None
    ) -> asyncio.Task[list[Delivery]]:
        return asyncio.create_task(
            self.consumers.take(
                "q", count, consumer="c", push_consumer=push_consumer, visibility_ms=0, timeout_s=timeout_s
            )
        )


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def inside() -> None:
        bench = Bench()
        try:
            await asyncio.wait_for(test(bench), 30)
        finally:
            bench.plane.close()
            bench.commit.close()

    asyncio.run(inside())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_lease_returns_ready_messages_or_waits_for_new_ones() -> None:
    async def test(bench: Bench) -> None:
        bench.fill(3)
        assert len(await bench.take(2)) == 2
        assert len(await bench.take(2)) == 1
        assert await bench.take(timeout_s=0) == []
        waiting = bench.take()
        await turns()
        assert not waiting.done()
        bench.fill(1)
        assert len(await waiting) == 1

    run(test)


def test_a_wait_ends_at_its_timeout() -> None:
    async def test(bench: Bench) -> None:
        assert await bench.take(timeout_s=0.01) == []
        bench.fill(1)
        assert len(await bench.take()) == 1, "who left the line takes nothing"

    run(test)


def test_the_least_loaded_client_is_served_first() -> None:
    async def test(bench: Bench) -> None:
        busy, idle = bench.push_consumer(load=10), bench.push_consumer(load=0)
        first, second = bench.take(1, busy), bench.take(1, idle)
        await turns()
        bench.fill(1)
        await turns()
        assert second.done()
        assert not first.done()
        bench.fill(1)
        assert len(await first) == 1

    run(test)


def test_a_client_at_its_limit_waits_only_while_another_has_room() -> None:
    async def test(bench: Bench) -> None:
        full, other = bench.push_consumer(load=LOAD_SOFT_MAX), bench.push_consumer(load=5)
        waiting = bench.take(1, full)
        bench.fill(1)
        await turns()
        assert not waiting.done(), "the other will come for it"
        other.load = LOAD_SOFT_MAX
        bench.consumers.load_decreased("q")
        assert len(await waiting) == 1

    run(test)


def test_leases_without_wait_get_messages_of_clients_at_their_limit() -> None:
    async def test(bench: Bench) -> None:
        full, _ = bench.push_consumer(load=LOAD_SOFT_MAX), bench.push_consumer(load=5)
        waiting = bench.take(1, full)
        bench.fill(1)
        await turns()
        assert len(await bench.take(1, timeout_s=0)) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(test)


def test_a_lease_without_wait_yields_to_waiting_consumers() -> None:
    async def test(bench: Bench) -> None:
        waiting = bench.take()
        await turns()
        bench.fill(1)
        assert await bench.take(1, timeout_s=0) == []
        assert len(await waiting) == 1

    run(test)


def test_a_client_that_takes_nothing_does_not_delay_others() -> None:
    async def test(bench: Bench) -> None:
        full, stuck = bench.push_consumer(load=LOAD_SOFT_MAX), bench.push_consumer(load=1)
        waiting = bench.take(1, full)
        bench.fill(1)
        await turns()
        assert not waiting.done()
        stuck.is_stalled = True
        bench.consumers.load_decreased("q")
        assert len(await waiting) == 1

    run(test)


def test_a_single_consumer_is_not_limited() -> None:
    async def test(bench: Bench) -> None:
        alone = bench.push_consumer(load=10 * LOAD_SOFT_MAX)
        bench.fill(1)
        assert len(await bench.take(1, alone)) == 1

    run(test)


def test_waiting_consumers_share_new_messages() -> None:
    async def test(bench: Bench) -> None:
        waiting = [bench.take(100, bench.push_consumer()) for _ in range(4)]
        await turns()
        bench.fill(40)
        shares = [len(each) for each in await asyncio.gather(*waiting)]
        assert sum(shares) == 40
        assert min(shares) >= 10

    run(test)


@pytest.mark.spec("C7")
def test_messages_of_a_cancelled_caller_are_requeued() -> None:
    async def test(bench: Bench) -> None:
        push_consumer = bench.push_consumer()
        waiting = bench.take(5, push_consumer)
        await turns()
        bench.fill(5)
        # The waiter is served in this turn and cancelled before its task runs.
        while bench.plane.stats("q")["leased"] == 0:
            await asyncio.sleep(0)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert bench.plane.stats("q")["ready"] == 5

    run(test)


def test_a_cancelled_caller_does_not_block_the_next_one() -> None:
    async def test(bench: Bench) -> None:
        first, second = bench.take(), bench.take()
        await turns()
        first.cancel()
        await turns()
        bench.fill(1)
        assert len(await second) == 1

    run(test)


def test_a_deleted_queue_ends_every_wait() -> None:
    async def test(bench: Bench) -> None:
        waiting = [bench.take(), bench.take(1, bench.push_consumer())]
        await turns()
        bench.plane.delete("q")
        for each in waiting:
            with pytest.raises(QueueNotFoundError):
                await each

    run(test)


def test_a_refused_client_stops_waiting() -> None:
    async def test(bench: Bench) -> None:
        push_consumer = bench.push_consumer()
        waiting, other = bench.take(1, push_consumer), bench.take()
        await turns()
        bench.consumers.refuse("q", push_consumer, AccessRefusedError("no more"))
        with pytest.raises(AccessRefusedError):
            await waiting
        bench.fill(1)
        assert len(await other) == 1

    run(test)


def test_queues_without_waiters_keep_no_state() -> None:
    async def test(bench: Bench) -> None:
        push_consumer = bench.push_consumer()
        await bench.take(timeout_s=0.01)
        assert bench.consumers.push_consumers("q") == 1
        bench.consumers.leave("q", push_consumer)
        assert bench.consumers.push_consumers("q") == 0
        assert bench.consumers._by_queue == {}
        assert "q" not in bench.plane._waiters

    run(test)
