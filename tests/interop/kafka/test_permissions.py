"""Every Kafka API, called by a user without permission for the named objects: nothing is disclosed or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from tests.interop.kafka.raw import RawClient, batch_of, fetched, produced
from tests.interop.server import Broker

from basaltmq.http_client import path
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e

VICTIM = "victim"
"""Name of a topic, a group and a transactional id that the user must not touch."""

REFUSALS = frozenset(
    {
        e.TOPIC_AUTHORIZATION_FAILED,
        e.GROUP_AUTHORIZATION_FAILED,
        e.CLUSTER_AUTHORIZATION_FAILED,
        e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        e.UNKNOWN_TOPIC_ID,
        e.UNKNOWN_TOPIC_OR_PARTITION,  # hidden: the victim exists
    }
)
OPEN = frozenset(
    {
        k.API_VERSIONS,
        k.SASL_HANDSHAKE,
        k.SASL_AUTHENTICATE,
        k.DESCRIBE_CLUSTER,
        k.DESCRIBE_QUORUM,
        k.LIST_PARTITION_REASSIGNMENTS,
    }
)
"""APIs that name no object of the user."""

HIDING = frozenset(
    {k.LIST_GROUPS, k.LIST_TRANSACTIONS, k.DESCRIBE_LOG_DIRS, k.LIST_CONFIG_RESOURCES, k.DESCRIBE_TOPIC_PARTITIONS}
)
"""APIs that list; they leave out what the user may not see."""

TOPIC_RESOURCE, GROUP_RESOURCE = 2, 32
_TXN = {"transactional_id": VICTIM, "producer_id": 1, "producer_epoch": 0}
_MEMBER = {"group_id": VICTIM, "generation_id": 1, "member_id": "m"}
_COMMIT = [{"name": VICTIM, "partitions": [{"partition_index": 0, "committed_offset": 9, "committed_metadata": ""}]}]
_ANY_ACL = {
    "resource_type": 1,
    "pattern_type": 1,
    "principal": None,
    "host": None,
    "operation": 1,
    "permission_type": 1,
}
_ACL = {
    "resource_type": TOPIC_RESOURCE,
    "resource_name": VICTIM,
    "pattern_type": 3,
    "principal": "User:neighbour",
    "host": "*",
    "operation": 2,
    "permission_type": 3,
}
_PROTOCOLS = [{"name": "range", "metadata": b""}]


def _resource(kind: int, **more: Any) -> dict[str, Any]:
    name, value = {
        TOPIC_RESOURCE: ("retention.ms", "1"),
        GROUP_RESOURCE: ("consumer.session.timeout.ms", "45000"),
    }[kind]
    config = {"name": name, "value": value, "config_operation": 0}
    return {"resource_type": kind, "resource_name": VICTIM, "configs": [config], **more}


Bodies = dict[int, list[tuple[int, dict[str, Any]]]]


def bodies(topic_id: UUID) -> Bodies:
    """Requests about the victim, by API: (version, body)."""
    by_id = {"topic_id": topic_id, "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}]}
    new = {"name": "victim-new", "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    wanted = [{"name": VICTIM, "partition_indexes": [0]}]
    scram = {"name": "guest", "mechanism": 1}
    heartbeat = {"group_id": VICTIM, "member_id": "m", "member_epoch": 0, "rebalance_timeout_ms": 60_000}
    return {
        k.PRODUCE: [(9, produced(VICTIM, batch_of(b"forged")))],
        k.FETCH: [
            (12, fetched(VICTIM, 0)),
            (13, {"max_wait_ms": 0, "min_bytes": 0, "topics": [by_id], "forgotten_topics": []}),
        ],
        k.LIST_OFFSETS: [
            (7, {"topics": [{"name": VICTIM, "partitions": [{"partition_index": 0, "timestamp": stamp}]}]})
            for stamp in (-1, -2, 0)
        ],
        k.METADATA: [
            (12, {"topics": [{"topic_id": UUID(int=0), "name": VICTIM}], "allow_auto_topic_creation": False}),
            (12, {"topics": [{"topic_id": topic_id, "name": None}], "allow_auto_topic_creation": False}),
            (9, {"topics": [{"name": "victim-auto"}], "allow_auto_topic_creation": True}),
        ],
        k.OFFSET_COMMIT: [(8, {"group_id": VICTIM, "member_id": "", "topics": _COMMIT})],
        k.OFFSET_FETCH: [
            (7, {"group_id": VICTIM, "topics": wanted}),
            (7, {"group_id": VICTIM, "topics": None}),
            (8, {"groups": [{"group_id": VICTIM, "topics": None}]}),
        ],
        k.FIND_COORDINATOR: [(3, {"key": VICTIM, "key_type": kind}) for kind in (0, 1)],
        k.JOIN_GROUP: [
            (
                5,
                {
                    "group_id": VICTIM,
                    "session_timeout_ms": 10_000,
                    "rebalance_timeout_ms": 10_000,
                    "member_id": "",
                    "protocol_type": "consumer",
                    "protocols": _PROTOCOLS,
                },
            )
        ],
        k.HEARTBEAT: [(4, _MEMBER)],
        k.LEAVE_GROUP: [(4, {"group_id": VICTIM, "members": [{"member_id": "m"}]})],
        k.SYNC_GROUP: [(4, {**_MEMBER, "assignments": []})],
        k.DESCRIBE_GROUPS: [(5, {"groups": [VICTIM]})],
        k.LIST_GROUPS: [(4, {"states_filter": []})],
        k.CREATE_TOPICS: [(5, {"topics": [new], "timeout_ms": 1000})],
        k.DELETE_TOPICS: [
            (5, {"topic_names": [VICTIM], "timeout_ms": 1000}),
            (6, {"topics": [{"name": None, "topic_id": topic_id}], "timeout_ms": 1000}),
        ],
        k.DELETE_RECORDS: [
            (2, {"topics": [{"name": VICTIM, "partitions": [{"partition_index": 0, "offset": -1}]}], "timeout_ms": 1})
        ],
        k.INIT_PRODUCER_ID: [(4, {"transactional_id": VICTIM, "transaction_timeout_ms": 60_000})],
        k.ADD_PARTITIONS_TO_TXN: [(3, {**_TXN, "topics": [{"name": VICTIM, "partitions": [0]}]})],
        k.ADD_OFFSETS_TO_TXN: [(3, {**_TXN, "group_id": VICTIM})],
        k.END_TXN: [(3, {**_TXN, "committed": True})],
        k.TXN_OFFSET_COMMIT: [(3, {**_TXN, "group_id": VICTIM, "member_id": "", "topics": _COMMIT})],
        k.OFFSET_FOR_LEADER_EPOCH: [
            (4, {"topics": [{"topic": VICTIM, "partitions": [{"partition": 0, "leader_epoch": 0}]}]})
        ],
        k.DESCRIBE_CONFIGS: [(4, {"resources": [_resource(kind)]}) for kind in (TOPIC_RESOURCE, GROUP_RESOURCE)],
        k.ALTER_CONFIGS: [(2, {"resources": [_resource(kind)]}) for kind in (TOPIC_RESOURCE, GROUP_RESOURCE)],
        k.INCREMENTAL_ALTER_CONFIGS: [
            (1, {"resources": [_resource(kind)]}) for kind in (TOPIC_RESOURCE, GROUP_RESOURCE)
        ],
        k.CREATE_PARTITIONS: [(3, {"topics": [{"name": VICTIM, "count": 5}], "timeout_ms": 1000})],
        k.DELETE_GROUPS: [(2, {"groups_names": [VICTIM]})],
        k.OFFSET_DELETE: [
            (0, {"group_id": VICTIM, "topics": [{"name": VICTIM, "partitions": [{"partition_index": 0}]}]})
        ],
        k.DESCRIBE_LOG_DIRS: [
            (4, {"topics": None}),
            (4, {"topics": [{"topic": VICTIM, "partitions": [0]}]}),
        ],
        k.ELECT_LEADERS: [(2, {"topic_partitions": [{"topic": VICTIM, "partitions": [0]}]})],
        k.ALTER_PARTITION_REASSIGNMENTS: [
            (1, {"topics": [{"name": VICTIM, "partitions": [{"partition_index": 0, "replicas": [1]}]}]})
        ],
        k.LIST_CONFIG_RESOURCES: [(1, {"resource_types": []})],
        k.DESCRIBE_TOPIC_PARTITIONS: [(0, {"topics": []})],
        k.DESCRIBE_ACLS: [(3, {**_ANY_ACL, "resource_name": None})],
        k.CREATE_ACLS: [(3, {"creations": [{**_ANY_ACL, **_ACL}]})],
        k.DELETE_ACLS: [(3, {"filters": [{**_ANY_ACL, "resource_name": None}]})],
        k.DESCRIBE_USER_SCRAM_CREDENTIALS: [(0, {"users": None}), (0, {"users": [{"name": "guest"}]})],
        k.ALTER_USER_SCRAM_CREDENTIALS: [
            (0, {"deletions": [scram], "upsertions": []}),
            (
                0,
                {
                    "deletions": [],
                    "upsertions": [{**scram, "iterations": 4096, "salt": b"salt", "salted_password": b"x" * 32}],
                },
            ),
        ],
        k.DESCRIBE_PRODUCERS: [(0, {"topics": wanted})],
        k.DESCRIBE_TRANSACTIONS: [(0, {"transactional_ids": [VICTIM]})],
        k.LIST_TRANSACTIONS: [(0, {"state_filters": [], "producer_id_filters": []})],
        k.CONSUMER_GROUP_HEARTBEAT: [
            (1, {**heartbeat, "subscribed_topic_names": [VICTIM], "topic_partitions": []}),
            (1, {**heartbeat, "subscribed_topic_regex": ".*", "topic_partitions": []}),
        ],
        k.CONSUMER_GROUP_DESCRIBE: [(1, {"group_ids": [VICTIM]})],
    }


def _codes(response: Any) -> Iterator[int]:
    """All error codes of a response."""
    if isinstance(response, dict):
        for name, value in response.items():
            if name == "error_code":
                yield value
            else:
                yield from _codes(value)
    elif isinstance(response, list | tuple):
        for each in response:
            yield from _codes(each)


@pytest.fixture(scope="module")
def victim(kafka: Broker) -> UUID:
    """Create a topic, a group and a transactional id that the users below must not touch."""
    with RawClient(kafka.port("kafka")) as client:
        client.create(VICTIM)
        assert client.produce(VICTIM, batch_of(b"secret"))["error_code"] == 0
        committed = client.ask(k.OFFSET_COMMIT, 8, {"group_id": VICTIM, "member_id": "", "topics": _COMMIT})
        assert set(_codes(committed)) == {e.NONE}
        begun = client.ask(k.INIT_PRODUCER_ID, 4, {"transactional_id": VICTIM, "transaction_timeout_ms": 60_000})
        assert begun["error_code"] == e.NONE
        found = client.ask(k.METADATA, 12, {"topics": [{"topic_id": UUID(int=0), "name": VICTIM}]})
    for user, pattern in (("nobody", "^$"), ("neighbour", "^mine")):
        kafka.call("PUT", path("users", user), {"password": "password", "tags": ["monitoring", "management"]})
        rights = {"configure": pattern, "write": pattern, "read": pattern}
        kafka.call("PUT", path("permissions", "/", user), rights)
    topic_id: UUID = found["topics"][0]["topic_id"]
    return topic_id


def _logged_in(kafka: Broker, user: str) -> RawClient:
    client = RawClient(kafka.port("kafka"))
    assert client.ask(k.SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})["error_code"] == e.NONE
    raw = b"\0".join((b"", user.encode(), b"password"))
    assert client.ask(k.SASL_AUTHENTICATE, 2, {"auth_bytes": raw})["error_code"] == e.NONE
    return client


def _state(kafka: Broker) -> Any:
    """Return the victim's state, as an administrator sees it."""
    topic = kafka.call("GET", path("topics", "/", VICTIM))
    groups = kafka.call("GET", path("groups", "/", VICTIM))
    topics = kafka.call("GET", path("topics", "/"))
    with RawClient(kafka.port("kafka")) as client:
        transaction = client.ask(k.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [VICTIM]})
    return topic, groups, topics, transaction


@pytest.mark.promise("P14")
@pytest.mark.parametrize("user", ["nobody", "neighbour"])
def test_no_api_serves_a_user_without_permission(kafka: Broker, victim: UUID, user: str) -> None:
    table = bodies(victim)
    assert set(k.APIS) == set(table) | OPEN, "a new API needs a row in this table"
    before = _state(kafka)
    served = []
    for key, requests in table.items():
        for version, body in requests:
            with _logged_in(kafka, user) as client:
                response = client.ask(key, version, body)
            codes = set(_codes(response))
            is_told = key in HIDING and VICTIM in repr(response)
            if is_told or (key not in HIDING and not (codes and codes - {e.NONE} <= REFUSALS and codes & REFUSALS)):
                served.append((k.APIS[key].name, version, response))
    assert not served
    assert _state(kafka) == before


@pytest.mark.promise("P14")
def test_metadata_of_all_topics_shows_only_permitted_ones(kafka: Broker, victim: UUID) -> None:
    with _logged_in(kafka, "neighbour") as client:
        client.create("mine-1")
        found = client.ask(k.METADATA, 12, {"topics": None, "allow_auto_topic_creation": False})
        named = client.ask(k.DESCRIBE_TOPIC_PARTITIONS, 0, {"topics": [{"name": "mine-1"}, {"name": VICTIM}]})
    assert [each["name"] for each in found["topics"]] == ["mine-1"]
    shown = [(each["name"], each["error_code"], len(each["partitions"])) for each in named["topics"]]
    assert shown == [("mine-1", e.NONE, 1), (VICTIM, e.UNKNOWN_TOPIC_OR_PARTITION, 0)]


def _fetch_code(client: RawClient) -> int | None:
    """The error code of a fetch of the victim; None if the broker closed the connection."""
    try:
        code: int = client.fetch(VICTIM, 0)["error_code"]
    except (AssertionError, ConnectionError):
        return None
    return code


@pytest.mark.promise("P14")
@pytest.mark.parametrize(
    "change",
    [
        lambda kafka: kafka.call("DELETE", path("permissions", "/", "former")),
        lambda kafka: kafka.call("DELETE", path("users", "former")),
        lambda kafka: kafka.call(
            "PUT", path("permissions", "/", "former"), {"configure": "^$", "write": "^$", "read": "^$"}
        ),
    ],
    ids=["permissions deleted", "user deleted", "permissions changed"],
)
def test_an_open_connection_loses_access_with_the_permission(
    kafka: Broker, victim: UUID, change: Callable[[Broker], object]
) -> None:
    kafka.call("PUT", path("users", "former"), {"password": "password", "tags": []})
    kafka.call("PUT", path("permissions", "/", "former"), {"configure": ".*", "write": ".*", "read": ".*"})
    with _logged_in(kafka, "former") as client:
        assert _fetch_code(client) == e.NONE
        change(kafka)
        assert _fetch_code(client) in (e.TOPIC_AUTHORIZATION_FAILED, None)
