"""Schemas of the classic consumer group APIs and of committed offsets."""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct

_NO_OPERATIONS: Final = -(1 << 31)

JOIN_GROUP_REQUEST: Final = Struct(
    Field("group_id", "string"),
    Field("session_timeout_ms", "int32"),
    Field("rebalance_timeout_ms", "int32", since=1, default=-1),
    Field("member_id", "string"),
    Field("group_instance_id", "string", since=5, null_since=0),
    Field("protocol_type", "string"),
    Field("protocols", Array(Struct(Field("name", "string"), Field("metadata", "bytes")))),
    Field("reason", "string", since=8, null_since=0),
)
JOIN_GROUP_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=2),
    Field("error_code", "int16"),
    Field("generation_id", "int32", default=-1),
    Field("protocol_type", "string", since=7, null_since=0),
    Field("protocol_name", "string", null_since=7, default=""),
    Field("leader", "string"),
    Field("skip_assignment", "bool", since=9),
    Field("member_id", "string"),
    Field(
        "members",
        Array(
            Struct(
                Field("member_id", "string"),
                Field("group_instance_id", "string", since=5, null_since=0),
                Field("metadata", "bytes"),
            )
        ),
    ),
)

SYNC_GROUP_REQUEST: Final = Struct(
    Field("group_id", "string"),
    Field("generation_id", "int32"),
    Field("member_id", "string"),
    Field("group_instance_id", "string", since=3, null_since=0),
    Field("protocol_type", "string", since=5, null_since=0),
    Field("protocol_name", "string", since=5, null_since=0),
    Field("assignments", Array(Struct(Field("member_id", "string"), Field("assignment", "bytes")))),
)
SYNC_GROUP_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=1),
    Field("error_code", "int16"),
    Field("protocol_type", "string", since=5, null_since=0),
    Field("protocol_name", "string", since=5, null_since=0),
    Field("assignment", "bytes"),
)

HEARTBEAT_REQUEST: Final = Struct(
    Field("group_id", "string"),
    Field("generation_id", "int32"),
    Field("member_id", "string"),
    Field("group_instance_id", "string", since=3, null_since=0),
)
HEARTBEAT_RESPONSE: Final = Struct(Field("throttle_time_ms", "int32", since=1), Field("error_code", "int16"))

LEAVE_GROUP_REQUEST: Final = Struct(
    Field("group_id", "string"),
    Field("member_id", "string", until=2),
    Field(
        "members",
        Array(
            Struct(
                Field("member_id", "string"),
                Field("group_instance_id", "string", null_since=0),
                Field("reason", "string", since=5, null_since=0),
            )
        ),
        since=3,
    ),
)
LEAVE_GROUP_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=1),
    Field("error_code", "int16"),
    Field(
        "members",
        Array(
            Struct(
                Field("member_id", "string"),
                Field("group_instance_id", "string", null_since=0),
                Field("error_code", "int16"),
            )
        ),
        since=3,
    ),
)

OFFSET_COMMIT_REQUEST: Final = Struct(
    Field("group_id", "string"),
    Field("generation_id", "int32", default=-1),
    Field("member_id", "string"),
    Field("group_instance_id", "string", since=7, null_since=0),
    Field("retention_time_ms", "int64", until=4, default=-1),
    Field(
        "topics",
        Array(
            Struct(
                Field("name", "string"),
                Field(
                    "partitions",
                    Array(
                        Struct(
                            Field("partition_index", "int32"),
                            Field("committed_offset", "int64"),
                            Field("committed_leader_epoch", "int32", since=6, default=-1),
                            Field("committed_metadata", "string", null_since=0),
                        )
                    ),
                ),
            )
        ),
    ),
)
_PARTITION_ERRORS: Final = Array(Struct(Field("partition_index", "int32"), Field("error_code", "int16")))
OFFSET_COMMIT_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=3),
    Field("topics", Array(Struct(Field("name", "string"), Field("partitions", _PARTITION_ERRORS)))),
)

_WANTED: Final = Array(Struct(Field("name", "string"), Field("partition_indexes", Array("int32"))))
_COMMITTED: Final = Array(
    Struct(
        Field("name", "string"),
        Field(
            "partitions",
            Array(
                Struct(
                    Field("partition_index", "int32"),
                    Field("committed_offset", "int64", default=-1),
                    Field("committed_leader_epoch", "int32", since=5, default=-1),
                    Field("metadata", "string", null_since=0, default=""),
                    Field("error_code", "int16"),
                )
            ),
        ),
    )
)
OFFSET_FETCH_REQUEST: Final = Struct(
    Field("group_id", "string", until=7),
    Field("topics", _WANTED, until=7, null_since=2),
    Field(
        "groups",
        Array(
            Struct(
                Field("group_id", "string"),
                Field("member_id", "string", since=9, null_since=0),
                Field("member_epoch", "int32", since=9, default=-1),
                Field("topics", _WANTED, null_since=0),
            )
        ),
        since=8,
    ),
    Field("require_stable", "bool", since=7),
)
OFFSET_FETCH_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=3),
    Field("topics", _COMMITTED, until=7),
    Field("error_code", "int16", since=2, until=7),
    Field(
        "groups",
        Array(Struct(Field("group_id", "string"), Field("topics", _COMMITTED), Field("error_code", "int16"))),
        since=8,
    ),
)

DESCRIBE_GROUPS_REQUEST: Final = Struct(
    Field("groups", Array("string")), Field("include_authorized_operations", "bool", since=3)
)
DESCRIBE_GROUPS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=1),
    Field(
        "groups",
        Array(
            Struct(
                Field("error_code", "int16"),
                Field("error_message", "string", since=6, null_since=0),
                Field("group_id", "string"),
                Field("group_state", "string"),
                Field("protocol_type", "string"),
                Field("protocol_data", "string"),
                Field(
                    "members",
                    Array(
                        Struct(
                            Field("member_id", "string"),
                            Field("group_instance_id", "string", since=4, null_since=0),
                            Field("client_id", "string"),
                            Field("client_host", "string"),
                            Field("member_metadata", "bytes"),
                            Field("member_assignment", "bytes"),
                        )
                    ),
                ),
                Field("authorized_operations", "int32", since=3, default=_NO_OPERATIONS),
            )
        ),
    ),
)

LIST_GROUPS_REQUEST: Final = Struct(
    Field("states_filter", Array("string"), since=4), Field("types_filter", Array("string"), since=5)
)
LIST_GROUPS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=1),
    Field("error_code", "int16"),
    Field(
        "groups",
        Array(
            Struct(
                Field("group_id", "string"),
                Field("protocol_type", "string"),
                Field("group_state", "string", since=4),
                Field("group_type", "string", since=5),
            )
        ),
    ),
)

DELETE_GROUPS_REQUEST: Final = Struct(Field("groups_names", Array("string")))
DELETE_GROUPS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("results", Array(Struct(Field("group_id", "string"), Field("error_code", "int16")))),
)

OFFSET_DELETE_REQUEST: Final = Struct(
    Field("group_id", "string"),
    Field(
        "topics",
        Array(Struct(Field("name", "string"), Field("partitions", Array(Struct(Field("partition_index", "int32")))))),
    ),
)
OFFSET_DELETE_RESPONSE: Final = Struct(
    Field("error_code", "int16"),
    Field("throttle_time_ms", "int32"),
    Field("topics", Array(Struct(Field("name", "string"), Field("partitions", _PARTITION_ERRORS)))),
)
