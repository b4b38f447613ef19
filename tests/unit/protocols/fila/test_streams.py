"""Consume streams: holders of messages, expired leases, and clients that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from basaltmq.durability import Durability
from basaltmq.errors import AuthenticationError, MessageNotFoundError, QueueNotFoundError, StoreClosedError
from basaltmq.protocols.grpc.services import waiting_consumers as consumers
from basaltmq.protocols.grpc.services.access import KeyCaller
from basaltmq.protocols.grpc.services.api_keys import ApiKeys
from basaltmq.protocols.grpc.services.fila import consume_streams as module
from basaltmq.protocols.grpc.services.fila.consume_streams import AckFrom, ConsumeStreams
from basaltmq.protocols.grpc.services.waiting_consumers import WaitingConsumers
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.leases.delivery import Delivery
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.memory import MemoryStore
from basaltmq.store.sync.group_commit import GroupCommit

Deliveries = AsyncGenerator[Delivery, None]


class Bench:
    def __init__(self, ack_from: AckFrom, visibility_ms: int) -> None:
        self.store = MemoryStore()
        self.commit = GroupCommit(self.store)
        self.plane = QueuePlane(self.store, self.commit)
        self.plane.create(QueueConfig(name="q", durability=Durability.WRITTEN, visibility_timeout_ms=visibility_ms))
        loop = asyncio.get_running_loop()
        self.consumers = WaitingConsumers(self.plane, loop)
        self.streams = ConsumeStreams(self.plane, self.consumers, loop, ack_from=ack_from)
        self.keys = ApiKeys(self.store)
        self.key, _ = self.keys.create("all", is_superadmin=True)

    def caller(self, peer: str) -> KeyCaller:
        return KeyCaller(self.keys, self.key, peer)

    def consume(self, peer: str) -> Deliveries:
        return self.streams.consume("q", self.caller(peer))

    def fill(self, count: int, size: int = 1) -> None:
        self.plane.enqueue("q", [bytes(size)] * count)

    def ack(self, peer: str, message_id: bytes) -> None:
        self.streams.settle("q", message_id, self.caller(peer), lambda token: self.plane.ack("q", token, [message_id]))

    def counts(self) -> tuple[int, int]:
        stats = self.plane.stats("q")
        return stats["ready"], stats["leased"]


def run(
    test: Callable[[Bench], Awaitable[None]], *, ack_from: AckFrom = "holder", visibility_ms: int = 3_600_000
) -> None:
    async def inside() -> None:
        bench = Bench(ack_from, visibility_ms)
        try:
            await asyncio.wait_for(test(bench), 30)
        finally:
            bench.plane.close()
            bench.commit.close()

    asyncio.run(inside())


@pytest.mark.spec("C7")
def test_a_message_with_an_expired_lease_belongs_to_the_next_consumer() -> None:
    async def test(bench: Bench) -> None:
        bench.fill(1)
        slow, fast = bench.consume("slow"), bench.consume("fast")
        first = await anext(slow)
        second = await anext(fast)
        assert (second.id, second.attempts) == (first.id, 1)
        with pytest.raises(MessageNotFoundError, match="not leased to this connection"):
            bench.ack("slow", first.id)
        bench.ack("fast", second.id)
        assert bench.counts() == (0, 0)
        with pytest.raises(MessageNotFoundError):
            bench.ack("fast", second.id)
        for each in (slow, fast):
            await each.aclose()

    run(test, visibility_ms=50)


def test_any_connection_may_acknowledge_if_configured() -> None:
    async def test(bench: Bench) -> None:
        bench.fill(1)
        stream = bench.consume("one")
        bench.ack("another", (await anext(stream)).id)
        assert bench.counts() == (0, 0)
        await stream.aclose()

    run(test, ack_from="any")


@pytest.mark.spec("C7")
def test_a_stream_that_ends_releases_its_messages_and_is_removed() -> None:
    async def test(bench: Bench) -> None:
        bench.fill(5)
        stream = bench.consume("one")
        held = [await anext(stream) for _ in range(3)]
        bench.ack("one", held[0].id)
        await stream.aclose()
        assert bench.counts() == (4, 0)
        assert (len(bench.streams), bench.streams.held, bench.consumers.push_consumers("q")) == (0, 0, 0)
        with pytest.raises(MessageNotFoundError):
            bench.ack("one", held[1].id)

    run(test)


def test_unsent_messages_of_a_client_that_does_not_read_are_requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.05)

    async def test(bench: Bench) -> None:
        bench.fill(10)
        stuck = bench.consume("stuck")
        # Leases have 1, 2, 4 ... messages as their size becomes known. Of the third lease, one message is sent.
        for _ in range(4):
            await anext(stuck)
        assert bench.counts() == (3, 7)
        other = bench.consume("other")
        for _ in range(6):
            await anext(other)
        assert bench.counts() == (0, 10), "all but the four that were sent"
        for each in (stuck, other):
            await each.aclose()
        assert bench.counts() == (10, 0)

    run(test)


def test_a_client_that_does_not_read_does_not_delay_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.05)
    monkeypatch.setattr(consumers, "LOAD_SOFT_MAX", 2)

    async def test(bench: Bench) -> None:
        stuck, busy = bench.consume("stuck"), bench.consume("busy")
        bench.fill(1)
        await anext(stuck)
        for _ in range(3):
            bench.fill(1)
            await anext(busy)
        assert bench.counts() == (0, 4), "the third only when the other was seen to be stuck"
        for each in (stuck, busy):
            await each.aclose()

    run(test)


def test_few_large_messages_are_leased_at_a_time() -> None:
    async def test(bench: Bench) -> None:
        bench.fill(20, size=400_000)
        stream = bench.consume("one")
        most = 0
        for _ in range(6):
            bench.ack("one", (await anext(stream)).id)
            most = max(most, bench.counts()[1])
        assert most <= 2
        await stream.aclose()

    run(test)


def test_streams_end_with_their_queue_their_key_or_the_server() -> None:
    async def test(bench: Bench) -> None:
        key, text = bench.keys.create("worker", is_superadmin=True)
        keyed = bench.streams.consume("q", KeyCaller(bench.keys, bench.keys.authenticate(text), "keyed"))
        waiting = asyncio.ensure_future(anext(keyed))
        await asyncio.sleep(0.01)
        bench.keys.watch(bench.streams.recheck)
        bench.keys.revoke(key.id)
        with pytest.raises(AuthenticationError):
            await waiting
        waiting = asyncio.ensure_future(anext(bench.consume("plain")))
        await asyncio.sleep(0.01)
        bench.plane.delete("q")
        with pytest.raises(QueueNotFoundError):
            await waiting
        bench.plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
        waiting = asyncio.ensure_future(anext(bench.consume("plain")))
        await asyncio.sleep(0.01)
        bench.streams.close()
        with pytest.raises(StoreClosedError, match="stopping"):
            await waiting
        assert len(bench.streams) == 0

    run(test)
