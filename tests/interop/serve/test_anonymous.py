"""Clients without credentials: on loopback only, with the permissions of one user, never an administrator."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.interop.fila.conftest import Admin
from tests.interop.kafka.raw import RawClient
from tests.interop.server import Broker, running

from basaltmq.http_client import path
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e

CREDENTIAL = {"name": "guest", "mechanism": 1, "iterations": 4096, "salt": b"salt", "salted_password": b"x" * 32}
GIVE = {"deletions": [], "upsertions": [CREDENTIAL]}


def give_credential(client: RawClient) -> int:
    code: int = client.ask(k.ALTER_USER_SCRAM_CREDENTIALS, 0, GIVE)["results"][0]["error_code"]
    return code


def create_topic(client: RawClient, name: str) -> int:
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    answer = client.ask(k.CREATE_TOPICS, 2, {"topics": [topic], "timeout_ms": 5000, "validate_only": False})
    code: int = answer["topics"][0]["error_code"]
    return code


def verdict(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "ok"


def grpc_address(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('fila')}"


@pytest.mark.promise("P14")
def test_kafka_clients_may_administer_only_with_a_login(broker: Broker) -> None:
    with RawClient(broker.port("kafka")) as client:
        assert create_topic(client, "made-anonymously") == 0
        assert give_credential(client) == e.CLUSTER_AUTHORIZATION_FAILED
        reported = client.ask(k.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": None})
        assert reported["error_code"] == e.CLUSTER_AUTHORIZATION_FAILED
        assert client.ask(k.SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == 0
        assert client.ask(k.SASL_AUTHENTICATE, 2, {"auth_bytes": b"\0guest\0guest"})["error_code"] == 0
        assert give_credential(client) == 0


@pytest.mark.promise("P14")
def test_grpc_clients_without_credentials_may_use_queues_but_not_administer(broker: Broker) -> None:
    with grpc.insecure_channel(grpc_address(broker)) as channel:
        anonymous, guest = Admin(channel, is_anonymous=True), Admin(channel)
        assert verdict(lambda: anonymous.CreateQueue(name="made-anonymously")) == "ok"
        for call in (
            lambda: anonymous.CreateApiKey(name="k", is_superadmin=True),
            lambda: anonymous.ListApiKeys(),
            lambda: anonymous.SetConfig(key="a", value="b"),
            lambda: anonymous.ListConfig(prefix=""),
        ):
            assert verdict(call) == "PERMISSION_DENIED"
        made = guest.CreateApiKey(name="k", is_superadmin=True)
        assert Admin(channel, made.key).ListApiKeys().keys
        wrong = Admin(channel)
        wrong._metadata = [("authorization", "Basic " + base64.b64encode(b"guest:wrong").decode())]
        assert verdict(wrong.ListQueues) == "UNAUTHENTICATED"


@pytest.mark.promise("P14")
def test_anonymous_access_has_the_permissions_of_guest_while_it_exists(own_broker: Broker) -> None:
    broker = own_broker
    broker.call("PUT", path("users", "root"), {"password": "root", "tags": ["administrator"]})
    broker.call("PUT", path("permissions", "/", "guest"), {"configure": "^mine", "write": ".*", "read": ".*"})
    with RawClient(broker.port("kafka")) as client, grpc.insecure_channel(grpc_address(broker)) as channel:
        anonymous = Admin(channel, is_anonymous=True)
        assert create_topic(client, "mine") == 0
        assert create_topic(client, "other") == e.TOPIC_AUTHORIZATION_FAILED
        assert verdict(lambda: anonymous.CreateQueue(name="mine-q")) == "ok"
        assert verdict(lambda: anonymous.CreateQueue(name="other-q")) == "PERMISSION_DENIED"
        root = broker.api("root", "root")
        root.call("DELETE", path("users", "guest"))
        assert client.is_closed()
        assert verdict(anonymous.ListQueues) == "UNAUTHENTICATED"
        with RawClient(broker.port("kafka")) as late:
            late.post(k.METADATA, 0, {"topics": []})
            assert late.is_closed()


@pytest.mark.promise("P14")
def test_anonymous_access_can_be_turned_off(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--auth-anonymous-user=") as broker:
        with RawClient(broker.port("kafka")) as client:
            client.post(k.METADATA, 0, {"topics": []})
            assert client.is_closed()
        with grpc.insecure_channel(grpc_address(broker)) as channel:
            assert verdict(Admin(channel, is_anonymous=True).ListQueues) == "UNAUTHENTICATED"
            assert verdict(Admin(channel).ListQueues) == "ok"
