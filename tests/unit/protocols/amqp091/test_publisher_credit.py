"""Delivery comes first (P12): publishers of a queue whose consumers are behind wait for credit."""

from __future__ import annotations

import asyncio
import socket
from itertools import count

import pytest
from tests.fuzz.amqp091 import Harness
from tests.unit.protocols.amqp091.test_connection import Socket, in_harness, opened
from tests.unit.protocols.amqp091.wire import publish

from basaltmq.broker.consumers.queue import LEASE_MAX
from basaltmq.broker.publishing.credit import BACKLOG_MAX, CHECK_S, CREDIT_MAX, RECEIVE_BUFFER_BYTES
from basaltmq.protocols.amqp091.connection import Connection
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.method_codec import encode_method

FLOOD = 8000
READ_MESSAGES = 500
"""Messages that one read of a flooding connection brings: more than a turn delivers from one queue."""

TURNS_MAX = 3000
pytestmark = pytest.mark.promise("P12")


def consume(*, no_ack: bool, prefetch: int = 0) -> bytes:
    qos = encode_method(1, m.BasicQos(0, prefetch, False))
    return qos + encode_method(1, m.BasicConsume(0, "a", "t", False, no_ack, False, True, {}))


def ready(harness: Harness) -> int:
    return harness.vhost.plane.stats("a")["ready"]


class Flood:
    """A connection that publishes as fast as it is read."""

    def __init__(self, connection: Connection, socket: Socket, key: str = "a", exchange: str = "") -> None:
        self.connection, self.socket = connection, socket
        self.sent = 0
        self._read = publish(b"x" * 10, key=key, exchange=exchange) * READ_MESSAGES

    def push(self) -> None:
        if self.socket.is_read() and self.sent < FLOOD:
            self.sent += READ_MESSAGES
            self.connection.data_received(self._read)

    @property
    def is_done(self) -> bool:
        return self.sent >= FLOOD and self.socket.is_read()


def one_batch_per_turn(harness: Harness) -> None:
    """Make every batch of deliveries use up the time of its turn."""
    dispatch = harness.vhost.tick.dispatch
    ticks = count()
    dispatch._clock_s = lambda: float(next(ticks))


async def most_ready(harness: Harness, floods: list[Flood]) -> int:
    """Let the floods end. Return the largest backlog seen at the end of a turn."""
    most = 0
    for _ in range(TURNS_MAX):
        for flood in floods:
            flood.push()
        await harness.settle(turns=1)
        if harness.vhost.tick.credit and not harness.vhost.tick.dispatch:
            await asyncio.sleep(CHECK_S)
        most = max(most, ready(harness))
        if all(flood.is_done for flood in floods):
            return most
    raise AssertionError(f"the floods did not end within {TURNS_MAX} turns: {[flood.sent for flood in floods]}")


@pytest.mark.parametrize("exchange", ["", "amq.fanout"])
def test_publishers_to_a_queue_with_a_ready_consumer_are_limited_to_its_deliveries(exchange: str) -> None:
    async def scenario(harness: Harness) -> None:
        one_batch_per_turn(harness)
        consumer, _ = await opened(harness)
        consumer.data_received(consume(no_ack=True))
        if exchange:
            harness.vhost.bind_queue("a", exchange, "")
            harness.vhost.bind_queue("b", exchange, "")
        floods = [Flood(*await opened(harness), exchange=exchange) for _ in range(3)]
        most = await most_ready(harness, floods)
        # Each flood may send one read before the limit begins.
        assert most <= BACKLOG_MAX + len(floods) * READ_MESSAGES + LEASE_MAX + CREDIT_MAX
        for _ in range(TURNS_MAX):
            await harness.settle(turns=1)
            if not ready(harness):
                break
        assert harness.vhost.queues.by_name["a"].delivered == len(floods) * FLOOD

    in_harness(scenario)


def test_publishers_to_a_queue_without_consumers_are_not_limited() -> None:
    async def scenario(harness: Harness) -> None:
        flood = Flood(*await opened(harness))
        assert await most_ready(harness, [flood]) == FLOOD

    in_harness(scenario)


def test_a_consumer_that_never_acknowledges_does_not_stop_publishers() -> None:
    async def scenario(harness: Harness) -> None:
        one_batch_per_turn(harness)
        consumer, _ = await opened(harness)
        consumer.data_received(consume(no_ack=False, prefetch=10))
        flood = Flood(*await opened(harness))
        await most_ready(harness, [flood])
        await harness.settle(lambda: ready(harness) == FLOOD - 10, turns=TURNS_MAX)
        assert ready(harness) == FLOOD - 10

    in_harness(scenario)


def test_a_client_that_publishes_what_it_consumes_does_not_wait_for_a_check() -> None:
    """Its acknowledgements are behind its publishes, so a publish that waits delays them too."""

    async def scenario(harness: Harness) -> None:
        flood = Flood(*await opened(harness))
        while not flood.is_done:
            flood.push()
            await harness.settle(turns=1)
        client, _ = await opened(harness)
        queue = harness.vhost.queues.by_name["a"]
        client.data_received(consume(no_ack=False, prefetch=10))
        harness.vhost.tick.credit.check([queue])
        harness.vhost.tick.credit.check_speed = lambda: None  # type: ignore[method-assign]
        answered = 0
        for _ in range(TURNS_MAX):
            delivered = queue.delivered
            for tag in range(answered + 1, delivered + 1):
                again = publish(b"x" * 10, key="a")
                client.data_received(again + encode_method(1, m.BasicAck(tag, False)))
            answered = delivered
            if answered >= FLOOD:
                break
            # The client answers some turns later.
            await harness.settle(turns=3)
        assert answered >= FLOOD
        assert queue.publish_credit < FLOOD, "the queue limits its publishers"

    in_harness(scenario)


def test_the_limit_ends_with_the_consumer() -> None:
    async def scenario(harness: Harness) -> None:
        one_batch_per_turn(harness)
        consumer, _ = await opened(harness)
        consumer.data_received(consume(no_ack=True))
        flood = Flood(*await opened(harness))
        while flood.sent < 5 * READ_MESSAGES:
            flood.push()
            await harness.settle(turns=1)
        consumer.data_received(encode_method(1, m.BasicCancel("t", True)))
        before = harness.vhost.queues.by_name["a"].delivered
        assert await most_ready(harness, [flood]) >= FLOOD - before - LEASE_MAX
        assert harness.vhost.queues.by_name["a"].publish_credit > FLOOD

    in_harness(scenario)


def test_a_publisher_of_another_queue_does_not_wait() -> None:
    async def scenario(harness: Harness) -> None:
        one_batch_per_turn(harness)
        consumer, _ = await opened(harness)
        consumer.data_received(consume(no_ack=True))
        flood = Flood(*await opened(harness))
        other, other_socket = await opened(harness)
        while not harness.vhost.tick.credit:
            flood.push()
            await harness.settle(turns=1)
        other.data_received(publish(b"y", key="b") * 100)
        await harness.settle(turns=2)
        assert other_socket.is_read()
        assert harness.vhost.plane.stats("b")["ready"] == 100
        await most_ready(harness, [flood])

    in_harness(scenario)


def test_the_kernel_does_not_buffer_for_a_waiting_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit the receive buffer grows to tens of megabytes, which the client counts as sent."""

    async def scenario(harness: Harness) -> None:
        one_batch_per_turn(harness)
        consumer, _ = await opened(harness)
        consumer.data_received(consume(no_ack=True))
        flood = Flood(*await opened(harness))
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * RECEIVE_BUFFER_BYTES)
            extra = {"socket": raw}
            monkeypatch.setattr(flood.socket, "get_extra_info", lambda name, default=None: extra.get(name, default))
            before = raw.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            await most_ready(harness, [flood])
            # Linux doubles the value.
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * RECEIVE_BUFFER_BYTES < before

    in_harness(scenario)


def test_a_waiting_publisher_that_disconnects_leaves_no_state() -> None:
    async def scenario(harness: Harness) -> None:
        one_batch_per_turn(harness)
        consumer, _ = await opened(harness)
        consumer.data_received(consume(no_ack=True))
        flood = Flood(*await opened(harness))
        for _ in range(5):
            flood.push()
            await harness.settle(turns=1)
        flood.connection.connection_lost(None)
        for _ in range(TURNS_MAX):
            await harness.settle(turns=1)
            if not ready(harness) and not harness.vhost.tick.credit:
                break
        assert not ready(harness)
        assert not harness.vhost.tick.credit

    in_harness(scenario)
