"""AMQP 1.0: settling many deliveries and ending many links is split (P13). Tests what clients see meanwhile."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from tests.unit.protocols.amqp10.served import TURNS_MAX, Client, Harness, fill, in_harness

from basaltmq.broker.message.operations import ACK, REQUEUE, SETTLE_PORTIONS
from basaltmq.broker.routing.topology import REMOVED_PER_BATCH
from basaltmq.broker.scheduling.loop_shares import WORK_S
from basaltmq.protocols.amqp10.management import ADDRESS
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.queues.lifecycle.removal import PAGE

pytestmark = pytest.mark.promise("P13")

LINKS = 40
HELD = 5


async def with_unsettled(harness: Harness, count: int) -> Client:
    """A client with unsettled deliveries on one link."""
    await fill(harness, count)
    client = await Client(harness).open()
    client.receive(0, count)
    await harness.turns(lambda: client.unsettled() == count, TURNS_MAX)
    client.flow(0, 0, count)
    client.sent()
    return client


async def with_links(harness: Harness, *, channels: int = 1) -> Client:
    """A client with unsettled deliveries on many links. By the clock, each link takes a turn to end."""
    await fill(harness, LINKS * HELD)
    client = await Client(harness).open(channels=channels)
    for number in range(LINKS):
        client.receive(number, HELD, number % channels)
    await harness.turns(lambda: client.unsettled() == LINKS * HELD, TURNS_MAX)
    await harness.turns()
    client.sent()
    harness.slow_down(WORK_S)
    return client


async def until_left(harness: Harness) -> None:
    await harness.turns(lambda: not harness.server.connections, TURNS_MAX)
    assert not harness.server.connections
    assert not harness.registered
    await harness.turns(lambda: harness.stats()["ready"] == LINKS * HELD, TURNS_MAX)
    assert harness.stats()["ready"] == LINKS * HELD
    assert not len(harness.vhost.queues.by_name["q"].consumers)


@pytest.mark.spec("G2")
@pytest.mark.parametrize(("state", "outcome"), [(p.Accepted(), ACK), (p.Released(), REQUEUE)])
def test_a_disposition_of_many_deliveries_settles_portions(state: p.Composite, outcome: str) -> None:
    async def scenario(harness: Harness) -> None:
        count = 3 * SETTLE_PORTIONS[outcome]
        client = await with_unsettled(harness, count)
        client.settle(0, 0x7FFF_FFFF, state)
        client.send(p.End())
        assert count - client.unsettled() == SETTLE_PORTIONS[outcome]
        await harness.turns(count=1)
        assert client.sent() == [], "the end waits behind the disposition"
        await harness.turns(lambda: not client.connection.sessions, TURNS_MAX)
        assert [type(each) for each in client.sent()] == [p.End]
        assert harness.stats()["messages"] == (0 if outcome == ACK else count)

    in_harness(scenario)


@pytest.mark.spec("G2")
def test_a_link_that_ends_between_two_portions_requeues_what_is_left_of_them() -> None:
    async def scenario(harness: Harness) -> None:
        count = 3 * SETTLE_PORTIONS[ACK]
        client = await with_unsettled(harness, count)
        client.settle(0, count - 1, p.Accepted())
        left = client.unsettled()
        assert 0 < left < count
        harness.vhost.delete_queue("q")
        await harness.turns(count=TURNS_MAX // 10)
        assert [type(each) for each in client.sent()] == [p.Detach]
        assert not client.unsettled()
        assert harness.vhost.error is None

    in_harness(scenario)


@pytest.mark.spec("G2")
def test_a_connection_lost_between_two_portions_requeues_the_rest() -> None:
    async def scenario(harness: Harness) -> None:
        count = 3 * SETTLE_PORTIONS[ACK]
        client = await with_unsettled(harness, count)
        client.settle(0, count - 1, p.Accepted())
        client.connection.connection_lost(None)
        await harness.turns(lambda: not harness.server.connections, TURNS_MAX)
        left = count - SETTLE_PORTIONS[ACK]
        await harness.turns(lambda: harness.stats()["ready"] == left, TURNS_MAX)
        assert harness.stats()["ready"] == harness.stats()["messages"] == left

    in_harness(scenario)


@pytest.mark.spec("G2")
@pytest.mark.parametrize("channels", [1, 4])
def test_the_links_of_a_lost_connection_end_in_portions(channels: int) -> None:
    async def scenario(harness: Harness) -> None:
        client = await with_links(harness, channels=channels)
        client.connection.connection_lost(None)
        await harness.turns(count=2)
        assert 0 < harness.stats()["ready"] < LINKS * HELD
        assert harness.server.connections, "the connection leaves after its last link"
        await until_left(harness)

    in_harness(scenario)


@pytest.mark.spec("G2")
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("performative", [p.End(), p.Close()])
def test_the_answer_to_end_and_close_follows_the_requeueing(performative: p.Composite, is_cut: bool) -> None:
    async def scenario(harness: Harness) -> None:
        client = await with_links(harness)
        client.send(performative)
        await harness.turns(count=2)
        assert 0 < harness.stats()["ready"] < LINKS * HELD
        assert client.sent() == []
        if not is_cut:
            await harness.turns(lambda: bool(client.transport.written), TURNS_MAX)
            assert [type(each) for each in client.sent()] == [type(performative)]
            assert harness.stats()["ready"] == LINKS * HELD
        client.connection.connection_lost(None)
        await until_left(harness)

    in_harness(scenario)


@pytest.mark.spec("G2")
def test_the_broker_stops_while_links_end() -> None:
    async def scenario(harness: Harness) -> None:
        client = await with_links(harness)
        client.connection.connection_lost(None)
        await harness.turns(count=2)
        assert harness.server.connections
        await harness.server.close()
        await until_left(harness)

    in_harness(scenario)


@pytest.mark.spec("G2")
def test_a_session_that_ends_gets_no_messages_that_its_other_links_requeue() -> None:
    async def scenario(harness: Harness) -> None:
        client = await with_links(harness)
        # Credit for everything: without a check, each link that ends would give its messages to the others.
        for handle in range(LINKS):
            client.flow(handle, 1000, HELD)
            await harness.turns(count=3)
        client.sent()
        client.send(p.End())
        await harness.turns(lambda: bool(client.transport.written), TURNS_MAX)
        assert [type(each) for each in client.sent()] == [p.End]
        client.connection.connection_lost(None)
        await until_left(harness)

    in_harness(scenario)


async def with_management(harness: Harness) -> Client:
    """A client with a link pair to the management node. By the clock, each portion takes a turn."""
    client = await Client(harness).open()
    node = p.Target(address=ADDRESS)
    client.send(p.Attach(name="m", handle=0, role=p.SENDER, source=p.Source(), target=node, initial_delivery_count=0))
    client.send(p.Attach(name="m", handle=1, role=p.RECEIVER, source=p.Source(address=ADDRESS), target=p.Target()))
    client.flow(1, 10, 0)
    await harness.turns()
    client.sent()
    harness.slow_down(WORK_S)
    return client


def request(client: Client, number: int, method: str, path: str) -> None:
    properties = t.encode([t.Ulong(number), None, path, method])
    payload = s.section(s.PROPERTIES, properties) + s.section(s.VALUE, t.encode(None))
    client.send(p.Transfer(handle=0, delivery_id=number, delivery_tag=b"%d" % number, settled=True), 0, payload)


def answers(client: Client) -> int:
    return sum(isinstance(each, p.Transfer) for each in client.sent())


@pytest.mark.spec("G2")
def test_a_purge_by_management_lets_others_run_and_what_follows_waits() -> None:
    async def scenario(harness: Harness) -> None:
        # Messages of a durable queue are deleted by one range.
        harness.vhost.declare_queue("t", durable=False)
        await fill(harness, 3 * PAGE, "t")
        client = await with_management(harness)
        request(client, 0, "DELETE", "/queues/t/messages")
        request(client, 1, "GET", "/queues/t")
        assert 0 < harness.stats("t")["ready"] < 3 * PAGE
        assert not answers(client)
        await harness.turns(lambda: bool(client.transport.written), TURNS_MAX)
        await harness.turns(count=5)
        assert answers(client) == 2
        assert harness.stats("t")["ready"] == 0

    in_harness(scenario)


@pytest.mark.spec("G2")
@pytest.mark.parametrize("how", ["cut", "deleted", "stopped"])
def test_a_delete_by_management_between_two_portions(how: str) -> None:
    async def scenario(harness: Harness) -> None:
        for number in range(4 * REMOVED_PER_BATCH):
            harness.vhost.bind_queue("q", "amq.topic", f"k.{number}")
        client = await with_management(harness)
        request(client, 0, "DELETE", "/queues/q")
        await harness.turns(count=1)
        left = len(harness.vhost.topology.exchanges["amq.topic"].bindings)
        assert 0 < left < 4 * REMOVED_PER_BATCH
        if how == "cut":
            client.connection.connection_lost(None)
            await harness.turns(lambda: not harness.server.connections, TURNS_MAX)
            assert not harness.server.connections
        elif how == "deleted":
            harness.vhost.delete_queue("q")
            await harness.turns(lambda: bool(client.transport.written), TURNS_MAX)
            assert answers(client) == 1
        else:
            closing = asyncio.ensure_future(harness.server.close())
            await harness.turns(count=2)
            client.connection.connection_lost(None)
            await closing
            await harness.turns(lambda: not harness.registered, TURNS_MAX)
            assert not harness.registered
        assert harness.vhost.error is None

    in_harness(scenario)


def test_a_connection_that_is_gone_is_freed_without_the_collector() -> None:
    async def scenario(harness: Harness) -> None:
        client = await with_links(harness)
        client.connection.connection_lost(None)
        await until_left(harness)
        gone = weakref.ref(client.connection)
        del client
        await harness.turns(count=3)
        assert gone() is None

    gc.collect()
    gc.disable()
    try:
        in_harness(scenario)
    finally:
        gc.enable()
