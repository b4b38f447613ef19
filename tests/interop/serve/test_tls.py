"""TLS for AMQP and HTTP: client certificates, and renewal of the server certificate at runtime."""

from __future__ import annotations

import shutil
import signal
import ssl
import time
from pathlib import Path

import pika
import pytest
from tests.interop.server import POLL_S, Broker, running

from basaltmq.http_client import HttpClient, Login, path

FILES = Path(__file__).parents[2] / "fixtures" / "tls"
WAIT_S = 60


def test_amqp_and_http_over_tls_with_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    for name in ("server.pem", "server.key"):
        shutil.copy(FILES / name, tmp_path)
    flags = (
        f"--tls-certificate={tmp_path / 'server.pem'}",
        f"--tls-key={tmp_path / 'server.key'}",
        f"--tls-authority={FILES / 'authority.pem'}",
        "--tls-clients=ask",
        "--amqps-enabled=true",
        "--amqps-port=0",
        "--admin-tls=true",
    )
    with running(tmp_path / "data", *flags) as broker:
        trusting = ssl.create_default_context(cafile=str(FILES / "authority.pem"))
        assert body_through(broker, trusting, pika.PlainCredentials("guest", "guest")) == b"over TLS"
        api = admin(broker)
        assert api.get(path("health", "checks", "certificate-expiration", "1", "years"))["status"] == "ok"
        api.put(path("users", "alice"), {"password_hash": "", "tags": []})
        api.put(path("permissions", "/", "alice"), {"configure": ".*", "write": ".*", "read": ".*"})
        trusting.load_cert_chain(FILES / "client.pem", FILES / "client.key")
        assert body_through(broker, trusting, pika.credentials.ExternalCredentials()) == b"over TLS"
        before = shown(broker)
        shutil.copy(FILES / "expired.pem", tmp_path / "server.pem")
        broker.signal(signal.SIGHUP)
        until = time.monotonic() + WAIT_S
        while "reloaded" not in broker.log():
            assert time.monotonic() < until, broker.log()
            time.sleep(POLL_S)
        assert shown(broker) != before


def test_a_client_without_a_required_certificate_is_refused(tmp_path: Path) -> None:
    flags = (
        f"--tls-certificate={FILES / 'server.pem'}",
        f"--tls-key={FILES / 'server.key'}",
        f"--tls-authority={FILES / 'authority.pem'}",
        "--tls-clients=require",
        "--amqps-enabled=true",
        "--amqps-port=0",
    )
    with running(tmp_path / "data", *flags) as broker:
        trusting = ssl.create_default_context(cafile=str(FILES / "authority.pem"))
        with pytest.raises(pika.exceptions.AMQPError):
            body_through(broker, trusting, pika.PlainCredentials("guest", "guest"))
        trusting.load_cert_chain(FILES / "client.pem", FILES / "client.key")
        assert body_through(broker, trusting, pika.PlainCredentials("guest", "guest")) == b"over TLS"


def body_through(broker: Broker, context: ssl.SSLContext, credentials: object) -> bytes:
    parameters = pika.ConnectionParameters(
        "127.0.0.1",
        broker.port("amqps"),
        credentials=credentials,
        ssl_options=pika.SSLOptions(context, "localhost"),
    )
    connection = pika.BlockingConnection(parameters)
    try:
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "q", b"over TLS", pika.BasicProperties(delivery_mode=2))
        body: bytes = channel.basic_get("q", auto_ack=True)[2]
        return body
    finally:
        connection.close()


def admin(broker: Broker) -> HttpClient:
    server = f"https://localhost:{broker.port('admin')}"
    return HttpClient(Login(server, ca=(FILES / "authority.pem").read_text()))


def shown(broker: Broker) -> str:
    """Return the broker's certificate."""
    return ssl.get_server_certificate(("127.0.0.1", broker.port("amqps")), timeout=WAIT_S)
