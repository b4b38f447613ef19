"""Table of the supported APIs and versions, as ApiVersions announces them; request and response framing.

A request after its i32 size, and its response:

    | api key i16 | version i16 | correlation id i32 | client id, nullable string | tags, if flexible | body |
    | correlation id i32 | tags, if flexible and not ApiVersions | body |

Produce is announced from version 0, as in Apache Kafka, because librdkafka requires that for compression. Batches in
the old formats of those versions are rejected individually.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import Any, Final, NamedTuple

from basaltmq.errors import MalformedRequestError
from basaltmq.protocols.kafka.wire import cluster as cluster
from basaltmq.protocols.kafka.wire import consumer_groups as consumers
from basaltmq.protocols.kafka.wire import data as data
from basaltmq.protocols.kafka.wire import fast_codecs
from basaltmq.protocols.kafka.wire import groups as groups
from basaltmq.protocols.kafka.wire import session as session
from basaltmq.protocols.kafka.wire import topics as topics
from basaltmq.protocols.kafka.wire import transactions as transactions
from basaltmq.protocols.kafka.wire.schema import EVER, Field, Fields, Struct

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
METADATA: Final = 3
OFFSET_COMMIT: Final = 8
OFFSET_FETCH: Final = 9
FIND_COORDINATOR: Final = 10
JOIN_GROUP: Final = 11
HEARTBEAT: Final = 12
LEAVE_GROUP: Final = 13
SYNC_GROUP: Final = 14
DESCRIBE_GROUPS: Final = 15
LIST_GROUPS: Final = 16
SASL_HANDSHAKE: Final = 17
API_VERSIONS: Final = 18
CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20
DELETE_RECORDS: Final = 21
INIT_PRODUCER_ID: Final = 22
ADD_PARTITIONS_TO_TXN: Final = 24
ADD_OFFSETS_TO_TXN: Final = 25
END_TXN: Final = 26
TXN_OFFSET_COMMIT: Final = 28
OFFSET_FOR_LEADER_EPOCH: Final = 23
DESCRIBE_CONFIGS: Final = 32
ALTER_CONFIGS: Final = 33
DESCRIBE_LOG_DIRS: Final = 35
SASL_AUTHENTICATE: Final = 36
CREATE_PARTITIONS: Final = 37
DELETE_GROUPS: Final = 42
ELECT_LEADERS: Final = 43
INCREMENTAL_ALTER_CONFIGS: Final = 44
ALTER_PARTITION_REASSIGNMENTS: Final = 45
LIST_PARTITION_REASSIGNMENTS: Final = 46
OFFSET_DELETE: Final = 47
DESCRIBE_USER_SCRAM_CREDENTIALS: Final = 50
ALTER_USER_SCRAM_CREDENTIALS: Final = 51
DESCRIBE_QUORUM: Final = 55
DESCRIBE_CLUSTER: Final = 60
DESCRIBE_PRODUCERS: Final = 61
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66
CONSUMER_GROUP_HEARTBEAT: Final = 68
CONSUMER_GROUP_DESCRIBE: Final = 69
LIST_CONFIG_RESOURCES: Final = 74
DESCRIBE_TOPIC_PARTITIONS: Final = 75

JOINED_BYTES_MAX: Final = 16 << 10
"""Chunks up to this size are joined with their neighbours; the copy takes 1 us. Larger chunks are sent without a
copy."""

_HEAD: Final = Layout(">hhi")
_CORRELATION: Final = Layout(">i")
_SIZE: Final = Layout(">i")
_CLIENT: Final = Struct(Field("client_id", "string", null_since=0)).codec(0, False)
_TAGS: Final = Struct().codec(0, True)


class Api(NamedTuple):
    """An API: versions and schemas."""

    key: int
    name: str
    version_min: int
    version_max: int
    flexible_since: int
    request: Struct
    response: Struct


APIS: Final[dict[int, Api]] = {
    api.key: api
    for api in (
        Api(PRODUCE, "Produce", 0, 9, 9, data.PRODUCE_REQUEST, data.PRODUCE_RESPONSE),
        Api(FETCH, "Fetch", 4, 17, 12, data.FETCH_REQUEST, data.FETCH_RESPONSE),
        Api(LIST_OFFSETS, "ListOffsets", 1, 10, 6, data.LIST_OFFSETS_REQUEST, data.LIST_OFFSETS_RESPONSE),
        Api(METADATA, "Metadata", 0, 12, 9, topics.METADATA_REQUEST, topics.METADATA_RESPONSE),
        Api(OFFSET_COMMIT, "OffsetCommit", 2, 9, 8, groups.OFFSET_COMMIT_REQUEST, groups.OFFSET_COMMIT_RESPONSE),
        Api(OFFSET_FETCH, "OffsetFetch", 1, 9, 6, groups.OFFSET_FETCH_REQUEST, groups.OFFSET_FETCH_RESPONSE),
        Api(
            FIND_COORDINATOR,
            "FindCoordinator",
            0,
            4,
            3,
            session.FIND_COORDINATOR_REQUEST,
            session.FIND_COORDINATOR_RESPONSE,
        ),
        Api(JOIN_GROUP, "JoinGroup", 0, 9, 6, groups.JOIN_GROUP_REQUEST, groups.JOIN_GROUP_RESPONSE),
        Api(HEARTBEAT, "Heartbeat", 0, 4, 4, groups.HEARTBEAT_REQUEST, groups.HEARTBEAT_RESPONSE),
        Api(LEAVE_GROUP, "LeaveGroup", 0, 5, 4, groups.LEAVE_GROUP_REQUEST, groups.LEAVE_GROUP_RESPONSE),
        Api(SYNC_GROUP, "SyncGroup", 0, 5, 4, groups.SYNC_GROUP_REQUEST, groups.SYNC_GROUP_RESPONSE),
        Api(
            DESCRIBE_GROUPS, "DescribeGroups", 0, 6, 5, groups.DESCRIBE_GROUPS_REQUEST, groups.DESCRIBE_GROUPS_RESPONSE
        ),
        Api(LIST_GROUPS, "ListGroups", 0, 5, 3, groups.LIST_GROUPS_REQUEST, groups.LIST_GROUPS_RESPONSE),
        Api(
            SASL_HANDSHAKE, "SaslHandshake", 0, 1, EVER, session.SASL_HANDSHAKE_REQUEST, session.SASL_HANDSHAKE_RESPONSE
        ),
        Api(API_VERSIONS, "ApiVersions", 0, 4, 3, session.API_VERSIONS_REQUEST, session.API_VERSIONS_RESPONSE),
        Api(CREATE_TOPICS, "CreateTopics", 0, 7, 5, topics.CREATE_TOPICS_REQUEST, topics.CREATE_TOPICS_RESPONSE),
        Api(DELETE_TOPICS, "DeleteTopics", 0, 6, 4, topics.DELETE_TOPICS_REQUEST, topics.DELETE_TOPICS_RESPONSE),
        Api(DELETE_RECORDS, "DeleteRecords", 0, 2, 2, data.DELETE_RECORDS_REQUEST, data.DELETE_RECORDS_RESPONSE),
        Api(
            INIT_PRODUCER_ID,
            "InitProducerId",
            0,
            4,
            2,
            session.INIT_PRODUCER_ID_REQUEST,
            session.INIT_PRODUCER_ID_RESPONSE,
        ),
        Api(
            OFFSET_FOR_LEADER_EPOCH,
            "OffsetForLeaderEpoch",
            0,
            4,
            4,
            data.OFFSET_FOR_LEADER_EPOCH_REQUEST,
            data.OFFSET_FOR_LEADER_EPOCH_RESPONSE,
        ),
        Api(ALTER_CONFIGS, "AlterConfigs", 0, 2, 2, topics.ALTER_CONFIGS_REQUEST, topics.ALTER_CONFIGS_RESPONSE),
        Api(
            DESCRIBE_USER_SCRAM_CREDENTIALS,
            "DescribeUserScramCredentials",
            0,
            0,
            0,
            session.DESCRIBE_SCRAM_REQUEST,
            session.DESCRIBE_SCRAM_RESPONSE,
        ),
        Api(
            ALTER_USER_SCRAM_CREDENTIALS,
            "AlterUserScramCredentials",
            0,
            0,
            0,
            session.ALTER_SCRAM_REQUEST,
            session.ALTER_SCRAM_RESPONSE,
        ),
        Api(
            DESCRIBE_CLUSTER,
            "DescribeCluster",
            0,
            2,
            0,
            topics.DESCRIBE_CLUSTER_REQUEST,
            topics.DESCRIBE_CLUSTER_RESPONSE,
        ),
        Api(
            DESCRIBE_CONFIGS,
            "DescribeConfigs",
            0,
            4,
            4,
            topics.DESCRIBE_CONFIGS_REQUEST,
            topics.DESCRIBE_CONFIGS_RESPONSE,
        ),
        Api(
            SASL_AUTHENTICATE,
            "SaslAuthenticate",
            0,
            2,
            2,
            session.SASL_AUTHENTICATE_REQUEST,
            session.SASL_AUTHENTICATE_RESPONSE,
        ),
        Api(
            CREATE_PARTITIONS,
            "CreatePartitions",
            0,
            3,
            2,
            topics.CREATE_PARTITIONS_REQUEST,
            topics.CREATE_PARTITIONS_RESPONSE,
        ),
        Api(DELETE_GROUPS, "DeleteGroups", 0, 2, 2, groups.DELETE_GROUPS_REQUEST, groups.DELETE_GROUPS_RESPONSE),
        Api(
            INCREMENTAL_ALTER_CONFIGS,
            "IncrementalAlterConfigs",
            0,
            1,
            1,
            topics.INCREMENTAL_ALTER_CONFIGS_REQUEST,
            topics.INCREMENTAL_ALTER_CONFIGS_RESPONSE,
        ),
        Api(OFFSET_DELETE, "OffsetDelete", 0, 0, EVER, groups.OFFSET_DELETE_REQUEST, groups.OFFSET_DELETE_RESPONSE),
        Api(
            CONSUMER_GROUP_HEARTBEAT,
            "ConsumerGroupHeartbeat",
            0,
            1,
            0,
            consumers.CONSUMER_GROUP_HEARTBEAT_REQUEST,
            consumers.CONSUMER_GROUP_HEARTBEAT_RESPONSE,
        ),
        Api(
            CONSUMER_GROUP_DESCRIBE,
            "ConsumerGroupDescribe",
            0,
            1,
            0,
            consumers.CONSUMER_GROUP_DESCRIBE_REQUEST,
            consumers.CONSUMER_GROUP_DESCRIBE_RESPONSE,
        ),
        *(
            Api(key, name, 0, version_max, version_max, request, response)
            for key, name, version_max, request, response in transactions.APIS
        ),
        *(Api(*each) for each in cluster.APIS),
    )
}


class Request(NamedTuple):
    """A decoded request."""

    api: Api
    version: int
    correlation_id: int
    client_id: str | None
    body: Fields


class UnsupportedVersionError(MalformedRequestError):
    """A request in a version that is not supported."""

    def __init__(self, api: Api, version: int, correlation_id: int) -> None:
        super().__init__(f"{api.name} version {version} is not supported; use {api.version_min} to {api.version_max}")
        self.api = api
        self.correlation_id = correlation_id


def is_produce(raw: bytes) -> bool:
    """Whether an encoded request is a Produce."""
    return raw[:2] == b"\0\0"


def decode_request(raw: bytes) -> Request:
    """Decode a request without its size."""
    if len(raw) < _HEAD.size:
        raise MalformedRequestError(f"a request of {len(raw)} bytes is shorter than its header")
    key, version, correlation_id = _HEAD.unpack_from(raw)
    api = APIS.get(key)
    if api is None:
        raise MalformedRequestError(f"API key {key} is not supported")
    if not api.version_min <= version <= api.version_max:
        raise UnsupportedVersionError(api, version, correlation_id)
    head, at = _CLIENT.read(raw, _HEAD.size)
    is_flexible = version >= api.flexible_since
    if is_flexible:
        _, at = _TAGS.read(raw, at)
    # Ignore trailing bytes, as Apache Kafka does: librdkafka appends some to a few requests.
    body = None
    if key == PRODUCE and version == fast_codecs.PRODUCE_VERSION:
        body = fast_codecs.read_produce(raw, at)
    elif key == FETCH and fast_codecs.FETCH_VERSION_MIN <= version <= fast_codecs.FETCH_VERSION_MAX:
        body = fast_codecs.read_fetch(raw, at)
    if body is None:
        body, _ = api.request.codec(version, is_flexible).read(raw, at)
    return Request(api, version, correlation_id, head["client_id"], body)


def encode_request(key: int, version: int, correlation_id: int, client_id: str | None, body: Fields) -> bytes:
    """Encode a request with its size, for tests."""
    api = APIS[key]
    is_flexible = version >= api.flexible_since
    out: list[bytes] = [_HEAD.pack(key, version, correlation_id)]
    _CLIENT.write({"client_id": client_id}, out)
    if is_flexible:
        _TAGS.write({}, out)
    api.request.codec(version, is_flexible).write(body, out)
    raw = b"".join(out)
    return _SIZE.pack(len(raw)) + raw


def encode_response(api: Api, version: int, correlation_id: int, body: Fields) -> list[bytes]:
    """Encode a response with its size, as chunks to send in order."""
    is_flexible = version >= api.flexible_since
    out: list[bytes] = [b"", _CORRELATION.pack(correlation_id)]
    if is_flexible and api.key != API_VERSIONS:
        out.append(b"\x00")
    if not _write_fast(api.key, version, body, out):
        api.response.codec(version, is_flexible).write(body, out)
    size = sum(map(len, out))
    out[0] = _SIZE.pack(size)
    return [b"".join(out)] if size <= JOINED_BYTES_MAX else _joined(out)


def _write_fast(key: int, version: int, body: Fields, out: list[bytes]) -> bool:
    """Append a response in its common shape; False if it has another shape."""
    if key == FETCH and fast_codecs.FETCH_VERSION_MIN <= version <= fast_codecs.FETCH_VERSION_MAX:
        return fast_codecs.write_fetched(body, out)
    if key == PRODUCE and version == fast_codecs.PRODUCE_VERSION:
        produced = fast_codecs.write_produced(body)
        if produced is not None:
            out.append(produced)
            return True
    return False


def _joined(pieces: list[bytes]) -> list[bytes]:
    """Join small chunks, because each chunk costs the transport more than a copy."""
    found: list[bytes] = []
    small: list[bytes] = []
    for piece in pieces:
        if len(piece) <= JOINED_BYTES_MAX:
            small.append(piece)
            continue
        if small:
            found.append(b"".join(small))
            small = []
        found.append(piece)
    if small:
        found.append(b"".join(small))
    return found


def decode_response(key: int, version: int, raw: bytes) -> tuple[int, dict[str, Any]]:
    """Decode a response without its size into correlation id and body, for tests."""
    api = APIS[key]
    is_flexible = version >= api.flexible_since
    at = _CORRELATION.size
    if is_flexible and key != API_VERSIONS:
        _, at = _TAGS.read(raw, at)
    body, at = api.response.codec(version, is_flexible).read(raw, at)
    if at != len(raw):
        raise MalformedRequestError(f"{len(raw) - at} bytes follow a {api.name} response")
    return _CORRELATION.unpack_from(raw)[0], body
