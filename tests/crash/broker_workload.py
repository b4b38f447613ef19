"""Workload of a child on a virtual host until it is killed, and the checks in its successors.

A label `queue:number` names a message in the queue it was routed to. A rejected message is in `dead`, and its history
names the original queue.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.crash.harness import Emit

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.message import properties
from basaltmq.broker.vhost import ACK, REJECT, REQUEUE, Settlement, VHost
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore

QUEUES = ("a", "b")
STREAM = "s"
PERSISTENT = b"\x10\0\2"
IN_FLIGHT_MAX = 60


def open_vhost(path: str) -> tuple[RocksStore, VHost]:
    store = open_store(Path(path))
    vhost = VHost("/", store, path=Path(path))
    vhost.start()
    vhost.declare_queue("dead", durable=True)
    vhost.declare_exchange("all", "fanout")
    for name in QUEUES:
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        vhost.declare_queue(name, durable=True, arguments=arguments)
        vhost.bind_queue(name, "all", "")
    vhost.declare_queue(STREAM, durable=True, arguments={"x-queue-type": "stream"})
    return store, vhost


class Client:
    """Publishes and consumes at random, and reports each step."""

    def __init__(self, emit: Emit, vhost: VHost, seed: int) -> None:
        self.emit = emit
        self.vhost = vhost
        self.random = random.Random(seed)
        self.seed = seed
        self.number = 0
        self.labels: dict[int, list[str]] = {}
        self.held: list[tuple[str, Any]] = []
        self.consumers: list[Consumer] = []
        self.acking: list[str] = []

    def returned(self, *reported: object) -> None:
        raise AssertionError(f"every message has a route: {reported}")

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        assert ok
        self.emit("confirmed " + " ".join(label for number in numbers for label in self.labels.pop(number)))

    def cancelled(self, consumer: Consumer) -> None:
        raise AssertionError("no queue is deleted")

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        self.held += [(consumer.queue.name, each) for each in deliveries]

    def publish(self) -> None:
        self.number += 1
        text = f"{self.seed}.{self.number}"
        exchange, key, names = self.random.choice(
            [("all", "", QUEUES), ("", "a", ("a",)), ("", "b", ("b",)), ("", STREAM, (STREAM,)), ("own", "k", ())]
        )
        if exchange == "own":
            # A queue declared just before. A confirm implies that the queue is durable too.
            names = (f"own-{text}",)
            self.vhost.declare_exchange("own", "direct")
            self.vhost.declare_queue(names[0], durable=True)
            key = text
            self.vhost.bind_queue(names[0], "own", key)
        body = text.encode().ljust(self.random.choice([20, 300, 6000]), b" ")
        self.labels[self.number] = [f"{name}:{text}" for name in names]
        self.emit("try " + " ".join(self.labels[self.number]))
        self.vhost.publish(self, exchange, key, PERSISTENT, body, number=self.number, mandatory=True)

    def settle(self) -> None:
        while self.held and self.random.random() < 0.8:
            name, delivery = self.held.pop(self.random.randrange(len(self.held)))
            outcome = self.random.choice([ACK, ACK, ACK, REQUEUE, REJECT])
            if outcome == ACK:
                label = f"{name}:{delivery.payload.decode().strip()}"
                self.emit("acking " + label)
                self.acking.append(label)
            self.vhost.settle([Settlement(name, delivery.token, [delivery.id], outcome)])
            for consumer in self.consumers:
                if consumer.queue.name == name:
                    consumer.credit(1)

    async def go_on(self) -> None:
        for name in QUEUES:
            self.consumers.append(self.vhost.subscribe(name, self, tag=name, prefetch=5))
        while True:
            for _ in range(self.random.randrange(6)):
                if len(self.labels) < IN_FLIGHT_MAX:
                    self.publish()
            self.settle()
            await asyncio.sleep(self.random.choice([0, 0, 0.001]))
            if not self.vhost.tick.gathered and self.acking:
                self.emit("acked " + " ".join(self.acking))
                self.acking = []


def run(emit: Emit, path: str, seed: int) -> None:
    async def whole() -> None:
        _, vhost = open_vhost(path)
        emit("opened")
        await Client(emit, vhost, seed).go_on()

    asyncio.run(whole())


class Finder:
    """Reads a stream from its beginning."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        self.found += [f"{STREAM}:{each.payload.decode().strip()}" for each in deliveries]
        consumer.credit(len(deliveries))

    def cancelled(self, consumer: Consumer) -> None:
        raise AssertionError("no queue is deleted")


def check(emit: Emit, path: str) -> None:
    """Report all messages, and check that counts and rows agree."""

    async def whole() -> None:
        store, vhost = open_vhost(path)
        for queue in list(vhost.queues):
            if queue.is_stream:
                finder = Finder()
                vhost.subscribe(queue.name, finder, tag="c", prefetch=100, arguments={"x-stream-offset": "first"})
                depth = vhost.queues.ready(queue)
                while len(finder.found) < depth:  # noqa: ASYNC110  (the test itself is bounded)
                    await asyncio.sleep(0.001)
                emit(" ".join(["found", *finder.found]))
                continue
            labels = []
            while (got := vhost.get(queue.name)) is not None:
                delivery = got[0]
                headers = properties.parse(properties.decode_envelope(delivery.properties)[2]).headers
                origin = headers.get("x-first-death-queue", queue.name)
                labels.append(f"{origin}:{delivery.payload.decode().strip()}")
                vhost.settle([Settlement(queue.name, delivery.token, [delivery.id], ACK)])
            emit(" ".join(["found", *labels]))
            vhost.declare_queue(queue.name, passive=True)
            assert vhost.counts(queue)["messages"] == 0, vhost.counts(queue)
        await vhost.close()
        store.close()

    asyncio.run(whole())
