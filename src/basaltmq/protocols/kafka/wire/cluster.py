"""Schemas of the APIs for replicas, log directories and the controller, which admin tools use."""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct

_NO_OPERATIONS: Final = -(1 << 31)
_PARTITIONS: Final = (Field("topic", "string"), Field("partitions", Array("int32")))
_ERROR: Final = (Field("error_code", "int16"), Field("error_message", "string", null_since=0))

DESCRIBE_LOG_DIRS_REQUEST: Final = Struct(Field("topics", Array(Struct(*_PARTITIONS)), null_since=0))
DESCRIBE_LOG_DIRS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("error_code", "int16", since=3),
    Field(
        "results",
        Array(
            Struct(
                Field("error_code", "int16"),
                Field("log_dir", "string"),
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
                                        Field("partition_size", "int64"),
                                        Field("offset_lag", "int64"),
                                        Field("is_future_key", "bool"),
                                    )
                                ),
                            ),
                        )
                    ),
                ),
                Field("total_bytes", "int64", since=4, default=-1),
                Field("usable_bytes", "int64", since=4, default=-1),
            )
        ),
    ),
)

ELECT_LEADERS_REQUEST: Final = Struct(
    Field("election_type", "int8", since=1),
    Field("topic_partitions", Array(Struct(*_PARTITIONS)), null_since=0),
    Field("timeout_ms", "int32", default=60_000),
)
ELECT_LEADERS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("error_code", "int16", since=1),
    Field(
        "replica_election_results",
        Array(
            Struct(
                Field("topic", "string"),
                Field("partition_result", Array(Struct(Field("partition_id", "int32"), *_ERROR))),
            )
        ),
    ),
)

ALTER_REASSIGNMENTS_REQUEST: Final = Struct(
    Field("timeout_ms", "int32", default=60_000),
    Field("allow_replication_factor_change", "bool", since=1, default=True),
    Field(
        "topics",
        Array(
            Struct(
                Field("name", "string"),
                Field(
                    "partitions",
                    Array(Struct(Field("partition_index", "int32"), Field("replicas", Array("int32"), null_since=0))),
                ),
            )
        ),
    ),
)
ALTER_REASSIGNMENTS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("allow_replication_factor_change", "bool", since=1, default=True),
    *_ERROR,
    Field(
        "responses",
        Array(
            Struct(
                Field("name", "string"),
                Field("partitions", Array(Struct(Field("partition_index", "int32"), *_ERROR))),
            )
        ),
    ),
)

LIST_REASSIGNMENTS_REQUEST: Final = Struct(
    Field("timeout_ms", "int32", default=60_000),
    Field(
        "topics",
        Array(Struct(Field("name", "string"), Field("partition_indexes", Array("int32")))),
        null_since=0,
    ),
)
LIST_REASSIGNMENTS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    *_ERROR,
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
                            Field("replicas", Array("int32")),
                            Field("adding_replicas", Array("int32")),
                            Field("removing_replicas", Array("int32")),
                        )
                    ),
                ),
            )
        ),
    ),
)

_REPLICA_STATE: Final = Struct(
    Field("replica_id", "int32"),
    Field("replica_directory_id", "uuid", since=2),
    Field("log_end_offset", "int64"),
    Field("last_fetch_timestamp", "int64", since=1, default=-1),
    Field("last_caught_up_timestamp", "int64", since=1, default=-1),
)
DESCRIBE_QUORUM_REQUEST: Final = Struct(
    Field(
        "topics",
        Array(
            Struct(Field("topic_name", "string"), Field("partitions", Array(Struct(Field("partition_index", "int32")))))
        ),
    ),
)
DESCRIBE_QUORUM_RESPONSE: Final = Struct(
    Field("error_code", "int16"),
    Field("error_message", "string", since=2, null_since=2),
    Field(
        "topics",
        Array(
            Struct(
                Field("topic_name", "string"),
                Field(
                    "partitions",
                    Array(
                        Struct(
                            Field("partition_index", "int32"),
                            Field("error_code", "int16"),
                            Field("error_message", "string", since=2, null_since=2),
                            Field("leader_id", "int32"),
                            Field("leader_epoch", "int32"),
                            Field("high_watermark", "int64"),
                            Field("current_voters", Array(_REPLICA_STATE)),
                            Field("observers", Array(_REPLICA_STATE)),
                        )
                    ),
                ),
            )
        ),
    ),
    Field(
        "nodes",
        Array(
            Struct(
                Field("node_id", "int32"),
                Field(
                    "listeners",
                    Array(Struct(Field("name", "string"), Field("host", "string"), Field("port", "uint16"))),
                ),
            )
        ),
        since=2,
    ),
)

LIST_CONFIG_RESOURCES_REQUEST: Final = Struct(Field("resource_types", Array("int8"), since=1))
LIST_CONFIG_RESOURCES_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("error_code", "int16"),
    Field(
        "config_resources",
        Array(Struct(Field("resource_name", "string"), Field("resource_type", "int8", since=1, default=16))),
    ),
)

_CURSOR: Final = Struct(Field("topic_name", "string"), Field("partition_index", "int32"))
DESCRIBE_TOPIC_PARTITIONS_REQUEST: Final = Struct(
    Field("topics", Array(Struct(Field("name", "string")))),
    Field("response_partition_limit", "int32", default=2000),
    Field("cursor", _CURSOR, null_since=0),
)
DESCRIBE_TOPIC_PARTITIONS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field(
        "topics",
        Array(
            Struct(
                Field("error_code", "int16"),
                Field("name", "string", null_since=0),
                Field("topic_id", "uuid"),
                Field("is_internal", "bool"),
                Field(
                    "partitions",
                    Array(
                        Struct(
                            Field("error_code", "int16"),
                            Field("partition_index", "int32"),
                            Field("leader_id", "int32"),
                            Field("leader_epoch", "int32", default=-1),
                            Field("replica_nodes", Array("int32")),
                            Field("isr_nodes", Array("int32")),
                            Field("eligible_leader_replicas", Array("int32"), null_since=0),
                            Field("last_known_elr", Array("int32"), null_since=0),
                            Field("offline_replicas", Array("int32")),
                        )
                    ),
                ),
                Field("topic_authorized_operations", "int32", default=_NO_OPERATIONS),
            )
        ),
    ),
    Field("next_cursor", _CURSOR, null_since=0),
)

APIS: Final = (
    (35, "DescribeLogDirs", 1, 4, 2, DESCRIBE_LOG_DIRS_REQUEST, DESCRIBE_LOG_DIRS_RESPONSE),
    (43, "ElectLeaders", 0, 2, 2, ELECT_LEADERS_REQUEST, ELECT_LEADERS_RESPONSE),
    (45, "AlterPartitionReassignments", 0, 1, 0, ALTER_REASSIGNMENTS_REQUEST, ALTER_REASSIGNMENTS_RESPONSE),
    (46, "ListPartitionReassignments", 0, 0, 0, LIST_REASSIGNMENTS_REQUEST, LIST_REASSIGNMENTS_RESPONSE),
    (55, "DescribeQuorum", 0, 2, 0, DESCRIBE_QUORUM_REQUEST, DESCRIBE_QUORUM_RESPONSE),
    (74, "ListConfigResources", 0, 1, 0, LIST_CONFIG_RESOURCES_REQUEST, LIST_CONFIG_RESOURCES_RESPONSE),
    (75, "DescribeTopicPartitions", 0, 0, 0, DESCRIBE_TOPIC_PARTITIONS_REQUEST, DESCRIBE_TOPIC_PARTITIONS_RESPONSE),
)
"""Key, name, versions, first flexible version, and schemas."""
