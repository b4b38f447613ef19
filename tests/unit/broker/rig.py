"""A virtual host on a store in memory, with publishers and consumers that record their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.message import properties
from basaltmq.broker.message.amqp_table import Table
from basaltmq.broker.message.properties import Properties
from basaltmq.broker.vhost import ACK, Settlement, VHost
from basaltmq.errors import StorageError, StoreStalledError
from basaltmq.store.batch import Batch
from basaltmq.store.memory import MemoryStore

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000
TURNS = 200
"""Turns of the loop for work that needs several."""

PERSISTENT = b"\x10\0\2"
TRANSIENT = b"\x10\0\1"

T = TypeVar("T")


class Clock:
    """A manual clock in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def __call__(self) -> int:
        return self.now_ns

    def pass_ms(self, ms: float) -> None:
        self.now_ns += int(ms * MS)


class BrokenStore(MemoryStore):
    """A store in memory that stalls or fails on request, and counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.stall = False
        self.fail_write = False
        self.fail_sync = False
        self.hold_sync: Callable[[], None] | None = None
        self.batches: list[Batch] = []

    def write(self, batch: Batch, *, wal: bool = True, wait_ms: int | None = None) -> None:
        if self.stall:
            raise StoreStalledError("the test stalls")
        if self.fail_write:
            raise StorageError("the test breaks the disk")
        self.batches.append(batch)
        super().write(batch, wal=wal, wait_ms=wait_ms)

    def sync(self) -> None:
        if self.hold_sync is not None:
            self.hold_sync()
        if self.fail_sync:
            raise StorageError("the test breaks the sync")
        super().sync()


class FakePublisher:
    """Records returns and confirms in their order."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, Any]] = []

    def returned(self, exchange: str, routing_key: str, properties: bytes, body: bytes, number: int) -> None:
        self.reported.append(("returned", (exchange, routing_key, body)))

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        self.reported += [("ack" if ok else "nack", number) for number in numbers]

    def numbers(self, kind: str = "ack") -> list[int]:
        return [number for what, number in self.reported if what == kind]


class FakeSink:
    """Records deliveries, and acknowledges them on request."""

    def __init__(self, vhost: VHost, *, ack: bool = False) -> None:
        self.vhost = vhost
        self.ack = ack
        self.got: list[Any] = []
        self.by_tag: dict[str, list[bytes]] = {}
        self.cancels: list[str] = []
        self.batches = 0

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        self.batches += 1
        self.got += deliveries
        self.by_tag.setdefault(consumer.tag, []).extend(each.payload for each in deliveries)
        if self.ack:
            self.vhost.settle([settlement(consumer.queue.name, each) for each in deliveries])
            consumer.credit(len(deliveries))

    def cancelled(self, consumer: Consumer) -> None:
        self.cancels.append(consumer.tag)

    def payloads(self) -> list[bytes]:
        return [each.payload for each in self.got]


def settlement(queue: str, delivery: Any, outcome: str = ACK) -> Settlement:
    return Settlement(queue, delivery.token, [delivery.id], outcome)


def props(headers: Table | None = None, **fields: Any) -> bytes:
    """Return encoded properties, persistent by default."""
    made = Properties(**{"delivery_mode": 2, **fields})
    if headers is not None:
        made.set_headers(headers)
    return properties.encode(made)


def headers_of(delivery: Any) -> Table:
    return properties.parse(properties.decode_envelope(delivery.properties)[2]).headers


async def turns(count: int = TURNS) -> None:
    """Run the loop for some turns. Threads that sync can run, too."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(done: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition, with a timeout."""

    async def wait() -> None:
        while not done():  # noqa: ASYNC110  (what is waited for has no event of its own)
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), timeout_s)


def run(
    test: Callable[[VHost], Awaitable[T]], store: MemoryStore | None = None, clock: Callable[[], int] | None = None
) -> T:
    """Run a test on an open virtual host, then close it."""

    async def whole() -> T:
        vhost = VHost("/", store or MemoryStore(), clock_ns=clock or Clock())
        vhost.start()
        try:
            return await test(vhost)
        finally:
            await vhost.close()

    return asyncio.run(whole())


def publish(
    vhost: VHost, publisher: FakePublisher, key: str, *bodies: bytes, exchange: str = "", first: int = 1
) -> None:
    for index, body in enumerate(bodies):
        vhost.publish(publisher, exchange, key, PERSISTENT, body, number=first + index)


def drain(vhost: VHost, queue: str) -> list[Any]:
    """Consume and acknowledge all ready messages."""
    found = []
    while (got := vhost.get(queue)) is not None:
        found.append(got[0])
        vhost.settle([settlement(queue, got[0])])
    return found
