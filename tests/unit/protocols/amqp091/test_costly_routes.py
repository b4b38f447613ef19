"""Exchanges with thousands of bindings: the cost of routing a message is charged to its publisher."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
from tests.fuzz.amqp091 import Harness
from tests.unit.protocols.amqp091.test_connection import in_harness, opened
from tests.unit.protocols.amqp091.test_fairness import EVENTS_PER_TURN, TURNS_MAX, ticking
from tests.unit.protocols.amqp091.wire import publish

from basaltmq.broker.publishing import router as router_module
from basaltmq.broker.scheduling.loop_shares import FAN_OUT_S, LoopShares
from basaltmq.protocols.amqp091 import transactions
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.method_codec import encode_method

MESSAGES = 100
MATCH_S = 0.01


def hashing(harness: Harness, **arguments: str) -> None:
    harness.vhost.declare_exchange("hash", "x-consistent-hash", arguments=arguments)
    harness.vhost.declare_queue("h")
    harness.vhost.bind_queue("h", "hash", "1")


@pytest.mark.promise("P13")
def test_messages_with_uncached_routes_are_split() -> None:
    async def scenario(harness: Harness) -> None:
        hashing(harness)
        connection, _ = await opened(harness)
        channel = connection.channels[1]
        ticking(harness)
        connection.data_received(b"".join(publish(b"", exchange="hash", key=f"{n}") for n in range(MESSAGES)))
        assert channel.published <= EVENTS_PER_TURN
        await harness.settle(lambda: harness.vhost.plane.stats("h")["ready"] == MESSAGES, turns=TURNS_MAX)
        assert [each.payload for each in harness.vhost.plane.browse("h", count=2 * MESSAGES)] == [b""] * MESSAGES

    in_harness(scenario)


@pytest.mark.promise("P13")
def test_a_match_of_properties_is_charged_like_a_fan_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(harness: Harness) -> None:
        hashing(harness, **{"hash-property": "message_id"})
        harness.server.shares = LoopShares(clock_s=lambda: 0.0)
        ticks = count()
        monkeypatch.setattr(router_module, "time", SimpleNamespace(thread_time=lambda: next(ticks) * MATCH_S))
        connection, _ = await opened(harness)
        channel = connection.channels[1]
        connection.data_received(publish(b"", exchange="hash", key="k") * MESSAGES)
        assert channel.published == int(FAN_OUT_S / MATCH_S)
        await harness.settle(lambda: channel.published == MESSAGES, turns=TURNS_MAX)
        assert channel.published == MESSAGES

    in_harness(scenario)


@pytest.mark.promise("P8")
def test_messages_without_a_queue_count_for_the_limit_of_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "TRANSACTION_COPIES_MAX", 10)

    async def scenario(harness: Harness) -> None:
        connection, socket = await opened(harness)
        connection.data_received(encode_method(1, m.TxSelect()))
        for _ in range(10):
            connection.data_received(publish(b"", exchange="amq.direct", key="nobody"))
        assert not any(isinstance(each, m.ConnectionClose) for each in socket.sent())
        connection.data_received(publish(b"", exchange="amq.direct", key="nobody"))
        (closed,) = [each for each in socket.sent() if isinstance(each, m.ConnectionClose)]
        assert "enqueues more than 10 messages" in closed.reply_text

    in_harness(scenario)
