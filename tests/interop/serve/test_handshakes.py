"""Connections that never finish a handshake or a login end after `limits.handshake_timeout_ms`, on every listener."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpack import Encoder
from tests.interop.server import Broker, running

from basaltmq.protocols.grpc.http2 import frames as f

FILES = Path(__file__).parents[2] / "fixtures" / "tls"
TIMEOUT_MS = 500
CLOSED_S = 60.0
"""asyncio gives a TLS handshake 60 s by itself."""

LISTENERS = ("amqps", "kafka", "fila", "admin", "mqtts", "mqtt_ws", "rocketmq")
GRPC = f.PREFACE + f.settings([]) + f.SETTINGS_ACK
UPGRADE = (
    b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)
"""A WebSocket without an MQTT client."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    flags = (
        f"--tls-certificate={FILES / 'server.pem'}",
        f"--tls-key={FILES / 'server.key'}",
        "--amqps-enabled=true",
        "--amqps-port=0",
        "--mqtts-enabled=true",
        "--mqtts-port=0",
        "--mqtt-ws-tls=true",
        "--mqtt-access=users",
        "--kafka-tls=true",
        "--kafka-access=users",
        "--fila-tls=true",
        "--fila-access=keys",
        "--rocketmq-access=users",
        "--admin-tls=true",
        f"--limits-handshake-timeout-ms={TIMEOUT_MS}",
    )
    with running(tmp_path_factory.mktemp("handshakes") / "data", *flags) as broker:
        yield broker


def call(path: str) -> bytes:
    """Open a connection and a call whose request never comes."""
    fields = [(":method", "POST"), (":scheme", "https"), (":path", path), ("content-type", "application/grpc")]
    block = Encoder().encode([*fields, ("te", "trailers")])
    return GRPC + len(block).to_bytes(3, "big") + bytes((f.HEADERS, f.END_HEADERS)) + (1).to_bytes(4, "big") + block


def wait_closed(connection: socket.socket) -> None:
    connection.settimeout(CLOSED_S)
    began_s = time.monotonic()
    try:
        while connection.recv(65_536):
            assert time.monotonic() - began_s < CLOSED_S
    except ConnectionError:
        pass


@pytest.mark.parametrize("listener", LISTENERS)
def test_an_incomplete_tls_handshake_times_out(guarded: Broker, listener: str) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port(listener))) as connection:
        connection.sendall(b"\x16\x03\x01")
        wait_closed(connection)


@pytest.mark.parametrize(
    ("listener", "alpn", "opening"),
    [
        ("amqps", None, b""),
        ("amqps", None, b"AMQP\0\0\x09\x01"),
        ("kafka", None, b""),
        ("mqtts", None, b""),
        ("mqtts", None, b"\x10\x7f"),
        ("mqtt_ws", None, b""),
        ("mqtt_ws", None, b"GET /mqtt HTTP/1.1\r\nHost:"),
        ("mqtt_ws", None, UPGRADE),
        ("fila", "h2", b""),
        ("amqps", None, b"AMQP\0\1\0\0"),
        ("amqps", None, b"AMQP\3\1\0\0"),
        ("fila", "h2", GRPC),
        ("fila", "h2", call("/fila.v1.FilaService/Enqueue")),
        ("fila", "h2", call("/basalt.v1.Queues/OpenSession")),
        ("rocketmq", "h2", b""),
        ("rocketmq", "h2", GRPC),
        ("rocketmq", "h2", call("/apache.rocketmq.v2.MessagingService/SendMessage")),
    ],
)
def test_an_unauthenticated_client_is_disconnected(
    guarded: Broker, listener: str, alpn: str | None, opening: bytes
) -> None:
    context = ssl.create_default_context(cafile=str(FILES / "authority.pem"))
    context.check_hostname = False
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    with (
        socket.create_connection(("127.0.0.1", guarded.port(listener))) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(opening)
        wait_closed(connection)
