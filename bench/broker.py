"""The broker above the queue plane: routing among many bindings, and the cost of a message in addition to the plane.

- topic routing: one exchange with 100,000 bindings of three words, a tenth of them with wildcards; routes are found
  without the route cache, compared with the same exchange with 100 bindings. The cost per key must not depend on the
  number of bindings.
- a message: published, routed, delivered and acknowledged through a virtual host, in turns of 50, compared with
  enqueue, lease and ack of the same messages by the plane alone; CPU time of the loop's thread, the minimum of several
  rounds.
- queues: declare, bind and delete, durable ones.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.row import Row
from bench.size import sized

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.routing.exchange import QUEUE, Destination
from basaltmq.broker.routing.topology import Topology
from basaltmq.broker.vhost import ACK, Settlement, VHost
from basaltmq.durability import Durability
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.loop_commit import LoopCommit

BINDINGS: Final = sized(100_000, 20_000)
FEW_BINDINGS: Final = 100
KEYS: Final = 5_000
MESSAGES: Final = 20_000
TURN: Final = 50
ROUNDS: Final = 5
QUEUES: Final = 2_000
BODY: Final = b"x" * 256
PERSISTENT: Final = b"\x10\0\2"
EXTRA_US_MAX: Final = 6.0
"""Maximum cost per message that the broker may add to the plane's own cost."""


def run() -> list[Row]:
    many_us, few_us = _routing(BINDINGS), _routing(FEW_BINDINGS)
    plane_us, broker_us = _messages()
    declare_us = _queues()
    return [
        Row(f"topic route among {BINDINGS:,} bindings", many_us, "us"),
        Row(f"  the same among {FEW_BINDINGS}", few_us, "us"),
        Row("  many against few", many_us / few_us, "x", "<= 5", many_us <= 5 * few_us),
        Row(f"message of {len(BODY)} B by the plane alone", plane_us, "us"),
        Row("  through a virtual host", broker_us, "us"),
        Row(
            "  beside the plane",
            broker_us - plane_us,
            "us",
            f"<= {EXTRA_US_MAX:g}",
            broker_us - plane_us <= EXTRA_US_MAX,
        ),
        Row("declare, bind and delete of a durable queue", declare_us, "us"),
    ]


def _routing(bindings: int) -> float:
    """Return microseconds per route."""
    chance = random.Random(7)
    topology = Topology(MemoryStore(), "/", has_queue=lambda name: True)
    exchange = topology.declare("x", "topic", durable=False)
    words = [f"w{number}" for number in range(max(10, int(bindings ** (1 / 3))))]
    for number in range(bindings):
        pattern = [chance.choice(words) for _ in range(3)]
        if number % 10 == 0:
            pattern[chance.randrange(3)] = chance.choice("*#")
        topology.bind("x", Destination(QUEUE, f"q{number % 1000}"), ".".join(pattern), None, durable=False)
    keys = [".".join(chance.choice(words) for _ in range(3)) for _ in range(KEYS)]
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for key in keys:
            topology.route(exchange, [key], {})
        best = min(best, time.thread_time() - begun)
    return best / KEYS * 1e6


class _Client:
    """Counts confirms, and acknowledges its deliveries."""

    def __init__(self, vhost: VHost) -> None:
        self._vhost = vhost
        self.confirms = self.deliveries = 0

    def returned(self, *reported: object) -> None:
        raise AssertionError("there is a route")

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        self.confirms += len(numbers)

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        self.deliveries += len(deliveries)
        ids = [each.id for each in deliveries]
        self._vhost.settle([Settlement(consumer.queue.name, deliveries[0].token, ids, ACK)])
        consumer.credit(len(deliveries))

    def cancelled(self, consumer: Consumer) -> None:
        raise AssertionError("the queue stays")


def _messages() -> tuple[float, float]:
    """Return CPU microseconds per message by the plane alone, and through a virtual host."""
    plane, broker = [], []
    for _ in range(ROUNDS):
        with _store() as store:
            plane.append(_by_plane(store))
        with _store() as store:
            broker.append(asyncio.run(_by_broker(store)))
    return min(plane) / MESSAGES * 1e6, min(broker) / MESSAGES * 1e6


def _by_plane(store: RocksStore) -> float:
    commit = LoopCommit(store)
    plane = QueuePlane(store, commit)
    plane.create(QueueConfig(name="q", durability=Durability.WRITTEN))
    envelope = b"\0\1q" + PERSISTENT
    held: list[Any] = []
    begun = time.thread_time()
    for _ in range(MESSAGES // TURN):
        with plane.change():
            plane.enqueue("q", [Draft(payload=BODY, properties=envelope) for _ in range(TURN)])
            if held:
                plane.ack("q", held[0].token, [each.id for each in held])
        held = plane.lease("q", TURN, visibility_ms=0)
    spent = time.thread_time() - begun
    plane.close()
    commit.close()
    return spent


async def _by_broker(store: RocksStore) -> float:
    vhost = VHost("/", store)
    vhost.start()
    vhost.declare_queue("q", durable=True)
    client = _Client(vhost)
    vhost.subscribe("q", client, tag="c", prefetch=4 * TURN)
    begun = time.thread_time()
    for number in range(1, MESSAGES + 1):
        vhost.publish(client, "", "q", PERSISTENT, BODY, number=number)
        if number % TURN == 0:
            await asyncio.sleep(0)
    while client.confirms < MESSAGES or client.deliveries < MESSAGES:  # noqa: ASYNC110  (turns are what is measured)
        await asyncio.sleep(0)
    spent = time.thread_time() - begun
    await vhost.close()
    return spent


def _queues() -> float:
    """Return CPU microseconds to declare, bind and delete a queue."""

    async def measure(store: RocksStore) -> float:
        vhost = VHost("/", store)
        vhost.start()
        begun = time.thread_time()
        for number in range(QUEUES):
            vhost.declare_queue(f"q{number}", durable=True)
            vhost.bind_queue(f"q{number}", "amq.topic", f"key.{number}")
        for number in range(QUEUES):
            vhost.delete_queue(f"q{number}")
        spent = time.thread_time() - begun
        await vhost.close()
        return spent

    with _store() as store:
        return asyncio.run(measure(store)) / QUEUES * 1e6


@contextmanager
def _store() -> Iterator[RocksStore]:
    folder = Path(tempfile.mkdtemp(prefix="basalt-bench-"))
    store = open_store(folder / "store")
    try:
        yield store
    finally:
        store.close()
        shutil.rmtree(folder, ignore_errors=True)
