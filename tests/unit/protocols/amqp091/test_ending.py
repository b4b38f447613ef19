"""Ends and checks of many channels and connections are split (P13). Tests what clients see meanwhile."""

from __future__ import annotations

from itertools import count

import pytest
from tests.fuzz.amqp091 import Harness
from tests.unit.protocols.amqp091.test_connection import Socket, in_harness, opened
from tests.unit.protocols.amqp091.test_fairness import TURNS_MAX, declare, leased, message

from basaltmq.broker.queue_table import CANCELLED_PER_STEP
from basaltmq.broker.scheduling.loop_shares import WORK_S, LoopShares
from basaltmq.protocols.amqp091.capabilities import ClientCapabilities
from basaltmq.protocols.amqp091.connection import Connection
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.method_codec import encode_method

pytestmark = pytest.mark.promise("P13")

CHANNELS = 40
HELD = 5


async def with_channels(harness: Harness) -> tuple[Connection, Socket]:
    """Return a client with unacknowledged messages on many channels. With its clock, each channel takes one turn to
    end."""
    connection, socket = await opened(harness)
    connection.data_received(message("a", b"x") * (CHANNELS * HELD))
    await harness.settle(lambda: harness.vhost.plane.stats("a")["ready"] == CHANNELS * HELD, turns=TURNS_MAX)
    for number in range(2, CHANNELS + 2):
        get = encode_method(number, m.BasicGet(0, "a", False))
        connection.data_received(encode_method(number, m.ChannelOpen()) + get * HELD)
        await harness.settle()
    assert leased(harness) == CHANNELS * HELD
    ticks = count()
    harness.server.shares = LoopShares(clock_s=lambda: next(ticks) * WORK_S)
    socket.sent()
    return connection, socket


async def until_left(harness: Harness) -> None:
    await harness.settle(lambda: not harness.server.connections, turns=TURNS_MAX)
    assert not harness.server.connections
    assert not harness.registered
    assert not leased(harness)
    assert harness.vhost.plane.stats("a")["ready"] == CHANNELS * HELD


def test_the_channels_of_a_lost_connection_end_in_portions() -> None:
    async def scenario(harness: Harness) -> None:
        connection, _ = await with_channels(harness)
        connection.connection_lost(None)
        await harness.settle(turns=1)
        assert 0 < leased(harness) < CHANNELS * HELD
        assert harness.server.connections, "the connection leaves after its last channel"
        await until_left(harness)

    in_harness(scenario)


@pytest.mark.parametrize("is_cut", [False, True])
def test_close_ok_follows_the_requeueing_of_all_channels(is_cut: bool) -> None:
    async def scenario(harness: Harness) -> None:
        connection, socket = await with_channels(harness)
        connection.data_received(encode_method(0, m.ConnectionClose(200, "bye", 0, 0)) + declare())
        await harness.settle(turns=2)
        assert 0 < leased(harness) < CHANNELS * HELD
        assert not socket.sent()
        if is_cut:
            connection.connection_lost(None)
        else:
            await harness.settle(lambda: socket.closed, turns=TURNS_MAX)
            assert not leased(harness)
            assert [type(each) for each in socket.sent()] == [m.ConnectionCloseOk]
            connection.connection_lost(None)
        await until_left(harness)

    in_harness(scenario)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_the_broker_stops_or_the_queue_goes_while_channels_end(is_deleted: bool) -> None:
    async def scenario(harness: Harness) -> None:
        connection, _ = await with_channels(harness)
        connection.connection_lost(None)
        await harness.settle(turns=1)
        assert leased(harness)
        if is_deleted:
            harness.vhost.delete_queue("a")
            await harness.settle(lambda: not harness.server.connections, turns=TURNS_MAX)
            assert not harness.registered
            assert harness.vhost.error is None
        else:
            await harness.server.close()
            await until_left(harness)

    in_harness(scenario)


def test_the_check_of_each_second_visits_connections_in_portions() -> None:
    async def scenario(harness: Harness) -> None:
        connections = [(await opened(harness))[0] for _ in range(30)]
        ticks = count()
        harness.server.shares = LoopShares(clock_s=lambda: next(ticks) * WORK_S)
        before = [each._age_s for each in connections]
        harness.server._sweeper.cancel()
        harness.server._sweep()

        def checked() -> int:
            return sum(each._age_s > age for each, age in zip(connections, before, strict=True))

        assert 0 < checked() < 30
        assert harness.server._sweeper.cancelled(), "the next check begins after the end of this one"
        connections[-1].connection_lost(None)
        await harness.settle(lambda: not harness.server._sweeper.cancelled(), turns=TURNS_MAX)
        assert checked() >= 29, "the last one may be gone"
        assert not harness.server._sweeper.cancelled()

    in_harness(scenario)


def test_publishers_are_blocked_in_portions_by_the_latest_state() -> None:
    async def scenario(harness: Harness) -> None:
        connections = [(await opened(harness))[0] for _ in range(30)]
        for each in connections:
            each.data_received(message("a", b"x"))
        await harness.settle()
        ticks = count()
        harness.server.shares = LoopShares(clock_s=lambda: next(ticks) * WORK_S)

        def blocked() -> int:
            return sum(each.info()["state"] == "blocked" for each in connections)

        harness.server._blocked_changed("/", "no space")
        assert 0 < blocked() < 30
        await harness.settle(lambda: blocked() == 30, turns=TURNS_MAX)
        assert blocked() == 30
        harness.server._blocked_changed("/", None)
        harness.server._blocked_changed("/", "no space")
        await harness.settle(turns=TURNS_MAX)
        assert blocked() == 30, "a portion of the first change must not release after the second"

    in_harness(scenario)


CONSUMERS = 5 * CANCELLED_PER_STEP


async def with_consumers(harness: Harness) -> tuple[Connection, Socket]:
    harness.vhost.tick.chores._clock_s = count().__next__
    connection, socket = await opened(harness)
    connection.client = ClientCapabilities({"capabilities": {"consumer_cancel_notify": True}})
    for number in range(CONSUMERS):
        connection.data_received(consume(f"c{number}"))
    await harness.settle()
    socket.sent()
    return connection, socket


def consume(tag: str) -> bytes:
    return encode_method(1, m.BasicConsume(0, "a", tag, False, False, False, False, {}))


def cancelled(socket: Socket) -> int:
    return sum(type(each) is m.BasicCancel for each in socket.sent())


def test_the_consumers_of_a_deleted_queue_are_cancelled_in_portions() -> None:
    async def scenario(harness: Harness) -> None:
        _, socket = await with_consumers(harness)
        harness.vhost.delete_queue("a")
        await harness.settle(turns=2)
        seen = cancelled(socket)
        assert 0 < seen < CONSUMERS
        # Another client declares the queue again, and consumes from it.
        harness.vhost.declare_queue("a", durable=True)
        other, served = await opened(harness)
        other.data_received(consume("mine") + message("a", b"x"))
        await harness.settle(lambda: len(harness.vhost.queues.by_name["a"].consumers) == 1, turns=TURNS_MAX)
        await harness.settle(turns=TURNS_MAX)
        assert seen + cancelled(socket) == CONSUMERS
        assert any(type(each) is m.BasicDeliver for each in served.sent()), "the new consumer is not cancelled"

    in_harness(scenario)


@pytest.mark.parametrize("stops", [False, True])
def test_a_client_goes_or_the_broker_stops_while_its_consumers_are_cancelled(stops: bool) -> None:
    async def scenario(harness: Harness) -> None:
        connection, _ = await with_consumers(harness)
        queue = harness.vhost.queues.by_name["a"]
        harness.vhost.delete_queue("a")
        assert len(queue.consumers)
        if stops:
            await harness.server.close()
        else:
            connection.connection_lost(None)
        await harness.settle(lambda: not len(queue.consumers), turns=TURNS_MAX)
        assert not len(queue.consumers)
        assert harness.vhost.error is None

    in_harness(scenario)


def test_the_next_single_active_consumer_is_the_first_of_the_highest_priority() -> None:
    async def scenario(harness: Harness) -> None:
        harness.vhost.declare_queue("sac", arguments={"x-single-active-consumer": True})
        connection, _ = await opened(harness)
        for tag, priority in (("first", 0), ("low", 1), ("high", 5), ("higher", 5), ("none", 0)):
            consumed = m.BasicConsume(0, "sac", tag, False, False, False, False, {"x-priority": priority})
            connection.data_received(encode_method(1, consumed))
        await harness.settle()
        consumers = harness.vhost.queues.by_name["sac"].consumers
        order = []
        while len(consumers):
            (active,) = [each for each in consumers if each.active]
            order.append(active.tag)
            active.cancel()
        assert order == ["first", "high", "higher", "low", "none"]

    in_harness(scenario)
