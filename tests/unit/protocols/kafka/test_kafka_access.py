"""Permissions: every request checks the permission for its objects, and refuses with Kafka's error codes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest
from tests.unit.log.strategies import transactional
from tests.unit.protocols.kafka.test_kafka_context import AnyUser, batch_of
from tests.unit.protocols.kafka.test_kafka_transactions import TIMEOUT_MS, Harness

from basaltmq.broker.auth.acls import Operation, Resource
from basaltmq.broker.auth.permissions import CONFIGURE, READ, WRITE
from basaltmq.errors import AccessRefusedError
from basaltmq.protocols.kafka.context import Client
from basaltmq.protocols.kafka.server import handlers
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import APIS
from basaltmq.streams.offsets import Commit

TOPIC, GROUP, ID = "a-topic", "a-group", "an-id"
Right = tuple[str, str]
Response = dict[str, Any]


class LimitedUser(AnyUser):
    """A client with all permissions except one."""

    def __init__(self, denied: Right | None) -> None:
        self._denied = denied

    def may(
        self, kind: str, name: str, operation: Operation | None = None, resource: Resource = Resource.TOPIC
    ) -> bool:
        return resource is not Resource.CLUSTER and (kind, name) != self._denied

    def check(
        self, kind: str, name: str, operation: Operation | None = None, resource: Resource = Resource.TOPIC
    ) -> None:
        if not self.may(kind, name, operation, resource):
            raise AccessRefusedError(f"{kind} access to '{name}' refused")

    def is_administrator(self) -> bool:
        return False


class Asked(NamedTuple):
    """A request, the permission it needs, and the place of the error in the response."""

    key: int
    version: int
    body: Response
    right: Right
    code: int
    reported: Callable[[Response], Any]


def partition_of(response: Response) -> Any:
    return response["topics"][0]["partitions"][0]["error_code"]


def result(response: Response) -> Any:
    return response["results"][0]["error_code"]


def whole(response: Response) -> Any:
    return response["error_code"]


READS, WRITES, CONFIGURES = (READ, TOPIC), (WRITE, TOPIC), (CONFIGURE, TOPIC)
READS_GROUP, WRITES_ID = (READ, GROUP), (WRITE, ID)
NO_TOPIC, NO_GROUP = e.TOPIC_AUTHORIZATION_FAILED, e.GROUP_AUTHORIZATION_FAILED
NO_ID = e.TRANSACTIONAL_ID_AUTHORIZATION_FAILED

_COMMIT = {"name": TOPIC, "partitions": [{"partition_index": 0, "committed_offset": 1, "committed_metadata": None}]}
_JOIN = {
    "group_id": GROUP,
    "session_timeout_ms": 10_000,
    "rebalance_timeout_ms": 10_000,
    "member_id": "",
    "protocol_type": "consumer",
    "protocols": [{"name": "range", "metadata": b""}],
}
_BEAT = {
    "group_id": GROUP,
    "member_id": "m",
    "member_epoch": 0,
    "rebalance_timeout_ms": 10_000,
    "subscribed_topic_names": [TOPIC],
    "topic_partitions": [],
}
_MEMBER = {"group_id": GROUP, "generation_id": 1, "member_id": "m"}
_OF_ID = {"transactional_id": ID, "producer_id": 0, "producer_epoch": 0}
_OFFSETS = {"group_id": GROUP, "generation_id": -1, "member_id": "", "topics": [_COMMIT]}
_FETCH = {
    "max_wait_ms": 0,
    "min_bytes": 1,
    "max_bytes": 1000,
    "isolation_level": 0,
    "topics": [{"topic": TOPIC, "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]}],
}
_PRODUCE = {
    "transactional_id": None,
    "acks": -1,
    "timeout_ms": 1000,
    "topics": [{"name": TOPIC, "partitions": [{"index": 0, "records": batch_of(b"x")}]}],
}
_TRANSACT = {**_PRODUCE, "transactional_id": ID}
_CONFIG = {"resource_type": 2, "resource_name": TOPIC}
_SETTINGS = {"resource_type": 32, "resource_name": GROUP}
_WANTED = {"group_id": GROUP, "topics": [{"name": TOPIC, "partition_indexes": [0]}]}
_GONE = {"group_id": GROUP, "topics": [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]}
_NEW = {"name": TOPIC, "num_partitions": 1, "replication_factor": 1}
_TXN_OFFSETS = {**_OF_ID, **_OFFSETS}

REQUESTS = [
    Asked(k.PRODUCE, 9, _PRODUCE, WRITES, NO_TOPIC, partition_of),
    Asked(k.FETCH, 12, _FETCH, READS, NO_TOPIC, partition_of),
    Asked(
        k.LIST_OFFSETS,
        5,
        {"topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "timestamp": -1}]}]},
        READS,
        NO_TOPIC,
        partition_of,
    ),
    Asked(
        k.OFFSET_FOR_LEADER_EPOCH,
        3,
        {"topics": [{"topic": TOPIC, "partitions": [{"partition": 0, "leader_epoch": 0}]}]},
        READS,
        NO_TOPIC,
        partition_of,
    ),
    Asked(k.OFFSET_COMMIT, 7, _OFFSETS, READS_GROUP, NO_GROUP, partition_of),
    Asked(k.OFFSET_COMMIT, 7, _OFFSETS, READS, NO_TOPIC, partition_of),
    Asked(k.OFFSET_FETCH, 7, _WANTED, READS_GROUP, NO_GROUP, whole),
    Asked(k.OFFSET_FETCH, 7, _WANTED, READS, NO_TOPIC, partition_of),
    Asked(k.OFFSET_DELETE, 0, _GONE, READS_GROUP, NO_GROUP, whole),
    Asked(k.OFFSET_DELETE, 0, _GONE, READS, NO_TOPIC, partition_of),
    Asked(k.FIND_COORDINATOR, 3, {"key": GROUP, "key_type": 0}, READS_GROUP, NO_GROUP, whole),
    Asked(k.FIND_COORDINATOR, 3, {"key": ID, "key_type": 1}, WRITES_ID, NO_ID, whole),
    Asked(
        k.FIND_COORDINATOR,
        4,
        {"key_type": 0, "coordinator_keys": ["another", GROUP]},
        READS_GROUP,
        NO_GROUP,
        lambda response: response["coordinators"][1]["error_code"],
    ),
    Asked(k.JOIN_GROUP, 5, _JOIN, READS_GROUP, NO_GROUP, whole),
    Asked(k.SYNC_GROUP, 3, _MEMBER, READS_GROUP, NO_GROUP, whole),
    Asked(k.HEARTBEAT, 3, _MEMBER, READS_GROUP, NO_GROUP, whole),
    Asked(k.LEAVE_GROUP, 3, {"group_id": GROUP, "members": [{"member_id": "m"}]}, READS_GROUP, NO_GROUP, whole),
    Asked(
        k.DESCRIBE_GROUPS,
        5,
        {"groups": [GROUP]},
        READS_GROUP,
        NO_GROUP,
        lambda response: response["groups"][0]["error_code"],
    ),
    Asked(k.CONSUMER_GROUP_HEARTBEAT, 1, _BEAT, READS_GROUP, NO_GROUP, whole),
    Asked(k.CONSUMER_GROUP_HEARTBEAT, 1, _BEAT, READS, NO_TOPIC, whole),
    Asked(
        k.CONSUMER_GROUP_DESCRIBE,
        1,
        {"group_ids": [GROUP]},
        READS_GROUP,
        NO_GROUP,
        lambda response: response["groups"][0]["error_code"],
    ),
    Asked(k.DELETE_GROUPS, 1, {"groups_names": [GROUP]}, READS_GROUP, NO_GROUP, result),
    Asked(
        k.DELETE_TOPICS,
        4,
        {"topic_names": [TOPIC]},
        CONFIGURES,
        NO_TOPIC,
        lambda response: response["responses"][0]["error_code"],
    ),
    Asked(
        k.CREATE_TOPICS,
        4,
        {"topics": [_NEW]},
        CONFIGURES,
        NO_TOPIC,
        lambda response: response["topics"][0]["error_code"],
    ),
    Asked(k.CREATE_PARTITIONS, 1, {"topics": [{"name": TOPIC, "count": 2}]}, CONFIGURES, NO_TOPIC, result),
    Asked(
        k.DELETE_RECORDS,
        1,
        {"topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "offset": 0}]}]},
        CONFIGURES,
        NO_TOPIC,
        partition_of,
    ),
    Asked(k.DESCRIBE_CONFIGS, 1, {"resources": [_CONFIG]}, READS, NO_TOPIC, result),
    Asked(k.DESCRIBE_CONFIGS, 1, {"resources": [_SETTINGS]}, READS_GROUP, NO_GROUP, result),
    Asked(
        k.INCREMENTAL_ALTER_CONFIGS,
        0,
        {"resources": [{**_SETTINGS, "configs": []}]},
        (CONFIGURE, GROUP),
        NO_GROUP,
        lambda response: response["responses"][0]["error_code"],
    ),
    Asked(
        k.ALTER_CONFIGS,
        1,
        {"resources": [{**_CONFIG, "configs": []}]},
        CONFIGURES,
        NO_TOPIC,
        lambda response: response["responses"][0]["error_code"],
    ),
    Asked(
        k.INCREMENTAL_ALTER_CONFIGS,
        0,
        {"resources": [{**_CONFIG, "configs": []}]},
        CONFIGURES,
        NO_TOPIC,
        lambda response: response["responses"][0]["error_code"],
    ),
    Asked(
        k.ELECT_LEADERS,
        2,
        {"topic_partitions": [{"topic": TOPIC, "partitions": [0]}]},
        CONFIGURES,
        NO_TOPIC,
        lambda response: response["replica_election_results"][0]["partition_result"][0]["error_code"],
    ),
    Asked(
        k.ALTER_PARTITION_REASSIGNMENTS,
        1,
        {"topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "replicas": [1]}]}]},
        CONFIGURES,
        NO_TOPIC,
        lambda response: response["responses"][0]["partitions"][0]["error_code"],
    ),
    Asked(
        k.INIT_PRODUCER_ID,
        4,
        {"transactional_id": ID, "transaction_timeout_ms": TIMEOUT_MS},
        WRITES_ID,
        NO_ID,
        whole,
    ),
    Asked(
        k.ADD_PARTITIONS_TO_TXN,
        3,
        {**_OF_ID, "topics": [{"name": TOPIC, "partitions": [0]}]},
        WRITES_ID,
        NO_ID,
        lambda response: response["results"][0]["results"][0]["error_code"],
    ),
    Asked(
        k.ADD_PARTITIONS_TO_TXN,
        3,
        {**_OF_ID, "topics": [{"name": TOPIC, "partitions": [0]}]},
        WRITES,
        NO_TOPIC,
        lambda response: response["results"][0]["results"][0]["error_code"],
    ),
    Asked(k.ADD_OFFSETS_TO_TXN, 3, {**_OF_ID, "group_id": GROUP}, WRITES_ID, NO_ID, whole),
    Asked(k.ADD_OFFSETS_TO_TXN, 3, {**_OF_ID, "group_id": GROUP}, READS_GROUP, NO_GROUP, whole),
    Asked(k.TXN_OFFSET_COMMIT, 3, _TXN_OFFSETS, WRITES_ID, NO_ID, partition_of),
    Asked(k.TXN_OFFSET_COMMIT, 3, _TXN_OFFSETS, READS_GROUP, NO_GROUP, partition_of),
    Asked(k.TXN_OFFSET_COMMIT, 3, _TXN_OFFSETS, READS, NO_TOPIC, partition_of),
    Asked(k.END_TXN, 3, {**_OF_ID, "committed": True}, WRITES_ID, NO_ID, whole),
    Asked(
        k.DESCRIBE_TRANSACTIONS,
        0,
        {"transactional_ids": [ID]},
        WRITES_ID,
        NO_ID,
        lambda response: response["transaction_states"][0]["error_code"],
    ),
    Asked(
        k.DESCRIBE_PRODUCERS,
        0,
        {"topics": [{"name": TOPIC, "partition_indexes": [0]}]},
        READS,
        NO_TOPIC,
        partition_of,
    ),
]

FREE = frozenset(
    (
        k.API_VERSIONS,
        k.SASL_HANDSHAKE,
        k.SASL_AUTHENTICATE,
        k.DESCRIBE_CLUSTER,
        k.DESCRIBE_QUORUM,
        k.LIST_PARTITION_REASSIGNMENTS,
    )
)
"""Requests that name no object with permissions."""

SHOWN = frozenset(
    (
        k.METADATA,
        k.LIST_GROUPS,
        k.LIST_TRANSACTIONS,
        k.DESCRIBE_LOG_DIRS,
        k.LIST_CONFIG_RESOURCES,
        k.DESCRIBE_TOPIC_PARTITIONS,
    )
)
"""Requests that omit objects without permission from the response."""

CREDENTIALS = frozenset((k.DESCRIBE_USER_SCRAM_CREDENTIALS, k.ALTER_USER_SCRAM_CREDENTIALS))
ADMINISTRATORS = CREDENTIALS | {k.DESCRIBE_ACLS, k.CREATE_ACLS, k.DELETE_ACLS}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    made = Harness(tmp_path_factory.mktemp("access") / "store")
    made.topic(TOPIC)
    source = made.context.topic(TOPIC).id

    async def fill() -> None:
        pid, epoch = await made.transactions.initialize(ID, TIMEOUT_MS)
        assert (pid, epoch) == (0, 0)
        made.context.plane.offsets.commit(GROUP, {(source, 0): Commit(1)})

    asyncio.run(fill())
    yield made
    made.close()


def ask(harness: Harness, denied: Right | None, key: int, version: int, body: Response) -> Response:
    async def run() -> Response:
        raw = k.encode_request(key, version, 1, "test", body)
        response: Any = handlers()[key](harness.context, cast(Client, LimitedUser(denied)), k.decode_request(raw[4:]))
        if isinstance(response, tuple):
            response = response[0]
        if asyncio.iscoroutine(response):
            response = await response
        encoded = b"".join(k.encode_response(APIS[key], version, 1, response))
        return k.decode_response(key, version, encoded[4:])[1]

    return asyncio.run(run())


def test_every_request_type_has_a_permission_test() -> None:
    assert {each.key for each in REQUESTS} | FREE | SHOWN | ADMINISTRATORS == set(APIS)


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda each: f"{APIS[each.key].name}-{'-'.join(each.right)}")
def test_requests_without_permission_change_nothing_and_return_an_authorization_error(
    harness: Harness, asked: Asked
) -> None:
    before = harness.transactions.get(ID)
    response = ask(harness, asked.right, asked.key, asked.version, asked.body)
    assert asked.reported(response) == asked.code
    assert harness.transactions.get(ID) == before
    assert [each.offset for each in harness.context.plane.offsets.of_group(GROUP).values()] == [1]
    engine, shard = harness.context.engine(harness.context.topic(TOPIC), 0)
    assert engine.shard_info(shard).next_offset == 0


def test_transactional_batches_require_write_permission_on_the_topic(harness: Harness) -> None:
    topics = [{"name": TOPIC, "partitions": [{"index": 0, "records": transactional(0, 0, b"x")}]}]
    response = ask(harness, WRITES, k.PRODUCE, 9, {**_TRANSACT, "topics": topics})
    assert partition_of(response) == NO_TOPIC


def test_lists_omit_objects_without_read_permission(harness: Harness) -> None:
    def topics(denied: Right | None) -> list[str]:
        response = ask(harness, denied, k.METADATA, 1, {"topics": None})
        return [each["name"] for each in response["topics"]]

    assert topics(READS) == [TOPIC], "one that it may write to is seen"

    def groups(denied: Right | None) -> list[str]:
        return [each["group_id"] for each in ask(harness, denied, k.LIST_GROUPS, 4, {"states_filter": []})["groups"]]

    assert (groups(None), groups(READS_GROUP)) == ([GROUP], [])

    def transactions(denied: Right | None) -> list[str]:
        asked: Response = {"state_filters": [], "producer_id_filters": []}
        response = ask(harness, denied, k.LIST_TRANSACTIONS, 0, asked)
        return [each["transactional_id"] for each in response["transaction_states"]]

    assert (transactions(None), transactions(WRITES_ID)) == ([ID], [])

    def directories(denied: Right | None, topics: list[Response] | None = None) -> list[str]:
        response = ask(harness, denied, k.DESCRIBE_LOG_DIRS, 4, {"topics": topics})
        return [each["name"] for result in response["results"] for each in result["topics"]]

    assert (directories(None), directories(READS)) == ([TOPIC], [])
    assert directories(READS, [{"topic": TOPIC, "partitions": [0]}]) == []
    hidden = ask(harness, READS, k.OFFSET_FETCH, 7, {"group_id": GROUP, "topics": None})
    assert hidden["topics"] == []
    assert len(ask(harness, None, k.OFFSET_FETCH, 7, {"group_id": GROUP, "topics": None})["topics"]) == 1


def test_find_coordinator_requires_permission_on_the_group_or_id(harness: Harness) -> None:
    asked = {"key_type": 0, "coordinator_keys": ["another", GROUP]}
    another, denied = ask(harness, READS_GROUP, k.FIND_COORDINATOR, 4, asked)["coordinators"]
    assert (another["key"], another["error_code"], another["host"], another["port"]) == (
        "another",
        0,
        "localhost",
        9092,
    )
    assert (denied["key"], denied["node_id"], denied["host"], denied["port"]) == (GROUP, -1, "", -1)
    for key, kind in ((GROUP, 0), (ID, 1)):
        found = ask(harness, None, k.FIND_COORDINATOR, 3, {"key": key, "key_type": kind})
        assert (found["error_code"], found["node_id"], found["port"]) == (0, 1, 9092)
    unknown = ask(harness, None, k.FIND_COORDINATOR, 3, {"key": GROUP, "key_type": 7})
    assert (unknown["error_code"], unknown["node_id"]) == (e.INVALID_REQUEST, -1)


def test_auto_creation_of_topics_requires_the_configure_permission(harness: Harness) -> None:
    asked = {"topics": [{"name": "passing"}], "allow_auto_topic_creation": True}
    response = ask(harness, (CONFIGURE, "passing"), k.METADATA, 4, asked)
    assert response["topics"][0]["error_code"] == e.UNKNOWN_TOPIC_OR_PARTITION
    assert harness.context.plane.topics.find("passing") is None


@pytest.mark.parametrize("key", sorted(CREDENTIALS))
def test_only_administrators_may_manage_credentials(harness: Harness, key: int) -> None:
    changed = {"deletions": [{"name": "guest", "mechanism": 1}], "upsertions": []}
    response = ask(harness, None, key, 0, {"users": None} if key == k.DESCRIBE_USER_SCRAM_CREDENTIALS else changed)
    reported = response if key == k.DESCRIBE_USER_SCRAM_CREDENTIALS else response["results"][0]
    assert reported["error_code"] == e.CLUSTER_AUTHORIZATION_FAILED
