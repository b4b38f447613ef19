"""AMQP over TLS, with passwords and with certificates of clients."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amqp
import pika
import pytest
from tests.interop.server import Broker, running

FILES = Path(__file__).parents[2] / "fixtures" / "tls"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    flags = [
        "--amqps-enabled=true",
        "--amqps-port=0",
        f"--tls-certificate={FILES / 'server.pem'}",
        f"--tls-key={FILES / 'server.key'}",
        f"--tls-authority={FILES / 'authority.pem'}",
        "--tls-clients=ask",
    ]
    with running(tmp_path_factory.mktemp("tls") / "data", *flags) as broker:
        broker.call("PUT", "/api/users/alice", {"password": "unused", "tags": ""})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        broker.call("PUT", "/api/permissions/%2F/alice", everything)
        yield broker


def connect(broker: Broker, credentials: Any, *, with_certificate: bool) -> Any:
    context = ssl.create_default_context(cafile=str(FILES / "authority.pem"))
    if with_certificate:
        context.load_cert_chain(FILES / "client.pem", FILES / "client.key")
    options = pika.SSLOptions(context, "localhost")
    parameters = pika.ConnectionParameters(
        "127.0.0.1", broker.port("amqps"), credentials=credentials, ssl_options=options, socket_timeout=30
    )
    return pika.BlockingConnection(parameters)


def round_trip(connection: Any) -> bytes:
    channel = connection.channel()
    queue = channel.queue_declare("", exclusive=True).method.queue
    body = bytes(range(256)) * 2000
    channel.basic_publish("", queue, body)
    got: bytes = channel.basic_get(queue, auto_ack=True)[2]
    connection.close()
    assert got == body
    return got


def test_password_login_over_tls(secured: Broker) -> None:
    assert round_trip(connect(secured, pika.PlainCredentials("guest", "guest"), with_certificate=False))


def test_a_client_certificate_identifies_its_user(secured: Broker) -> None:
    connection = connect(secured, pika.credentials.ExternalCredentials(), with_certificate=True)
    (seen,) = [each for each in secured.call("GET", "/api/connections") if each["user"] == "alice"]
    assert seen["ssl"] is True
    assert seen["auth_mechanism"] == "EXTERNAL"
    assert round_trip(connection)


def test_external_login_without_a_certificate_is_refused(secured: Broker) -> None:
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connect(secured, pika.credentials.ExternalCredentials(), with_certificate=False)


def test_a_certificate_of_no_user_does_not_hide_the_password_login(secured: Broker) -> None:
    """py-amqp prefers EXTERNAL if it is offered."""
    context = {"ca_certs": str(FILES / "authority.pem"), "certfile": str(FILES / "client.pem")}
    context |= {"keyfile": str(FILES / "client.key"), "server_hostname": "localhost"}

    def user_of_login() -> str:
        with amqp.Connection(f"127.0.0.1:{secured.port('amqps')}", "guest", "guest", ssl=context) as connection:
            connection.channel()
            (seen,) = secured.call("GET", "/api/connections")
            return str(seen["user"])

    assert user_of_login() == "alice"
    secured.call("DELETE", "/api/users/alice")
    assert user_of_login() == "guest"
