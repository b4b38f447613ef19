"""RocketMQ clients of the default virtual host: a producer of batches, and consumers that acknowledge most messages.

The messages are records of a stream topic. The consumers receive them one by one, each under a lease (POP).
"""

from __future__ import annotations

import time

import grpc
from tests.interop.rocketmq.raw import Client as Raw
from tests.interop.rocketmq.raw import handle_of, message
from tests.interop.server import Broker
from tests.soak.clients import Client, Round
from tests.soak.ledger import CONFIRMED, SETTLED, SETTLING, TRIED, Label

from basaltmq.http_client import path
from basaltmq.wire import rocketmq_wire_pb2 as wire

TOPIC = "orders"
PARTITIONS = 2
GROUP = "shop"
PLACE = f"rocketmq|{TOPIC}"
FLAGS = ("--rocketmq-invisible-ms-min=100",)
INVISIBLE_MS = 3_000
"""Short, so that messages of a killed consumer are ready again at the final drain."""
POLLING_MS = 300


def create_topic(broker: Broker) -> None:
    broker.call("PUT", path("topics", "/", TOPIC), {"partitions": PARTITIONS})


class _RocketMq(Client):
    # The raw client raises AssertionError when an answer is cut off.
    expected = (OSError, grpc.RpcError, AssertionError)

    def __init__(self, turn: Round, name: str) -> None:
        super().__init__(turn, f"rocketmq-{name}")

    def connect(self) -> Raw:
        return Raw(self.broker.port("rocketmq"), client_id=self.name)


class Producer(_RocketMq):
    """Sends batches. A message is durable when its entry of the answer is OK."""

    def session(self) -> None:
        with self.connect() as client:
            client.route(TOPIC)
            while self.turn.pause(self.random.choice((0.0, 0.01, 0.05))):
                labels = self.ledger.next_label("r", self.random.choice((1, 1, 8)))
                self.ledger.mark((PLACE,), labels, TRIED)
                size = self.random.choice((0, 300, 50_000))
                answer = client.send(*(message(TOPIC, label.body(size)) for label in labels))
                for label, entry in zip(labels, answer.entries, strict=False):
                    if entry.status.code == wire.OK:
                        self.ledger.mark((PLACE,), (label,), CONFIRMED)


class Consumer(_RocketMq):
    """Acknowledges most messages, shortens the leases of some, and lets some expire."""

    def session(self) -> None:
        with self.connect() as client:
            client.route(TOPIC)
            while not self.turn.stopping.is_set():
                count, queue = self.random.choice((1, 10, 32)), self.random.randrange(PARTITIONS)
                code, found = client.receive(
                    GROUP, TOPIC, count=count, invisible_ms=INVISIBLE_MS, polling_ms=POLLING_MS, queue_id=queue
                )
                if code == wire.OK:
                    self._settle(client, found)

    def _settle(self, client: Raw, found: list[wire.Message]) -> None:
        labels = [Label.of(each.body) for each in found]
        for label in labels:
            self.ledger.seen(PLACE, label, self.name)
        chance = self.random.random()
        if chance < 0.8:
            self.ledger.mark((PLACE,), labels, SETTLING)
            answer = client.ack(GROUP, TOPIC, *map(handle_of, found))
            for label, entry in zip(labels, answer.entries, strict=False):
                # A lease that has expired is not acknowledged: the message is redelivered.
                if entry.status.code == wire.OK:
                    self.ledger.mark((PLACE,), (label,), SETTLED)
        elif chance < 0.9:
            client.change(GROUP, TOPIC, handle_of(found[0]), 100)


def drain(broker: Broker, timeout_s: float) -> list[Label]:
    """Receive and acknowledge everything, including expired leases of killed consumers."""
    found: list[Label] = []
    until_s = time.monotonic() + timeout_s
    with Raw(broker.port("rocketmq"), client_id="soak-drain") as client:
        client.route(TOPIC)
        quiet_until_s = 0.0
        while time.monotonic() < until_s:
            some: list[wire.Message] = []
            for queue in range(PARTITIONS):
                some += client.receive(GROUP, TOPIC, invisible_ms=600_000, queue_id=queue)[1]
            if some:
                found += [Label.of(each.body) for each in some]
                client.ack(GROUP, TOPIC, *map(handle_of, some))
                quiet_until_s = 0.0
            elif not quiet_until_s:
                quiet_until_s = time.monotonic() + INVISIBLE_MS / 1000 + 1.0
            elif time.monotonic() > quiet_until_s:
                return found
            else:
                time.sleep(0.2)
    raise AssertionError(f"{PLACE} does not become empty: {len(found)} messages came")
