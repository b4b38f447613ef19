"""The schemas of KIP-848 consumer groups, compared with bytes of Apache Kafka's Java client."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from basaltmq.protocols.kafka.session import api_versions
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire.schema import Struct

FIRST, SECOND = UUID(int=(1 << 64) + 2), UUID(int=(3 << 64) + 4)
BEAT, DESCRIBE = k.APIS[k.CONSUMER_GROUP_HEARTBEAT], k.APIS[k.CONSUMER_GROUP_DESCRIBE]

FULL: dict[str, Any] = {
    "group_id": "g",
    "member_id": "m",
    "member_epoch": 7,
    "instance_id": "i",
    "rack_id": "r",
    "rebalance_timeout_ms": 300_000,
    "subscribed_topic_names": ["a", "b"],
    "subscribed_topic_regex": None,
    "server_assignor": "uniform",
    "topic_partitions": [{"topic_id": FIRST, "partitions": [0, 5]}],
}
SMALL: dict[str, Any] = dict.fromkeys(FULL) | {
    "group_id": "g",
    "member_id": "m",
    "member_epoch": 7,
    "rebalance_timeout_ms": -1,
}
RESPONSE_HEADERS: dict[str, Any] = {
    "throttle_time_ms": 0,
    "error_code": 0,
    "error_message": None,
    "member_id": "m",
    "member_epoch": 8,
    "heartbeat_interval_ms": 5000,
    "assignment": {
        "topic_partitions": [
            {"topic_id": FIRST, "partitions": [1, 2]},
            {"topic_id": SECOND, "partitions": [9]},
        ]
    },
}
REFUSAL: dict[str, Any] = dict.fromkeys(RESPONSE_HEADERS, 0) | {
    "error_code": 110,
    "error_message": "no",
    "member_id": None,
    "assignment": None,
}
MEMBER: dict[str, Any] = {
    "member_id": "m",
    "instance_id": "i",
    "rack_id": None,
    "member_epoch": 3,
    "client_id": "c",
    "client_host": "/h",
    "subscribed_topic_names": ["a"],
    "subscribed_topic_regex": None,
    "assignment": {"topic_partitions": [{"topic_id": FIRST, "topic_name": "a", "partitions": [0]}]},
    "target_assignment": {"topic_partitions": []},
    "member_type": -1,
}
GROUP: dict[str, Any] = {
    "error_code": 0,
    "error_message": None,
    "group_id": "g",
    "group_state": "Stable",
    "group_epoch": 4,
    "assignment_epoch": 4,
    "assignor_name": "range",
    "members": [MEMBER],
    "authorized_operations": -(1 << 31),
}
TYPED = GROUP | {"members": [MEMBER | {"member_type": 1}]}

_OWNS = "02" + FIRST.bytes.hex() + "03" + "00000000" + "00000005" + "0000"
_REPORTED = (
    "00000000000000026d00000008000013880103" + FIRST.bytes.hex() + "03000000010000000200"
    "0000000000000003" + "0000000000000004" + "0200000009000000"
)
_DESCRIBED = "0000000002000000026707537461626c6500000004000000040672616e676502026d026900000000030263032f6802026100"
_SHARES = "02" + FIRST.bytes.hex() + "0261020000000000000100"

MADE = [
    (BEAT.request, 0, FULL, "0267026d0000000702690272000493e0030261026208756e69666f726d" + _OWNS),
    (
        BEAT.request,
        1,
        FULL | {"subscribed_topic_regex": "x.*"},
        "0267026d0000000702690272000493e0030261026204782e2a08756e69666f726d" + _OWNS,
    ),
    (BEAT.request, 0, SMALL, "0267026d000000070000ffffffff00000000"),
    (BEAT.request, 1, SMALL, "0267026d000000070000ffffffff0000000000"),
    (BEAT.response, 0, RESPONSE_HEADERS, _REPORTED),
    (BEAT.response, 1, RESPONSE_HEADERS, _REPORTED),
    (BEAT.response, 1, REFUSAL, "00000000006e036e6f000000000000000000ff00"),
    (DESCRIBE.request, 1, {"group_ids": ["g", "h"], "include_authorized_operations": True}, "03026702680100"),
    (DESCRIBE.response, 0, {"throttle_time_ms": 0, "groups": [GROUP]}, _DESCRIBED + _SHARES + "00800000000000"),
    (DESCRIBE.response, 1, {"throttle_time_ms": 0, "groups": [TYPED]}, _DESCRIBED + _SHARES + "0100800000000000"),
]


@pytest.mark.parametrize(("table", "version", "fields", "made"), MADE)
def test_messages_of_the_java_client_round_trip(table: Struct, version: int, fields: dict[str, Any], made: str) -> None:
    raw = bytes.fromhex(made)
    codec = table.codec(version, True)
    assert codec.read(raw, 0) == (fields, len(raw))
    out: list[bytes] = []
    codec.write(fields, out)
    assert b"".join(out).hex() == made


def test_api_versions_announces_the_group_version_feature() -> None:
    api = k.APIS[k.API_VERSIONS]
    for version in range(api.version_max + 1):
        raw = b"".join(k.encode_response(api, version, 1, api_versions(version)))
        body = k.decode_response(k.API_VERSIONS, version, raw[4:])[1]
        keys = {each["api_key"]: (each["min_version"], each["max_version"]) for each in body["api_keys"]}
        assert keys[k.CONSUMER_GROUP_HEARTBEAT] == keys[k.CONSUMER_GROUP_DESCRIBE] == (0, 1)
        levels = [(each["name"], each["max_version_level"]) for each in body["finalized_features"]]
        assert levels == ([("group.version", 1)] if version >= 3 else [])
        ranges = [(each["name"], each["min_version"], each["max_version"]) for each in body["supported_features"]]
        assert ranges == ([("group.version", 0, 1)] if version >= 4 else [])
