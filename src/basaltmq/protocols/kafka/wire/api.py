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
from basaltmq.protocols.kafka.wire import (
    acls,
    cluster,
    consumer_groups,
    data,
    fast_codecs,
    groups,
    session,
    topics,
    transactions,
)
from basaltmq.protocols.kafka.wire.notation import Api, read_apis
from basaltmq.protocols.kafka.wire.schema import Field, Fields, Struct

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
DESCRIBE_ACLS: Final = 29
CREATE_ACLS: Final = 30
DELETE_ACLS: Final = 31
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

PIECES_AT_ONCE: Final = 10_000
"""Pieces of a response in one call of C code: 1 ms."""

JOINED_BYTES_MAX: Final = 16 << 10
"""Chunks up to this size are joined with their neighbours; the copy takes 1 us. Larger chunks are sent without a
copy."""

_HEAD: Final = Layout(">hhi")
_CORRELATION: Final = Layout(">i")
_SIZE: Final = Layout(">i")
_CLIENT: Final = Struct(Field("client_id", "string", null_since=0)).codec(0, False)
_TAGS: Final = Struct().codec(0, True)


APIS: Final[dict[int, Api]] = {
    api.key: api
    for module in (data, topics, session, acls, cluster, groups, consumer_groups, transactions)
    for api in read_apis(module.APIS)
}
METADATA_PARTITION: Final = APIS[METADATA].response.array("topics", "partitions")
CREATED_CONFIG: Final = APIS[CREATE_TOPICS].response.array("topics", "configs")
API_VERSIONS_KEY: Final = APIS[API_VERSIONS].response.array("api_keys")


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
    if len(out) > PIECES_AT_ONCE:
        return _joined_in_portions(out)
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


def _joined_in_portions(pieces: list[bytes]) -> list[bytes]:
    """As `_joined`, with the size. One call for millions of pieces would hold the GIL, and so would freeing them."""
    found: list[bytes] = []
    pieces.reverse()
    size = 0
    while pieces:
        portion = pieces[: -PIECES_AT_ONCE - 1 : -1]
        del pieces[-PIECES_AT_ONCE:]
        size += sum(map(len, portion))
        found += _joined(portion)
    return [_SIZE.pack(size), *found]


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
