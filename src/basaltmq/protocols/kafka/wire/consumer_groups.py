"""Schemas of the KIP-848 consumer group APIs."""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct

_NO_OPERATIONS: Final = -(1 << 31)

_PLACES: Final = Array(Struct(Field("topic_id", "uuid"), Field("partitions", Array("int32"))))

CONSUMER_GROUP_HEARTBEAT_REQUEST: Final = Struct(
    Field("group_id", "string"),
    Field("member_id", "string"),
    Field("member_epoch", "int32"),
    Field("instance_id", "string", null_since=0),
    Field("rack_id", "string", null_since=0),
    Field("rebalance_timeout_ms", "int32", default=-1),
    Field("subscribed_topic_names", Array("string"), null_since=0),
    Field("subscribed_topic_regex", "string", since=1, null_since=0),
    Field("server_assignor", "string", null_since=0),
    Field("topic_partitions", _PLACES, null_since=0),
)
CONSUMER_GROUP_HEARTBEAT_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("error_code", "int16"),
    Field("error_message", "string", null_since=0),
    Field("member_id", "string", null_since=0),
    Field("member_epoch", "int32"),
    Field("heartbeat_interval_ms", "int32"),
    Field("assignment", Struct(Field("topic_partitions", _PLACES)), null_since=0),
)

CONSUMER_GROUP_DESCRIBE_REQUEST: Final = Struct(
    Field("group_ids", Array("string")), Field("include_authorized_operations", "bool")
)
_ASSIGNMENT: Final = Struct(
    Field(
        "topic_partitions",
        Array(
            Struct(Field("topic_id", "uuid"), Field("topic_name", "string"), Field("partitions", Array("int32"))),
        ),
    )
)
CONSUMER_GROUP_DESCRIBE_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field(
        "groups",
        Array(
            Struct(
                Field("error_code", "int16"),
                Field("error_message", "string", null_since=0),
                Field("group_id", "string"),
                Field("group_state", "string"),
                Field("group_epoch", "int32"),
                Field("assignment_epoch", "int32"),
                Field("assignor_name", "string"),
                Field(
                    "members",
                    Array(
                        Struct(
                            Field("member_id", "string"),
                            Field("instance_id", "string", null_since=0),
                            Field("rack_id", "string", null_since=0),
                            Field("member_epoch", "int32"),
                            Field("client_id", "string"),
                            Field("client_host", "string"),
                            Field("subscribed_topic_names", Array("string")),
                            Field("subscribed_topic_regex", "string", null_since=0),
                            Field("assignment", _ASSIGNMENT),
                            Field("target_assignment", _ASSIGNMENT),
                            Field("member_type", "int8", since=1, default=-1),
                        )
                    ),
                ),
                Field("authorized_operations", "int32", default=_NO_OPERATIONS),
            )
        ),
    ),
)
