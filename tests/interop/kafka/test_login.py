"""Logins: SASL PLAIN and SCRAM with the broker's users, their permissions, and TLS."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.kafka.raw import RawClient
from tests.interop.server import Broker, running

from basaltmq.http_client import path
from basaltmq.protocols.kafka.wire import api as k

FILES = Path(__file__).parents[2] / "fixtures" / "tls"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Start a broker that requires a login, over TLS."""
    folder = tmp_path_factory.mktemp("kafka-doors")
    flags = (
        f"--tls-certificate={FILES / 'server.pem'}",
        f"--tls-key={FILES / 'server.key'}",
        "--kafka-enabled=true",
        "--kafka-port=0",
        "--kafka-tls=true",
        "--kafka-access=users",
        "--fila-enabled=false",
    )
    with running(folder / "data", *flags) as broker:
        broker.call("PUT", path("users", "alice"), {"password": "secret", "tags": []})
        rights = {"configure": "^alice", "write": "^alice", "read": "^alice"}
        broker.call("PUT", path("permissions", "/", "alice"), rights)
        yield broker


def settings(broker: Broker, password: str = "secret", **more: str) -> dict[str, Any]:  # noqa: S107
    return {
        "bootstrap.servers": f"localhost:{broker.port('kafka')}",
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(FILES / "authority.pem"),
        "ssl.endpoint.identification.algorithm": "none",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": password,
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def test_a_user_logs_in_over_tls_with_its_permissions(closed: Broker) -> None:
    producer = confluent_kafka.Producer(settings(closed))
    results: dict[str, Any] = {}
    producer.produce("alice-1", b"mine", on_delivery=lambda error, _: results.update(mine=error))
    assert producer.flush(WAIT_S) == 0
    assert results == {"mine": None}
    # librdkafka reports it on produce if it knows by then, otherwise with the delivery.
    try:
        producer.produce("bobs", b"not mine", on_delivery=lambda error, _: results.update(bobs=error))
        producer.flush(WAIT_S)
    except confluent_kafka.KafkaException as error:
        results["bobs"] = error.args[0]
    assert results["bobs"].code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED
    consumer = confluent_kafka.Consumer(
        {**settings(closed), "group.id": "alice-group", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["alice-1"])
    try:
        message = consumer.poll(WAIT_S)
        assert message is not None
        assert message.value() == b"mine"
    finally:
        consumer.close()


def test_a_wrong_password_is_refused(closed: Broker) -> None:
    reported: list[Any] = []
    admin = kafka_admin.AdminClient({**settings(closed, "wrong"), "error_cb": reported.append})
    until = time.monotonic() + WAIT_S
    while not any(each.code() == confluent_kafka.KafkaError._AUTHENTICATION for each in reported):
        assert time.monotonic() < until, reported
        with pytest.raises(confluent_kafka.KafkaException):
            admin.list_topics(timeout=3)
        admin.poll(1)


def test_nothing_is_answered_before_authentication(tmp_path: Path) -> None:
    flags = ("--kafka-enabled=true", "--kafka-port=0", "--kafka-access=users", "--fila-enabled=false")
    with running(tmp_path / "data", *flags) as broker:
        with RawClient(broker.port("kafka")) as client:
            assert client.ask(k.API_VERSIONS, 0, {})["error_code"] == 0
            client.post(k.METADATA, 0, {"topics": []})
            assert client.is_closed()
        with RawClient(broker.port("kafka")) as client:
            assert client.ask(k.SASL_HANDSHAKE, 0, {"mechanism": "PLAIN"})["error_code"] == 0
            client.send(b"\0\0\0\x0c\0guest\0guest")
            assert client.frame() == b""
            assert client.ask(k.METADATA, 0, {"topics": []})["brokers"]
        with RawClient(broker.port("kafka")) as client:
            client.send(b"\0\x10\0\0")
            assert client.is_closed()


def test_a_connection_without_login_is_closed_after_the_handshake_timeout(tmp_path: Path) -> None:
    flags = ("--kafka-enabled=true", "--kafka-port=0", "--kafka-access=users", "--fila-enabled=false")
    with (
        running(tmp_path / "data", *flags, "--limits-handshake-timeout-ms=200") as broker,
        RawClient(broker.port("kafka")) as client,
    ):
        assert client.is_closed()


def test_a_scram_login_works_until_the_password_changes(closed: Broker) -> None:
    closed.call("PUT", path("users", "carol"), {"password": "first", "tags": []})
    closed.call("PUT", path("permissions", "/", "carol"), {"configure": ".*", "write": ".*", "read": ".*"})
    guest = kafka_admin.AdminClient(settings(closed, "guest", sasl_username="guest"))
    kinds = (kafka_admin.ScramMechanism.SCRAM_SHA_256, kafka_admin.ScramMechanism.SCRAM_SHA_512)
    given = [
        kafka_admin.UserScramCredentialUpsertion("carol", kafka_admin.ScramCredentialInfo(kind, 4096), b"first")
        for kind in kinds
    ]
    for done in guest.alter_user_scram_credentials(given).values():
        done.result(WAIT_S)
    reported = guest.describe_user_scram_credentials(["carol"])["carol"].result(WAIT_S)
    assert {each.mechanism for each in reported.scram_credential_infos} == set(kinds)

    def topics(mechanism: str, password: str, wait_s: float = WAIT_S) -> Any:
        made = settings(closed, password, sasl_username="carol", sasl_mechanism=mechanism)
        return kafka_admin.AdminClient(made).list_topics(timeout=wait_s)

    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
        assert topics(mechanism, "first").brokers
    with pytest.raises(confluent_kafka.KafkaException):
        topics("SCRAM-SHA-256", "wrong", 1)
    carol = kafka_admin.AdminClient(settings(closed, "first", sasl_username="carol"))
    with pytest.raises(confluent_kafka.KafkaException):
        carol.alter_user_scram_credentials(given[:1])["carol"].result(WAIT_S)
    closed.call("PUT", path("users", "carol"), {"password": "second", "tags": []})
    with pytest.raises(confluent_kafka.KafkaException):
        topics("SCRAM-SHA-256", "first", 1)
    assert topics("PLAIN", "second").brokers


def test_scram_works_with_raw_messages_of_early_clients(closed: Broker) -> None:
    salted = hashlib.pbkdf2_hmac("sha256", b"old", b"salt", 4096)
    closed.call("PUT", path("users", "dora"), {"password": "else", "tags": []})
    closed.call("PUT", path("permissions", "/", "dora"), {"configure": ".*", "write": ".*", "read": ".*"})
    context = ssl.create_default_context(cafile=str(FILES / "authority.pem"))
    context.check_hostname = False

    def encrypted() -> RawClient:
        client = RawClient(closed.port("kafka"))
        client._socket = context.wrap_socket(client._socket)
        return client

    with encrypted() as client:
        assert client.ask(k.SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 0
        assert client.ask(k.SASL_AUTHENTICATE, 2, {"auth_bytes": b"\0guest\0guest"})["error_code"] == 0
        row = {"name": "dora", "mechanism": 1, "iterations": 4096, "salt": b"salt", "salted_password": salted}
        asked = {"deletions": [], "upsertions": [row]}
        assert client.ask(k.ALTER_USER_SCRAM_CREDENTIALS, 0, asked)["results"][0]["error_code"] == 0
    with encrypted() as client:
        assert client.ask(k.SASL_HANDSHAKE, 0, {"mechanism": "SCRAM-SHA-256"})["error_code"] == 0
        first = b"n=dora,r=abc"
        client.send(struct.pack(">i", 3 + len(first)) + b"n,," + first)
        response = client.frame()
        nonce = response.split(b",")[0]
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        signed = b",".join((first, response, b"c=biws", nonce))
        signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
        proof = base64.b64encode(bytes(one ^ other for one, other in zip(client_key, signature, strict=True)))
        final = b"c=biws," + nonce + b",p=" + proof
        client.send(struct.pack(">i", len(final)) + final)
        assert client.frame().startswith(b"v=")
        assert client.ask(k.METADATA, 0, {"topics": []})["brokers"]
