"""Clients of the gRPC API: producers of a lease queue, and workers that ack, nack, reject and release."""

from __future__ import annotations

import contextlib
import time

from tests.interop.server import Broker
from tests.soak.clients import Client, Round
from tests.soak.ledger import CONFIRMED, REJECTED, SETTLED, SETTLING, TRIED, Label

from basaltmq.client import Client as Grpc
from basaltmq.client.leased import Leased
from basaltmq.errors import AlreadyExistsError, BasaltError, InvalidArgumentError, StaleLeaseError

QUEUE = "jobs"
DEAD = "jobs.dlq"
PLACE = "grpc|jobs"
VISIBILITY_MS = 3_000
"""Short, so that messages of a killed worker are ready again at the final drain."""


def address(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('fila')}"


def create_queue(broker: Broker) -> None:
    with Grpc(address(broker)) as client, contextlib.suppress(AlreadyExistsError):
        client.create_queue(QUEUE, visibility_timeout_ms=VISIBILITY_MS)


class _Grpc(Client):
    expected = (OSError, BasaltError)

    def __init__(self, turn: Round, name: str) -> None:
        super().__init__(turn, f"grpc-{name}")

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, InvalidArgumentError):
            self.ledger.problem(f"{self.name}: {error}")
        super()._failed(error)


class GrpcProducer(_Grpc):
    """Enqueues batches. A confirmed batch exists completely."""

    def session(self) -> None:
        with Grpc(address(self.broker), timeout=20) as client:
            while self.turn.pause(self.random.choice((0.01, 0.05))):
                labels = self.ledger.next_label("g", self.random.choice((1, 5, 30)))
                self.ledger.mark((PLACE,), labels, TRIED)
                size = self.random.choice((0, 500, 50_000))
                client.enqueue(QUEUE, [label.body(size) for label in labels])
                self.ledger.mark((PLACE,), labels, CONFIRMED)


class GrpcWorker(_Grpc):
    """Leases and settles. A confirmed ack survives a kill of the broker."""

    def session(self) -> None:
        with Grpc(address(self.broker), timeout=20, consumer=self.name) as client:
            while not self.turn.stopping.is_set():
                held = client.lease(QUEUE, self.random.choice((1, 10, 50)), wait=0.2)
                for message in held:
                    self.ledger.seen(PLACE, Label.of(message.payload), self.name)
                if held:
                    self._settle(client, held)

    def _settle(self, client: Grpc, held: list[Leased]) -> None:
        labels = [Label.of(message.payload) for message in held]
        chance = self.random.random()
        try:
            if chance < 0.75:
                self.ledger.mark((PLACE,), labels, SETTLING)
                client.ack(held)
                self.ledger.mark((PLACE,), labels, SETTLED)
            elif chance < 0.85:
                client.nack(held, "soak")
            elif chance < 0.9:
                self.ledger.mark((PLACE,), labels, REJECTED)
                client.nack(held, "soak", reject=True)
            elif chance < 0.95:
                client.release(held)
            # Otherwise the lease expires.
        except StaleLeaseError:
            # Settled too late: it is redelivered.
            pass


def drain(broker: Broker, timeout_s: float) -> list[Label]:
    """Drain the queue and its dead-letter queue, including expired leases of killed workers."""
    found: list[Label] = []
    until_s = time.monotonic() + timeout_s
    with Grpc(address(broker), timeout=20) as client:
        quiet_until_s = 0.0
        while time.monotonic() < until_s:
            count = 0
            for name in (QUEUE, DEAD):
                held = client.lease(name, 1000, visibility_ms=600_000)
                count += len(held)
                found += [Label.of(message.payload) for message in held]
                if held:
                    client.ack(held)
            if count:
                quiet_until_s = 0.0
            elif not quiet_until_s:
                quiet_until_s = time.monotonic() + VISIBILITY_MS / 1000 + 1.0
            elif time.monotonic() > quiet_until_s:
                return found
            else:
                time.sleep(0.2)
    raise AssertionError(f"{PLACE} does not become empty: {len(found)} messages came")
