"""ACLs of Kafka's admin tools: they are described as created, and decide before the broker's permissions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.raw import RawClient, batch_of
from tests.interop.server import Broker, running

from basaltmq.http_client import path
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e

WAIT_S = 60.0
TOPIC, GROUP, CLUSTER, TRANSACTION = 2, 3, 4, 5
ANY, DENY, ALLOW = 1, 2, 3
LITERAL, PREFIXED = 3, 4
ALL, READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE = 2, 3, 4, 5, 6, 7, 8
EVERY_TOPIC_OPERATION = sum(1 << each for each in (3, 4, 5, 6, 7, 8, 10, 11))


def user(broker: Broker, name: str, rights: str | None = None) -> str:
    """Create a user, without permissions in the virtual host if `rights` is None."""
    broker.call("PUT", path("users", name), {"password": "password", "tags": []})
    if rights is not None:
        patterns = {"configure": rights, "write": rights, "read": rights}
        broker.call("PUT", path("permissions", "/", name), patterns)
    return name


def connected(broker: Broker, name: str) -> RawClient:
    client = RawClient(broker.port("kafka"))
    assert client.ask(k.SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == e.NONE
    password = "guest" if name == "guest" else "password"
    raw = b"\0".join((b"", name.encode(), password.encode()))
    assert client.ask(k.SASL_AUTHENTICATE, 2, {"auth_bytes": raw})["error_code"] == e.NONE
    return client


def rule(name: str, of: str, operation: int, **other: Any) -> dict[str, Any]:
    return {
        "resource_type": TOPIC,
        "resource_name": of,
        "pattern_type": LITERAL,
        "principal": f"User:{name}",
        "host": "*",
        "operation": operation,
        "permission_type": ALLOW,
        **other,
    }


def create(broker: Broker, *rules: dict[str, Any]) -> list[int]:
    with connected(broker, "guest") as client:
        results = client.ask(k.CREATE_ACLS, 3, {"creations": list(rules)})["results"]
    return [each["error_code"] for each in results]


def code_of_write(client: RawClient, topic: str) -> int:
    code: int = client.produce(topic, batch_of(b"x"))["error_code"]
    return code


@pytest.fixture
def topic(kafka: Broker) -> Iterator[str]:
    with RawClient(kafka.port("kafka")) as client:
        client.create("ruled")
        yield "ruled"
        client.ask(k.DELETE_TOPICS, 5, {"topic_names": ["ruled"], "timeout_ms": 1000})


@pytest.mark.promise("P14")
def test_acls_are_described_as_they_were_created_and_deleted_by_filter(kafka: Broker) -> None:
    for name in ("ann", "ben"):
        user(kafka, name)
    address = f"127.0.0.1:{kafka.port('kafka')}"
    login = {"sasl.mechanism": "PLAIN", "sasl.username": "guest", "sasl.password": "guest"}
    admin = kafka_admin.AdminClient({"bootstrap.servers": address, "security.protocol": "SASL_PLAINTEXT", **login})
    types, patterns = kafka_admin.ResourceType, kafka_admin.ResourcePatternType
    operations, kinds = kafka_admin.AclOperation, kafka_admin.AclPermissionType
    made = [
        kafka_admin.AclBinding(types.TOPIC, "t", patterns.LITERAL, "User:ann", "*", operations.READ, kinds.ALLOW),
        kafka_admin.AclBinding(types.TOPIC, "t-", patterns.PREFIXED, "User:ann", "*", operations.WRITE, kinds.DENY),
        kafka_admin.AclBinding(types.GROUP, "*", patterns.LITERAL, "User:ben", "*", operations.ALL, kinds.ALLOW),
    ]

    def found(*given: Any) -> set[Any]:
        return set(admin.describe_acls(kafka_admin.AclBindingFilter(*given)).result(WAIT_S))

    everything = (types.ANY, None, patterns.ANY, None, None, operations.ANY, kinds.ANY)
    for _ in range(2):
        for done in admin.create_acls(made).values():
            done.result(WAIT_S)
    assert found(*everything) == set(made)
    assert found(types.TOPIC, "t-1", patterns.MATCH, None, None, operations.ANY, kinds.ANY) == {made[1]}
    assert found(types.ANY, None, patterns.ANY, "User:ben", None, operations.ANY, kinds.ANY) == {made[2]}
    assert found(types.ANY, None, patterns.ANY, None, "10.0.0.1", operations.ANY, kinds.ANY) == set()
    going = kafka_admin.AclBindingFilter(types.TOPIC, None, patterns.ANY, "User:ann", None, operations.ANY, kinds.ANY)
    (deleted,) = admin.delete_acls([going]).values()
    assert set(deleted.result(WAIT_S)) == set(made[:2])
    assert found(*everything) == {made[2]}


@pytest.mark.promise("P14")
def test_an_acl_allows_one_operation_on_one_topic(kafka: Broker, topic: str) -> None:
    name = user(kafka, "writer", "^$")
    with connected(kafka, name) as client:
        assert code_of_write(client, topic) == e.TOPIC_AUTHORIZATION_FAILED
        assert create(kafka, rule(name, topic, WRITE)) == [e.NONE]
        assert code_of_write(client, topic) == e.NONE
        assert client.fetch(topic, 0)["error_code"] == e.TOPIC_AUTHORIZATION_FAILED
        gone = client.ask(k.DELETE_TOPICS, 5, {"topic_names": [topic], "timeout_ms": 1000})
        assert gone["responses"][0]["error_code"] == e.TOPIC_AUTHORIZATION_FAILED
        metadata = client.ask(k.METADATA, 9, {"topics": [{"name": topic}], "include_topic_authorized_operations": True})
        shown = metadata["topics"][0]["topic_authorized_operations"]
    assert shown == 1 << WRITE | 1 << DESCRIBE


@pytest.mark.promise("P14")
def test_a_deny_wins_over_allows_and_permissions(kafka: Broker, topic: str) -> None:
    name = user(kafka, "denied", ".*")
    with connected(kafka, name) as client:
        assert code_of_write(client, topic) == e.NONE
        rules = [rule(name, "rul", WRITE, pattern_type=PREFIXED, permission_type=DENY), rule(name, "*", ALL)]
        assert create(kafka, *rules) == [e.NONE, e.NONE]
        assert code_of_write(client, topic) == e.TOPIC_AUTHORIZATION_FAILED
        assert client.fetch(topic, 0)["error_code"] == e.NONE


@pytest.mark.promise("P14")
def test_an_acl_of_a_group_does_not_cover_the_topic_of_its_name(kafka: Broker, topic: str) -> None:
    name = user(kafka, "member", "^$")
    assert create(kafka, rule(name, topic, READ, resource_type=GROUP)) == [e.NONE]
    with connected(kafka, name) as client:
        assert client.fetch(topic, 0)["error_code"] == e.TOPIC_AUTHORIZATION_FAILED
        described = {"groups": [topic], "include_authorized_operations": True}
        (group,) = client.ask(k.DESCRIBE_GROUPS, 5, described)["groups"]
        found = client.ask(k.FIND_COORDINATOR, 3, {"key": topic, "key_type": 0})
    assert group["error_code"] == found["error_code"] == e.NONE
    assert group["authorized_operations"] == 1 << READ | 1 << DESCRIBE


@pytest.mark.promise("P14")
def test_the_right_to_create_topics_is_one_of_the_cluster_or_of_a_name(kafka: Broker) -> None:
    for name, given in (
        ("maker", {"resource_type": CLUSTER}),
        ("namer", {"pattern_type": PREFIXED}),
        ("reader", {"operation": READ, "pattern_type": PREFIXED}),
    ):
        # A pattern of a permission that matches the name of the cluster gives no right to the cluster.
        user(kafka, name, "^kafka-cluster$")
        of = "kafka-cluster" if name == "maker" else "made-by-"
        assert create(kafka, {**rule(name, of, CREATE), **given}) == [e.NONE]
    codes = {}
    for name in ("maker", "namer", "reader"):
        with connected(kafka, name) as client:
            new = {"name": f"made-by-{name}", "num_partitions": 1, "replication_factor": 1}
            found = client.ask(k.CREATE_TOPICS, 5, {"topics": [new], "timeout_ms": 1000})
            codes[name] = found["topics"][0]["error_code"]
    assert codes == {"maker": e.NONE, "namer": e.NONE, "reader": e.TOPIC_AUTHORIZATION_FAILED}


@pytest.mark.promise("P14")
@pytest.mark.parametrize(
    "given",
    [
        {"principal": "User:*"},
        {"principal": "Group:x"},
        {"principal": "User:unknown"},
        {"host": "10.0.0.1"},
        {"resource_name": ""},
        {"resource_name": "x" * 1025},
        {"resource_type": 6},
        {"resource_type": CLUSTER, "resource_name": "kafka-cluster", "operation": ALTER},
        {"resource_type": CLUSTER, "operation": CREATE},
        {"resource_type": GROUP, "operation": WRITE},
        {"operation": 99},
        {"permission_type": ANY},
        {"pattern_type": 1},
        {"pattern_type": PREFIXED, "resource_name": "*"},
    ],
    ids=str,
)
def test_acls_that_cannot_be_are_refused(kafka: Broker, given: dict[str, Any]) -> None:
    user(kafka, "somebody", "^$")
    assert create(kafka, {**rule("somebody", "t", READ), **given}) == [e.INVALID_REQUEST]


@pytest.mark.promise("P14")
def test_operations_of_an_administrator_are_all(kafka: Broker, topic: str) -> None:
    with connected(kafka, "guest") as client:
        asked = {"topics": [{"name": topic}], "include_topic_authorized_operations": True}
        found = client.ask(k.METADATA, 9, {**asked, "include_cluster_authorized_operations": True})
        assert found["topics"][0]["topic_authorized_operations"] == EVERY_TOPIC_OPERATION
        cluster = client.ask(k.DESCRIBE_CLUSTER, 0, {"include_cluster_authorized_operations": True})
        bits = cluster["cluster_authorized_operations"]
        assert found["cluster_authorized_operations"] == bits
        assert bits & 1 << CREATE
        assert bits & 1 << ALTER
        unknown = client.ask(k.METADATA, 9, {"topics": [{"name": topic}]})["topics"][0]
        assert unknown["topic_authorized_operations"] == -(1 << 31)
    with connected(kafka, user(kafka, "plain", ".*")) as client:
        cluster = client.ask(k.DESCRIBE_CLUSTER, 0, {"include_cluster_authorized_operations": True})
        assert not cluster["cluster_authorized_operations"] & 1 << ALTER


@pytest.mark.promise("P14")
def test_acls_survive_a_restart_and_go_with_the_user(tmp_path: Path) -> None:
    flags = ("--kafka-enabled=true", "--kafka-port=0", "--fila-enabled=false")
    with running(tmp_path / "data", *flags) as broker:
        user(broker, "owner")
        with RawClient(broker.port("kafka")) as client:
            client.create("kept")
        assert create(broker, rule("owner", "kept", WRITE)) == [e.NONE]
    with running(tmp_path / "data", *flags) as broker:
        with connected(broker, "owner") as client:
            assert code_of_write(client, "kept") == e.NONE
        broker.call("DELETE", path("users", "owner"))
        user(broker, "owner", "^$")
        with connected(broker, "owner") as client:
            assert code_of_write(client, "kept") == e.TOPIC_AUTHORIZATION_FAILED


@pytest.mark.spec("B7")
def test_offsets_are_committed_and_fetched_by_topic_id(kafka: Broker, topic: str) -> None:
    with RawClient(kafka.port("kafka")) as client:
        topic_id = client.ask(k.METADATA, 10, {"topics": [{"name": topic}]})["topics"][0]["topic_id"]
        place = {"partition_index": 0, "committed_offset": 7, "committed_metadata": "here"}
        other = UUID(int=9)
        asked = [{"topic_id": each, "partitions": [place]} for each in (topic_id, other)]
        committed = client.ask(k.OFFSET_COMMIT, 10, {"group_id": "by-id", "member_id": "", "topics": asked})["topics"]
        codes = {each["topic_id"]: each["partitions"][0]["error_code"] for each in committed}
        assert codes == {topic_id: e.NONE, other: e.UNKNOWN_TOPIC_ID}

        def fetched(version: int, wanted: Any) -> Any:
            groups = [{"group_id": "by-id", "topics": wanted}]
            return client.ask(k.OFFSET_FETCH, version, {"groups": groups})["groups"][0]["topics"]

        for wanted in ([{"topic_id": topic_id, "partition_indexes": [0]}], None):
            (found,) = fetched(10, wanted)
            assert (found["topic_id"], found["partitions"][0]["committed_offset"]) == (topic_id, 7)
        assert fetched(9, None)[0]["name"] == topic
        (unknown,) = fetched(10, [{"topic_id": other, "partition_indexes": [0]}])
        assert unknown["partitions"][0]["error_code"] == e.UNKNOWN_TOPIC_ID
