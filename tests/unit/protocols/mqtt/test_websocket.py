"""MQTT over WebSocket: real sockets, wsproto as the client, and a protocol inside that echoes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason

from basaltmq.broker.auth.web_hosts import WebHosts
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.protocols.mqtt.websocket import REQUEST_BYTES_MAX, WebSocketProtocol
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.decoder import Decoder, Limits
from basaltmq.protocols.mqtt.wire.encoder import encode

WAIT_S = 60.0
MESSAGE_BYTES_MAX = 100_000


class Echo(asyncio.Protocol):
    """The inner protocol: notes what it gets and sends it back."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.chunks: list[bytes] = []
        self.lost = asyncio.Event()
        self.is_echo = True
        self.pauses = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.chunks.append(data)
        if self.is_echo:
            self.transport.write(data)

    def pause_writing(self) -> None:
        self.pauses += 1

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


class Client:
    """A WebSocket client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.ws = WSConnection(ConnectionType.CLIENT)
        self._events: list[Event] = []

    async def handshake(self, target: str = "/mqtt", host: str = "localhost", **given: object) -> Event:
        origin = given.get("origin")
        headers = [] if origin is None else [(b"Origin", str(origin).encode())]
        subprotocols = cast("list[str]", given.get("subprotocols", ["mqtt"]))
        self.send(Request(host=host, target=target, subprotocols=subprotocols, extra_headers=headers))
        return await self.next()

    def send(self, *events: Event) -> None:
        self.writer.write(b"".join(self.ws.send(event) for event in events))

    async def next(self) -> Event:
        while not self._events:
            data = await asyncio.wait_for(self.reader.read(65_536), WAIT_S)
            self.ws.receive_data(data or None)
            self._events += self.ws.events()
        return self._events.pop(0)

    async def bytes_of(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            event = await self.next()
            assert isinstance(event, BytesMessage), event
            found += event.data
        return found


class Served:
    """A listener."""

    def __init__(self, port: int, inner: list[Echo]) -> None:
        self.port = port
        self.inner = inner
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        self.clients.append(Client(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]

    async def opened(self) -> tuple[Client, Echo]:
        client = await self.connect()
        assert isinstance(await client.handshake(), AcceptConnection)
        return client, self.inner[-1]


@asynccontextmanager
async def served(
    *configured: str, shares: LoopShares | None = None, handshake_s: float = WAIT_S
) -> AsyncIterator[Served]:
    inner: list[Echo] = []

    def make() -> Echo:
        inner.append(Echo())
        return inner[-1]

    listener = Served(0, inner)
    hosts, common = WebHosts("127.0.0.1", lambda: configured), shares or LoopShares()
    server = await asyncio.get_running_loop().create_server(
        lambda: WebSocketProtocol(make, hosts, common, message_bytes_max=MESSAGE_BYTES_MAX, handshake_s=handshake_s),
        "127.0.0.1",
        0,
    )
    try:
        listener.port = server.sockets[0].getsockname()[1]
        yield listener
    finally:
        server.close()
        for client in listener.clients:
            client.writer.transport.abort()
        for each in inner:
            if not each.lost.is_set():
                each.transport.abort()
                await asyncio.wait_for(each.lost.wait(), WAIT_S)


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        for _ in itertools.count():
            if check():
                return
            await asyncio.sleep(0)


def run(test: Callable[[Served], Awaitable[None]], *configured: str, **given: object) -> None:
    async def work() -> None:
        async with served(*configured, **given) as listener:  # type: ignore[arg-type]
            await test(listener)

    asyncio.run(work())


@pytest.mark.mqtt("MQTT-6.0.0-1", "MQTT-6.0.0-4", "MQTT-4.2-1")
def test_bytes_pass_in_both_directions_in_binary_frames() -> None:
    async def test(listener: Served) -> None:
        client = await listener.connect()
        accepted = await client.handshake(subprotocols=["other", "mqttv3.1", "mqtt"])
        assert isinstance(accepted, AcceptConnection)
        assert (accepted.subprotocol, accepted.extensions) == ("mqtt", [])
        for size in (1, 125, 126, 65_535, 65_536, MESSAGE_BYTES_MAX):
            payload = bytes(range(256)) * (size // 256 + 1)
            client.send(BytesMessage(data=payload[:size]))
            assert await client.bytes_of(size) == payload[:size]
        assert listener.inner[0].transport.get_extra_info("peername")[0] == "127.0.0.1"

    run(test)


def test_the_subprotocol_of_3_1_is_accepted() -> None:
    async def test(listener: Served) -> None:
        accepted = await (await listener.connect()).handshake(subprotocols=["mqttv3.1"])
        assert isinstance(accepted, AcceptConnection)
        assert accepted.subprotocol == "mqttv3.1"

    run(test)


@pytest.mark.mqtt("MQTT-6.0.0-2")
def test_packets_frames_and_reads_need_not_align() -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        raw = b"".join(
            client.ws.send(BytesMessage(data=b"%d;" % number, message_finished=number % 3 == 2)) for number in range(9)
        )
        for at in range(len(raw)):
            client.writer.write(raw[at : at + 1])
            await asyncio.sleep(0)
        expected = b"".join(b"%d;" % number for number in range(9))
        assert await client.bytes_of(len(expected)) == expected
        assert b"".join(echo.chunks) == expected

    run(test)


def test_frames_that_arrive_with_the_request_are_not_lost() -> None:
    async def test(listener: Served) -> None:
        client = await listener.connect()
        request = client.ws.send(Request(host="localhost", target="/mqtt", subprotocols=["mqtt"]))
        # A masked binary frame with an empty mask.
        client.writer.write(request + b"\x82\x83\0\0\0\0abc")
        assert isinstance(await client.next(), AcceptConnection)
        assert await client.bytes_of(3) == b"abc"

    run(test)


@pytest.mark.mqtt("MQTT-6.0.0-3")
@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"target": "/"}, 404),
        ({"target": "/mqtt/x"}, 404),
        ({"target": "/mqtt?x=1"}, 101),
        ({"subprotocols": []}, 400),
        ({"subprotocols": ["amqp"]}, 400),
        ({"host": "broker.example"}, 101),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost"}, 101),
        ({"origin": "https://app.example"}, 101),
        ({"origin": "http://evil.example", "host": "evil.example"}, 421),
        ({"origin": "http://app.example", "host": "broker.example"}, 421),
    ],
)
def test_invalid_handshakes_are_refused_with_a_fitting_status(given: dict[str, str], status: int) -> None:
    async def test(listener: Served) -> None:
        client = await listener.connect()
        event = await client.handshake(**given)
        if status == 101:
            assert isinstance(event, AcceptConnection)
            return
        assert isinstance(event, RejectConnection)
        assert event.status_code == status
        assert not listener.inner, "the inner protocol exists only after the handshake"
        while data := await asyncio.wait_for(client.reader.read(1000), WAIT_S):
            assert data

    run(test, "app.example")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"POST /mqtt HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", 405),
        (b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00\r\n\r\n", 400),
        (b"GET /mqtt HTTP/1.1\r\nX: " + b"x" * REQUEST_BYTES_MAX, 431),
        (
            b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: AAAA\r\nSec-WebSocket-Version: 8\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n",
            426,
        ),
        (
            b"GET /mqtt HTTP/1.1\r\nHost: \xff\xfe\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: AAAA\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: \xff\r\n\r\n",
            400,
        ),
        (
            b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Content-Length: 5\r\nSec-WebSocket-Key: AAAA\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\nhello",
            400,
        ),
    ],
)
def test_requests_without_an_upgrade_get_an_error_and_are_closed(request_bytes: bytes, status: int) -> None:
    async def test(listener: Served) -> None:
        client = await listener.connect()
        client.writer.write(request_bytes)
        answer = await asyncio.wait_for(client.reader.read(), WAIT_S)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert not listener.inner

    run(test)


def test_an_incomplete_handshake_times_out() -> None:
    async def test(listener: Served) -> None:
        client = await listener.connect()
        client.writer.write(b"GET /mqtt HTTP/1.1\r\n")
        assert await asyncio.wait_for(client.reader.read(), WAIT_S) == b""

    run(test, handshake_s=0.05)


async def close_code(client: Client) -> int:
    while not isinstance(event := await client.next(), CloseConnection):
        assert isinstance(event, BytesMessage)
    return event.code


@pytest.mark.mqtt("MQTT-6.0.0-1")
def test_a_text_frame_ends_the_connection() -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        client.send(TextMessage(data="hello"))
        assert await close_code(client) == CloseReason.UNSUPPORTED_DATA
        client.send(CloseConnection(code=CloseReason.UNSUPPORTED_DATA).response())
        await asyncio.wait_for(echo.lost.wait(), WAIT_S)
        assert echo.chunks == []

    run(test)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\x82\x03abc", CloseReason.PROTOCOL_ERROR),
        (b"\xc2\x80\0\0\0\0", CloseReason.PROTOCOL_ERROR),
        (b"\x83\x80\0\0\0\0", CloseReason.PROTOCOL_ERROR),
        (b"\x80\x80\0\0\0\0", CloseReason.PROTOCOL_ERROR),
        (b"\x09\x80\0\0\0\0", CloseReason.PROTOCOL_ERROR),
        (b"\x89\xfe\x00\x7e\0\0\0\0" + bytes(126), CloseReason.PROTOCOL_ERROR),
    ],
    ids=["unmasked", "reserved bit", "unknown opcode", "continuation of nothing", "ping in pieces", "long ping"],
)
def test_an_invalid_frame_ends_the_connection(raw: bytes, code: int) -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        client.writer.write(raw)
        assert await close_code(client) == code
        await asyncio.wait_for(echo.lost.wait(), WAIT_S)
        assert echo.chunks == []

    run(test)


def test_a_message_over_the_limit_ends_the_connection_although_each_frame_is_small() -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        for _ in range(MESSAGE_BYTES_MAX // 1000 + 1):
            client.send(BytesMessage(data=bytes(1000), message_finished=False))
        assert await close_code(client) == CloseReason.MESSAGE_TOO_BIG
        await asyncio.wait_for(echo.lost.wait(), WAIT_S)
        assert sum(map(len, echo.chunks)) <= MESSAGE_BYTES_MAX

    run(test)


def test_a_large_frame_is_forwarded_while_it_arrives() -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        raw = client.ws.send(BytesMessage(data=bytes(90_000)))
        client.writer.write(raw[:50_000])
        assert len(await client.bytes_of(40_000)) >= 40_000
        client.writer.write(raw[50_000:])
        await until(lambda: sum(map(len, echo.chunks)) == 90_000)

    run(test)


def test_pings_get_pongs_and_several_at_once_at_least_the_last_one() -> None:
    async def test(listener: Served) -> None:
        client, _ = await listener.opened()
        client.send(*(Ping(payload=b"%d" % number) for number in range(50)))
        answers: list[bytes] = []
        while not answers or answers[-1] != b"49":
            event = await client.next()
            assert isinstance(event, Pong)
            answers.append(bytes(event.payload))
        assert len(answers) < 50

    run(test)


def test_a_client_that_closes_gets_its_close_frame_back() -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        client.send(BytesMessage(data=b"last"), CloseConnection(code=CloseReason.GOING_AWAY))
        assert await close_code(client) == CloseReason.GOING_AWAY
        assert await asyncio.wait_for(client.reader.read(), WAIT_S) == b""
        await asyncio.wait_for(echo.lost.wait(), WAIT_S)

    run(test)


def test_the_server_closes_also_without_a_close_frame_of_the_client() -> None:
    async def test(listener: Served) -> None:
        for answers in (True, False):
            client, echo = await listener.opened()
            echo.transport.write(b"bye")
            echo.transport.close()
            assert echo.transport.is_closing()
            echo.transport.write(b"not sent")
            assert await client.bytes_of(3) == b"bye"
            event = await client.next()
            assert isinstance(event, CloseConnection)
            assert event.code == CloseReason.NORMAL_CLOSURE
            if answers:
                client.send(event.response())
            await asyncio.wait_for(echo.lost.wait(), WAIT_S)

    run(test)


def test_a_socket_that_ends_without_a_close_frame_ends_the_inner_connection() -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        client.writer.close()
        await asyncio.wait_for(echo.lost.wait(), WAIT_S)

    run(test)


def test_a_paused_inner_protocol_gets_no_data_until_it_resumes() -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        echo.is_echo = False
        echo.transport.pause_reading()
        echo.transport.pause_reading()
        client.send(*(BytesMessage(data=b"%d;" % number) for number in range(1000)))
        await client.writer.drain()
        await asyncio.sleep(0.05)
        assert echo.chunks == []
        echo.transport.resume_reading()
        expected = b"".join(b"%d;" % number for number in range(1000))
        await until(lambda: sum(map(len, echo.chunks)) >= len(expected))
        assert b"".join(echo.chunks) == expected

    run(test)


@pytest.mark.promise("P13")
def test_many_small_frames_are_handled_within_the_share_of_the_connection() -> None:
    now_s = 0.0

    def clock_s() -> float:
        # Each read of the clock advances it by 1 ms, so a share of at most 10 ms has at most ten frames.
        nonlocal now_s
        now_s += 0.001
        return now_s

    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        client.send(*(BytesMessage(data=b"%03d" % number) for number in range(300)))
        expected = b"".join(b"%03d" % number for number in range(300))
        assert await client.bytes_of(len(expected)) == expected
        assert max(map(len, echo.chunks)) <= 3 * 10
        assert shares.behind == 0
        # A connection that ends while frames wait is not counted any longer.
        client.send(*(BytesMessage(data=b"x") for _ in range(300)))
        await until(lambda: shares.behind > 0)
        echo.transport.abort()
        await asyncio.wait_for(echo.lost.wait(), WAIT_S)
        assert shares.behind == 0

    shares = LoopShares(clock_s=clock_s)
    run(test, shares=shares)


@pytest.mark.promise("P8")
def test_a_client_that_does_not_read_pauses_the_inner_protocol_and_gets_no_pongs() -> None:
    async def test(listener: Served) -> None:
        client, echo = await listener.opened()
        echo.is_echo = False
        echo.transport.set_write_buffer_limits(high=100_000, low=10_000)
        cast(asyncio.Transport, client.writer.transport).pause_reading()
        while not echo.pauses:
            echo.transport.write(bytes(50_000))
            await asyncio.sleep(0)
        size = echo.transport.get_write_buffer_size()
        assert size > 100_000
        for _ in range(2000):
            client.send(Ping(payload=bytes(100)))
        client.send(BytesMessage(data=b"x"))
        await client.writer.drain()
        await until(lambda: bool(echo.chunks))
        assert echo.transport.get_write_buffer_size() <= size

    run(test)


class Acceptor(Echo):
    """Accepts MQTT clients."""

    def data_received(self, data: bytes) -> None:
        decoder = self.__dict__.setdefault("decoder", Decoder(Limits()))
        for packet in decoder.feed(data):
            if isinstance(packet, p.Connect):
                self.transport.write(encode(p.Connack(), decoder.version))
            elif isinstance(packet, p.Publish):
                self.transport.writelines([encode(p.Puback(packet.packet_id), decoder.version), encode(packet, 5)])


def test_paho_connects_over_websocket() -> None:
    async def work() -> None:
        inner: list[Acceptor] = []

        def make() -> Acceptor:
            inner.append(Acceptor())
            return inner[-1]

        hosts = WebHosts("127.0.0.1", lambda: ())
        server = await asyncio.get_running_loop().create_server(
            lambda: WebSocketProtocol(
                make, hosts, LoopShares(), message_bytes_max=MESSAGE_BYTES_MAX, handshake_s=WAIT_S
            ),
            "127.0.0.1",
            0,
        )
        port = server.sockets[0].getsockname()[1]
        assert await asyncio.wait_for(asyncio.to_thread(paho_session, port), 2 * WAIT_S) == [b"y" * 20_000]
        server.close()
        await asyncio.wait_for(inner[0].lost.wait(), WAIT_S)

    asyncio.run(work())


def paho_session(port: int) -> list[bytes]:
    found: list[bytes] = []
    arrived = threading.Event()
    client = paho.Client(
        CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5, transport="websockets", reconnect_on_failure=False
    )

    def on_message(_client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        found.append(bytes(message.payload))
        arrived.set()

    client.on_message = on_message
    client.on_connect = lambda client, *_: client.publish("a/b", b"y" * 20_000, 1)
    client.connect("127.0.0.1", port)
    client.loop_start()
    arrived.wait(WAIT_S)
    client.disconnect()
    client.loop_stop()
    return found
