"""Timeouts, heartbeats and backpressure of a connection, without sockets and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.fuzz.amqp091 import Harness, Transport
from tests.unit.protocols.amqp091.wire import frames, handshake, messages, publish

from basaltmq.protocols.amqp091.connection import Connection
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import NOT_ALLOWED, ConnectionFault
from basaltmq.protocols.amqp091.wire.frames import HEARTBEAT_FRAME
from basaltmq.protocols.amqp091.wire.method_codec import encode_method
from basaltmq.protocols.connection import CLOSE_S, WRITE_STOP_BYTES


class Socket(Transport):
    """A socket whose buffer size the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self._reads = True
        self.waiting_bytes = 0

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True

    def is_read(self) -> bool:
        return self._reads

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def sent(self) -> list[m.Method]:
        """Return the methods written since the last call."""
        raw, self.written = b"".join(self.written), []
        return [frame.method for frame in frames(raw) if frame.kind == 1]


async def opened(harness: Harness, heartbeat: int = 0) -> tuple[Connection, Socket]:
    connection, transport = Connection(harness.server), Socket()
    connection.connection_made(transport)  # type: ignore[arg-type]
    for step in [*handshake(131072, 100, heartbeat), encode_method(1, m.ChannelOpen())]:
        connection.data_received(step)
        await harness.settle()
    transport.sent()
    return connection, transport


def in_harness(scenario: Callable[[Harness], Awaitable[None]]) -> None:
    async def run() -> None:
        harness = Harness()
        try:
            await scenario(harness)
        finally:
            for connection in list(harness.server.connections):
                connection.connection_lost(None)
            await harness.close()

    asyncio.run(run())


def test_a_connection_without_a_handshake_is_closed_after_the_timeout() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = Connection(harness.server), Socket()
        connection.connection_made(transport)  # type: ignore[arg-type]
        for _ in range(harness.server.limits.handshake_s):
            connection.tick()
        assert not transport.closed
        connection.tick()
        assert transport.closed

    in_harness(scenario)


def test_heartbeats_are_sent_on_idle_connections() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = await opened(harness, heartbeat=10)
        for _ in range(20):
            connection.data_received(HEARTBEAT_FRAME)
            connection.tick()
        # Every five seconds, half of the negotiated interval. The first tick still belongs to the handshake.
        assert transport.written == [HEARTBEAT_FRAME] * 3
        transport.written.clear()
        for _ in range(20):
            connection.data_received(HEARTBEAT_FRAME + encode_method(1, m.BasicQos(0, 1, False)))
            connection.tick()
        assert HEARTBEAT_FRAME not in transport.written, "answers are heartbeats enough"

    in_harness(scenario)


def test_a_client_that_misses_two_heartbeats_is_disconnected() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = await opened(harness, heartbeat=10)
        for _ in range(20):
            connection.tick()
        assert not transport.closed
        for _ in range(3):
            connection.tick()
        assert transport.closed

    in_harness(scenario)


def test_idle_clients_stay_connected_without_heartbeats() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = await opened(harness, heartbeat=0)
        for _ in range(10_000):
            connection.tick()
        assert not transport.closed
        assert transport.written == []

    in_harness(scenario)


def test_a_client_that_does_not_confirm_a_close_is_disconnected() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = await opened(harness)
        connection.end(ConnectionFault(NOT_ALLOWED, "out"))
        await harness.settle()
        (close,) = transport.sent()
        assert isinstance(close, m.ConnectionClose)
        for _ in range(CLOSE_S):
            connection.tick()
        assert not transport.closed
        connection.tick()
        assert transport.closed

    in_harness(scenario)


@pytest.mark.promise("P8")
def test_deliveries_pause_while_a_client_does_not_read() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = await opened(harness)
        other, _ = await opened(harness)
        connection.data_received(encode_method(1, m.BasicConsume(0, "a", "t", False, True, False, False, {})))
        await harness.settle()
        transport.sent()
        connection.pause_writing()
        connection.data_received(encode_method(1, m.BasicConsume(0, "b", "u", False, True, False, False, {})))
        other.data_received(publish(b"1", key="a") + publish(b"2", key="b"))
        await harness.settle(turns=20)
        assert transport.sent() == [m.BasicConsumeOk("u")]
        connection.resume_writing()
        await harness.settle(turns=20)
        raw = b"".join(transport.written)
        assert sorted(message.body for message in messages(frames(raw))) == [b"1", b"2"]

    in_harness(scenario)


@pytest.mark.promise("P8")
def test_reading_pauses_while_a_client_does_not_read_its_responses() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = await opened(harness)
        connection.pause_writing()
        transport.waiting_bytes = WRITE_STOP_BYTES
        connection.data_received(encode_method(1, m.BasicQos(0, 1, False)))
        assert transport.is_read(), "a little more than usual is no reason to stop"
        transport.waiting_bytes = WRITE_STOP_BYTES + 1
        connection.data_received(encode_method(1, m.BasicQos(0, 1, False)))
        assert not transport.is_read()
        for _ in range(100):
            connection.tick()
        transport.waiting_bytes = 0
        connection.resume_writing()
        assert transport.is_read()

    in_harness(scenario)


@pytest.mark.spec("A11")
def test_publishers_of_a_blocked_vhost_are_notified_and_paused() -> None:
    async def scenario(harness: Harness) -> None:
        publisher, transport = await opened(harness, heartbeat=10)
        reader, reading = await opened(harness)
        publisher.data_received(publish(b"before", key="a"))
        harness.server._blocked_changed("/", "no room")
        await harness.settle()
        assert transport.sent() == [m.ConnectionBlocked("no room")]
        assert not transport.is_read()
        assert reading.is_read(), "who does not publish is left alone"
        for _ in range(60):
            publisher.tick()
        assert not transport.closed, "a client that is not read cannot be told from a silent one"
        # A client that starts to publish is blocked after its first message, which is accepted.
        reader.data_received(publish(b"first", key="a"))
        assert not reading.is_read()
        harness.server._blocked_changed("/", None)
        await harness.settle()
        assert transport.is_read()
        assert reading.is_read()
        assert m.ConnectionUnblocked() in transport.sent()
        assert harness.vhost.declare_queue("a", passive=True).messages == 2

    in_harness(scenario)


def test_an_internal_error_closes_only_its_connection() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = await opened(harness)
        other, others = await opened(harness)

        def fail(_channel: object, _method: object) -> None:
            raise RuntimeError("a bug")

        connection.handlers = {**connection.handlers, m.BasicQos: fail}
        connection.data_received(encode_method(1, m.BasicQos(0, 1, False)))
        (close,) = transport.sent()
        assert isinstance(close, m.ConnectionClose)
        assert close.reply_code == 541
        assert "a bug" not in close.reply_text
        other.data_received(encode_method(1, m.BasicQos(0, 1, False)))
        assert others.sent() == [m.BasicQosOk()]

    in_harness(scenario)


def test_a_failed_virtual_host_closes_its_connections() -> None:
    async def scenario(harness: Harness) -> None:
        connection, transport = await opened(harness)
        connection.data_received(encode_method(1, m.BasicConsume(0, "a", "t", False, False, False, False, {})))
        harness.vhost.fail(OSError("the disk is gone"))
        await harness.settle()
        close = transport.sent()[-1]
        assert isinstance(close, m.ConnectionClose)
        assert close.reply_code == 320
        connection.connection_lost(None)
        assert not harness.server.connections

    in_harness(scenario)
