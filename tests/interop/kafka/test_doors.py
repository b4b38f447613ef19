"""Who is let in: SASL PLAIN through the broker's users, their permissions, TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.kafka.raw import RawClient
from tests.interop.server import Broker, running

from basaltmq.cli.api_client import path
from basaltmq.protocols.kafka import api as k

FILES = Path(__file__).parents[2] / "fixtures" / "tls"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that lets nobody in without a name, over TLS."""
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


def settings(broker: Broker, password: str = "secret") -> dict[str, Any]:  # noqa: S107
    return {
        "bootstrap.servers": f"localhost:{broker.port('kafka')}",
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(FILES / "authority.pem"),
        "ssl.endpoint.identification.algorithm": "none",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": password,
    }


def test_a_user_comes_in_over_tls_and_may_do_what_permissions_say(closed: Broker) -> None:
    producer = confluent_kafka.Producer(settings(closed))
    results: dict[str, Any] = {}
    producer.produce("alice-1", b"mine", on_delivery=lambda error, _: results.update(mine=error))
    assert producer.flush(WAIT_S) == 0
    assert results == {"mine": None}
    # librdkafka tells it when asked to produce if it knows by then, else with the delivery.
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
    told: list[Any] = []
    admin = kafka_admin.AdminClient({**settings(closed, "wrong"), "error_cb": told.append})
    with pytest.raises(confluent_kafka.KafkaException):
        admin.list_topics(timeout=3)
    admin.poll(1)
    assert any(each.code() == confluent_kafka.KafkaError._AUTHENTICATION for each in told), told


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


def test_who_does_not_say_who_they_are_in_time_is_sent_away(tmp_path: Path) -> None:
    flags = ("--kafka-enabled=true", "--kafka-port=0", "--kafka-access=users", "--fila-enabled=false")
    with (
        running(tmp_path / "data", *flags, "--limits-handshake-timeout-ms=200") as broker,
        RawClient(broker.port("kafka")) as client,
    ):
        assert client.is_closed()
