"""The input of one connection does not delay the others (P13): shares of turns, methods in portions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import count

import pytest
from tests.fuzz.amqp091 import Harness
from tests.unit.protocols.amqp091.test_connection import Socket, in_harness, opened
from tests.unit.protocols.amqp091.wire import publish

from basaltmq.broker.message import amqp_table
from basaltmq.broker.message.operations import SETTLE_PORTIONS
from basaltmq.broker.routing.policy import EffectivePolicy, Policy
from basaltmq.broker.routing.topology import REMOVED_PER_BATCH
from basaltmq.broker.scheduling.loop_shares import (
    FAN_OUT_DRAFT_S,
    FAN_OUT_QUEUE_S,
    FAN_OUT_S,
    SHARE_S_MIN,
    TURN_S,
    LoopShares,
)
from basaltmq.broker.vhost import VHost
from basaltmq.protocols.amqp091 import connection as connection_module
from basaltmq.protocols.amqp091 import transactions
from basaltmq.protocols.amqp091.channel import LARGE_BYTES_MIN, PROPERTIES_BYTE_S
from basaltmq.protocols.amqp091.connection import Connection
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.method_codec import encode_method
from basaltmq.queues.lifecycle.removal import PAGE

TURNS_MAX = 2000
LOOK_S = 0.001
"""Time by which each read advances the clock of these tests."""

PORTION = max(SETTLE_PORTIONS.values())
EVENTS_PER_TURN = int(TURN_S / LOOK_S)
pytestmark = pytest.mark.promise("P13")


def ticking(harness: Harness) -> None:
    """Use a clock with which every event takes a millisecond."""
    ticks = count()
    harness.server.shares = LoopShares(clock_s=lambda: next(ticks) * LOOK_S)


def bind(key: str) -> bytes:
    return encode_method(1, m.QueueBind(0, "a", "amq.topic", key, True, {}))


def declare(name: str = "b") -> bytes:
    return encode_method(1, m.QueueDeclare(0, name, passive=True, durable=False, exclusive=False, auto_delete=False,
                                           nowait=False, arguments={}))  # fmt: skip


def message(queue: str, body: bytes) -> bytes:
    return publish(body, key=queue)


def bindings(vhost: VHost) -> int:
    return len(vhost.topology.exchanges["amq.topic"].bindings)


async def until_answered(harness: Harness, socket: Socket, answer: type[m.Method]) -> int:
    """Return the number of turns until a response arrived."""
    for turn in range(TURNS_MAX):
        if any(type(method) is answer for method in socket.sent()):
            return turn
        await harness.settle(turns=1)
    raise AssertionError(f"no {answer.__name__} within {TURNS_MAX} turns")


def test_many_binds_are_split_over_turns_while_other_clients_are_served() -> None:
    async def scenario(harness: Harness) -> None:
        ticking(harness)
        flooding, flooded = await opened(harness)
        other, answered = await opened(harness)
        flooding.data_received(b"".join(bind(f"k.{n}") for n in range(1000)) + declare())
        assert 0 < bindings(harness.vhost) <= EVENTS_PER_TURN
        assert not flooded.is_read(), "what is not handled stays in the socket"
        before = bindings(harness.vhost)
        await harness.settle(turns=1)
        assert before < bindings(harness.vhost) <= before + EVENTS_PER_TURN
        other.data_received(declare())
        assert await until_answered(harness, answered, m.QueueDeclareOk) <= 1
        assert bindings(harness.vhost) < 500
        await until_answered(harness, flooded, m.QueueDeclareOk)
        assert bindings(harness.vhost) == 1000
        await harness.settle()
        assert flooded.is_read()

    in_harness(scenario)


@pytest.mark.parametrize("method", [m.QueuePurge(0, "a", True), m.BasicRecoverAsync(True), m.BasicNack(0, True, True)])
def test_many_slow_methods_are_split_over_turns(method: m.Method) -> None:
    async def scenario(harness: Harness) -> None:
        ticking(harness)
        connection, socket = await opened(harness)
        connection.data_received(encode_method(1, method) * 500 + declare())
        assert not socket.sent()
        assert harness.server.shares.behind == 1
        assert await until_answered(harness, socket, m.QueueDeclareOk) >= 500 // EVENTS_PER_TURN - 1

    in_harness(scenario)


def test_busy_connections_share_one_turn() -> None:
    async def scenario(harness: Harness) -> None:
        now_s = 0.0
        harness.server.shares = LoopShares(clock_s=lambda: now_s)
        taken: list[str] = []
        floods = [await opened(harness) for _ in range(20)]
        handle = harness.server.handlers[m.QueueBind]

        def slow(channel: object, method: m.QueueBind) -> None:
            nonlocal now_s
            now_s += SHARE_S_MIN
            taken.append(method.routing_key)
            handle(channel, method)

        harness.server.handlers[m.QueueBind] = slow
        for number, (connection, _) in enumerate(floods):
            connection.data_received(b"".join(bind(f"{number}.{n}") for n in range(500)))
        await harness.settle(turns=1)
        taken.clear()
        began_s = now_s
        await harness.settle(turns=1)
        assert len({key.partition(".")[0] for key in taken}) == 20, "everybody has a share"
        assert now_s - began_s <= TURN_S + 20 * SHARE_S_MIN

    in_harness(scenario)


def test_input_after_a_large_read_waits_for_the_next_turn() -> None:
    async def scenario(harness: Harness) -> None:
        connection, socket = await opened(harness)
        connection.data_received(message("a", b"x" * 100) * 1500)
        assert not socket.is_read()
        await harness.settle(turns=3)
        assert socket.is_read()
        await harness.settle()
        assert harness.vhost.queues.info(harness.vhost.queues.get("a")).messages == 1500

    in_harness(scenario)


FAN_OUT = 500
FANNED_TOGETHER = 1 + int((FAN_OUT_S / FAN_OUT - FAN_OUT_QUEUE_S - FAN_OUT_DRAFT_S) / FAN_OUT_DRAFT_S)
"""Number of such messages to many queues that fit into one batch."""


def fanning(harness: Harness) -> list[str]:
    names = [f"f{n}" for n in range(FAN_OUT)]
    for name in names:
        harness.vhost.declare_queue(name)
        harness.vhost.bind_queue(name, "amq.fanout", "")
    return names


def fan_outs(*bodies: bytes) -> bytes:
    return b"".join(publish(body, exchange="amq.fanout", key="") for body in bodies)


def bodies_in(harness: Harness, name: str) -> list[bytes]:
    return [message.payload for message in harness.vhost.plane.browse(name)]


def test_fan_outs_share_batches_and_leave_turns_in_between() -> None:
    async def scenario(harness: Harness) -> None:
        names = fanning(harness)
        harness.server.shares = LoopShares(clock_s=lambda: 0.0)
        connection, _ = await opened(harness)
        batches: list[int] = []
        flush = harness.vhost.tick.flush

        def flushing(*, for_turn: bool = False) -> None:
            batches.append(len(harness.vhost.tick.gathered.publishes))
            flush(for_turn=for_turn)

        harness.vhost.tick.flush = flushing  # type: ignore[method-assign]
        sent = [b"%d" % n for n in range(3 * FANNED_TOGETHER)]
        connection.data_received(fan_outs(*sent))
        turns = 0
        while sum(batches) < len(sent):
            await harness.settle(turns=1)
            turns += 1
            assert turns < TURNS_MAX
        assert batches == [FANNED_TOGETHER] * 3, "one message per batch would cost four times as much"
        assert turns >= 2 * int(FAN_OUT_S / TURN_S), "turns without a fan-out follow each batch"
        for name in (names[0], names[-1]):
            assert bodies_in(harness, name) == sent, "in order, none twice"

    in_harness(scenario)


def test_publishers_of_fan_outs_alternate_and_share_their_debt() -> None:
    async def scenario(harness: Harness) -> None:
        names = fanning(harness)
        harness.server.shares = LoopShares(clock_s=lambda: 0.0)
        publishers = [await opened(harness) for _ in range(3)]
        for number, (connection, _) in enumerate(publishers):
            connection.data_received(fan_outs(*[b"%d" % number] * 2 * FANNED_TOGETHER))
        assert len(harness.vhost.tick.gathered.publishes) == FANNED_TOGETHER, "one turn has time for one of them"
        for _ in range(TURNS_MAX):
            await harness.settle(turns=1)
            if len(bodies_in(harness, names[0])) == 6 * FANNED_TOGETHER:
                break
        runs = bodies_in(harness, names[0])[::FANNED_TOGETHER]
        assert runs == [b"0", b"0", b"1", b"2", b"1", b"2"], "the first lines up first; from then on in turns"

    in_harness(scenario)


def test_small_fan_outs_do_not_overtake_waiting_ones() -> None:
    async def scenario(harness: Harness) -> None:
        names = fanning(harness)
        harness.vhost.bind_queue(names[0], "amq.topic", "few")
        harness.vhost.bind_queue(names[1], "amq.topic", "few")
        harness.server.shares = LoopShares(clock_s=lambda: 0.0)
        large, _ = await opened(harness)
        small, _ = await opened(harness)
        large.data_received(fan_outs(*[b"l"] * 2 * FANNED_TOGETHER))
        small.data_received(publish(b"s", exchange="amq.topic", key="few") * 3)
        for _ in range(TURNS_MAX):
            await harness.settle(turns=1)
            if b"s" in bodies_in(harness, names[0]):
                break
        assert bodies_in(harness, names[0])[: 2 * FANNED_TOGETHER] == [b"l"] * 2 * FANNED_TOGETHER

    in_harness(scenario)


def test_a_disconnected_publisher_of_fan_outs_does_not_block_others() -> None:
    async def scenario(harness: Harness) -> None:
        names = fanning(harness)
        harness.server.shares = LoopShares(clock_s=lambda: 0.0)
        leaving, _ = await opened(harness)
        staying, _ = await opened(harness)
        leaving.data_received(fan_outs(*[b"l"] * 3 * FANNED_TOGETHER))
        staying.data_received(fan_outs(b"s"))
        leaving.connection_lost(None)
        for _ in range(TURNS_MAX):
            await harness.settle(turns=1)
            if b"s" in bodies_in(harness, names[0]):
                break
        assert bodies_in(harness, names[0]) == [b"l"] * FANNED_TOGETHER + [b"s"]
        await harness.settle()
        assert harness.server.shares.owed_s == 0
        assert harness.server.shares.behind == 0

    in_harness(scenario)


def test_a_purge_yields_to_others_and_deletes_only_existing_messages() -> None:
    async def scenario(harness: Harness) -> None:
        ticking(harness)
        purging, purged = await opened(harness)
        other, answered = await opened(harness)
        size = 15 * PAGE
        for _ in range(0, size, 5000):
            other.data_received(message("c", b"x") * 5000)
            await harness.settle(turns=600)
        assert harness.vhost.queues.info(harness.vhost.queues.get("c")).messages == size
        purging.data_received(encode_method(1, m.QueuePurge(0, "c", False)))
        assert not purged.sent()
        other.data_received(message("c", b"later") + declare())
        assert await until_answered(harness, answered, m.QueueDeclareOk) <= 3
        assert not purged.sent()
        await until_answered(harness, purged, m.QueuePurgeOk)
        assert [message.payload for message in harness.vhost.plane.browse("c")] == [b"later"]

    in_harness(scenario)


def test_deleting_a_queue_with_many_bindings_yields_to_others() -> None:
    async def scenario(harness: Harness) -> None:
        ticking(harness)
        for number in range(20 * REMOVED_PER_BATCH):
            harness.vhost.bind_queue("a", "amq.topic", f"k.{number}")
        deleting, deleted = await opened(harness)
        other, answered = await opened(harness)
        deleting.data_received(encode_method(1, m.QueueDelete(0, "a", False, False, False)))
        assert 0 < bindings(harness.vhost) < 20 * REMOVED_PER_BATCH
        other.data_received(declare())
        assert await until_answered(harness, answered, m.QueueDeclareOk) <= 1
        assert bindings(harness.vhost)
        await until_answered(harness, deleted, m.QueueDeleteOk)
        assert not bindings(harness.vhost)
        assert "a" not in harness.vhost.queues.by_name

    in_harness(scenario)


async def with_unacked(harness: Harness, number: int) -> tuple[Connection, Socket]:
    connection, socket = await opened(harness)
    for _ in range(0, number, 1000):
        connection.data_received(message("a", b"x") * 1000)
        await harness.settle(turns=50)
    consume = m.BasicConsume(0, "a", "t", False, False, False, False, {})
    connection.data_received(encode_method(1, consume))
    for _ in range(TURNS_MAX):
        if len(connection.channels[1].unacked) == number:
            break
        await harness.settle(turns=1)
    connection.data_received(encode_method(1, m.BasicCancel("t", False)))
    socket.sent()
    return connection, socket


def leased(harness: Harness) -> int:
    return harness.vhost.plane.stats("a")["leased"]


@pytest.mark.parametrize(
    ("method", "ready"),
    [
        (m.BasicAck(0, True), 0),
        (m.BasicNack(0, True, True), 5 * PORTION),
        (m.BasicNack(0, True, False), 0),
        (m.BasicRecover(True), 5 * PORTION),
    ],
)
def test_settling_many_deliveries_is_split_and_completes_before_the_next_method(method: m.Method, ready: int) -> None:
    async def scenario(harness: Harness) -> None:
        connection, socket = await with_unacked(harness, 5 * PORTION)
        assert leased(harness) == 5 * PORTION
        connection.data_received(encode_method(1, method) + declare("a"))
        await harness.settle(turns=1)
        assert 3 * PORTION <= leased(harness) < 5 * PORTION
        for _ in range(TURNS_MAX):
            reported = [each for each in socket.sent() if isinstance(each, m.QueueDeclareOk)]
            if reported:
                break
            await harness.settle(turns=1)
        assert reported[0].message_count == ready
        assert leased(harness) == 0

    in_harness(scenario)


def test_a_lost_connection_requeues_its_deliveries_in_portions() -> None:
    async def scenario(harness: Harness) -> None:
        harness.vhost.tick.chores._clock_s = count().__next__
        connection, _ = await with_unacked(harness, 5 * PORTION)
        connection.connection_lost(None)
        await harness.settle(turns=1)
        assert 0 < leased(harness) < 5 * PORTION
        await harness.settle(lambda: not leased(harness), turns=TURNS_MAX)
        assert harness.vhost.plane.stats("a")["ready"] == 5 * PORTION

    in_harness(scenario)


def test_an_unknown_tag_is_refused_also_behind_many_deliveries() -> None:
    async def scenario(harness: Harness) -> None:
        connection, socket = await with_unacked(harness, 2 * PORTION)
        connection.data_received(encode_method(1, m.BasicAck(2 * PORTION + 1, True)))
        await until_answered(harness, socket, m.ChannelClose)
        await harness.settle(lambda: not leased(harness), turns=TURNS_MAX)
        assert harness.vhost.plane.stats("a")["ready"] == 2 * PORTION

    in_harness(scenario)


def test_exclusive_queues_of_a_lost_connection_are_deleted_in_portions() -> None:
    async def scenario(harness: Harness) -> None:
        harness.vhost.tick.chores._clock_s = count().__next__
        connection, _ = await opened(harness)
        for number in range(300):
            harness.vhost.declare_queue(f"mine{number}", exclusive=True, owner=connection)
        connection.connection_lost(None)
        left = len(harness.vhost.queues.by_name)
        assert 3 < left < 303
        await harness.settle(turns=1)
        assert len(harness.vhost.queues.by_name) < left
        await harness.settle(lambda: len(harness.vhost.queues.by_name) == 3, turns=TURNS_MAX)
        assert set(harness.vhost.queues.by_name) == {"a", "b", "c"}

    in_harness(scenario)


def test_a_policy_is_applied_to_many_queues_in_portions() -> None:
    async def scenario(harness: Harness) -> None:
        harness.vhost.tick.chores._clock_s = count().__next__
        for number in range(500):
            harness.vhost.declare_queue(f"p{number}")
        harness.vhost.policies.set(Policy("short", "^p", {"max-length": 5}, 0, "queues"))

        def reached() -> int:
            return sum(queue.settings.length_max == 5 for queue in harness.vhost.queues)

        assert 0 < reached() < 500
        await harness.settle(lambda: reached() == 500, turns=TURNS_MAX)
        assert reached() == 500

    in_harness(scenario)


@pytest.fixture
def quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("quiet_collector")
def test_a_closed_connection_is_freed_without_garbage_collection() -> None:
    """The collector freezes long-lived objects (cli/server/collector.py), and would not find a cycle of them."""

    async def scenario(harness: Harness) -> None:
        connection, socket = await opened(harness)
        connection.data_received(message("a", b"x") + declare())
        await harness.settle(turns=20)
        connection.connection_lost(None)
        await harness.settle(turns=5)
        gone = weakref.ref(connection)
        del connection, socket
        assert gone() is None

    in_harness(scenario)


def test_only_large_messages_wait_while_the_store_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(harness: Harness) -> None:
        is_behind = True
        monkeypatch.setattr(harness.vhost.store, "is_behind", lambda: is_behind)
        monkeypatch.setattr(connection_module, "DELAY_S", 0.0)
        flooding, _ = await opened(harness)
        other, _ = await opened(harness)
        flooding.data_received(message("a", b"x" * LARGE_BYTES_MIN) * 3)
        other.data_received(message("b", b"x" * (LARGE_BYTES_MIN - 1)))
        await harness.settle(lambda: harness.vhost.queues.by_name["b"].published == 1, turns=TURNS_MAX)
        await harness.settle(turns=50)
        assert harness.vhost.queues.by_name["a"].published == 0
        is_behind = False
        await harness.settle(lambda: harness.vhost.queues.by_name["a"].published == 3, turns=TURNS_MAX)
        assert harness.vhost.queues.by_name["a"].published == 3

    in_harness(scenario)


def test_messages_with_large_headers_are_charged_like_a_fan_out() -> None:
    async def scenario(harness: Harness) -> None:
        flooding, _ = await opened(harness)
        other, _ = await opened(harness)
        properties = b"\x20\0" + amqp_table.encode({f"h{number:05}": "x" * 20 for number in range(4000)})
        assert len(properties) * PROPERTIES_BYTE_S > FAN_OUT_S / 2
        channel = flooding.channels[1]
        flooding.data_received(publish(b"x", key="a", properties=properties, frame_max=131072) * 5)
        assert channel.published == 1
        other.data_received(message("b", b"y"))
        await harness.settle(turns=2)
        assert harness.vhost.queues.by_name["b"].published == 1
        assert channel.published == 1
        await harness.settle(lambda: channel.published == 5, turns=TURNS_MAX)
        assert channel.published == 5
        for number in range(2000):
            harness.vhost.declare_queue(f"f{number}")
            harness.vhost.bind_queue(f"f{number}", "amq.fanout", "")
        both = publish(b"x", exchange="amq.fanout", key="", properties=properties, frame_max=131072)
        flooding.data_received(both * 2)
        await harness.settle(lambda: channel.published == 7, turns=TURNS_MAX)
        assert channel.published == 7, "a message that exceeds the limit in both ways is published"

    in_harness(scenario)


def test_a_transaction_is_limited_by_the_copies_of_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "TRANSACTION_COPIES_MAX", 10)

    async def scenario(harness: Harness) -> None:
        for number in range(5):
            harness.vhost.declare_queue(f"f{number}")
            harness.vhost.bind_queue(f"f{number}", "amq.fanout", "")
        connection, socket = await opened(harness)
        connection.data_received(encode_method(1, m.TxSelect()))
        connection.data_received(publish(b"x", exchange="amq.fanout", key="") * 2)
        connection.data_received(encode_method(1, m.TxCommit()))
        await harness.settle(lambda: harness.vhost.plane.stats("f4")["ready"] == 2, turns=TURNS_MAX)
        assert not any(isinstance(each, m.ConnectionClose) for each in socket.sent())
        connection.data_received(publish(b"x", exchange="amq.fanout", key="") * 3)
        await harness.settle(turns=20)
        (close,) = [each for each in socket.sent() if isinstance(each, m.ConnectionClose)]
        assert "10 messages, counted once per queue" in close.reply_text
        assert harness.vhost.plane.stats("f4")["ready"] == 2

    in_harness(scenario)


def test_a_policy_is_applied_to_many_exchanges_in_portions_until_a_newer_one_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(harness: Harness) -> None:
        harness.vhost.tick.chores._clock_s = count().__next__
        monkeypatch.setattr("basaltmq.broker.vhost.CHORES_S", 0.0)
        for number in range(500):
            harness.vhost.declare_exchange(f"p{number}", "topic")
        applied: list[str] = []
        of_exchange = harness.vhost.policies.of_exchange

        def counting(name: str) -> EffectivePolicy:
            applied.append(name)
            return of_exchange(name)

        monkeypatch.setattr(harness.vhost.policies, "of_exchange", counting)

        def reached(name: str) -> int:
            return sum(exchange.policy == name for exchange in harness.vhost.topology.exchanges.values())

        for name, priority in (("one", 0), ("two", 1)):
            harness.vhost.policies.set(Policy(name, "^p", {"alternate-exchange": "x"}, priority, "exchanges"))
            assert reached(name) <= 100
        assert len(harness.vhost.tick.chores._waiting) == 2
        await harness.settle(lambda: reached("two") == 500, turns=TURNS_MAX)
        assert reached("two") == 500
        await harness.settle(turns=20)
        assert len(applied) < 700, "the first policy was not applied to all of them"

    in_harness(scenario)
