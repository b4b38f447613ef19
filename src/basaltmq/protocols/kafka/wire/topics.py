"""Schemas of the APIs for topics, configs and the cluster."""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct

_NO_OPERATIONS: Final = -(1 << 31)
"""Authorized operations were not requested, or are not returned."""

METADATA_REQUEST: Final = Struct(
    Field(
        "topics",
        Array(
            Struct(
                Field("topic_id", "uuid", since=10),
                Field("name", "string", null_since=10),
            )
        ),
        null_since=1,
    ),
    Field("allow_auto_topic_creation", "bool", since=4, default=True),
    Field("include_cluster_authorized_operations", "bool", since=8, until=10),
    Field("include_topic_authorized_operations", "bool", since=8),
)
METADATA_PARTITION: Final = Struct(
    Field("error_code", "int16"),
    Field("partition_index", "int32"),
    Field("leader_id", "int32"),
    Field("leader_epoch", "int32", since=7, default=-1),
    Field("replica_nodes", Array("int32")),
    Field("isr_nodes", Array("int32")),
    Field("offline_replicas", Array("int32"), since=5),
)

METADATA_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=3),
    Field(
        "brokers",
        Array(
            Struct(
                Field("node_id", "int32"),
                Field("host", "string"),
                Field("port", "int32"),
                Field("rack", "string", since=1, null_since=0),
            )
        ),
    ),
    Field("cluster_id", "string", since=2, null_since=0),
    Field("controller_id", "int32", since=1, default=-1),
    Field(
        "topics",
        Array(
            Struct(
                Field("error_code", "int16"),
                Field("name", "string", null_since=12),
                Field("topic_id", "uuid", since=10),
                Field("is_internal", "bool", since=1),
                Field(
                    "partitions",
                    Array(METADATA_PARTITION),
                ),
                Field("topic_authorized_operations", "int32", since=8, default=_NO_OPERATIONS),
            )
        ),
    ),
    Field("cluster_authorized_operations", "int32", since=8, until=10, default=_NO_OPERATIONS),
)

CREATE_TOPICS_REQUEST: Final = Struct(
    Field(
        "topics",
        Array(
            Struct(
                Field("name", "string"),
                Field("num_partitions", "int32"),
                Field("replication_factor", "int16"),
                Field(
                    "assignments",
                    Array(Struct(Field("partition_index", "int32"), Field("broker_ids", Array("int32")))),
                ),
                Field(
                    "configs",
                    Array(Struct(Field("name", "string"), Field("value", "string", null_since=0))),
                ),
            )
        ),
    ),
    Field("timeout_ms", "int32"),
    Field("validate_only", "bool", since=1),
)
CREATED_CONFIG: Final = Struct(
    Field("name", "string"),
    Field("value", "string", null_since=0),
    Field("read_only", "bool"),
    Field("config_source", "int8", default=-1),
    Field("is_sensitive", "bool"),
)
CREATE_TOPICS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=2),
    Field(
        "topics",
        Array(
            Struct(
                Field("name", "string"),
                Field("topic_id", "uuid", since=7),
                Field("error_code", "int16"),
                Field("error_message", "string", since=1, null_since=0),
                Field("num_partitions", "int32", since=5, default=-1),
                Field("replication_factor", "int16", since=5, default=-1),
                Field(
                    "configs",
                    Array(CREATED_CONFIG),
                    since=5,
                    null_since=5,
                ),
            )
        ),
    ),
)

DELETE_TOPICS_REQUEST: Final = Struct(
    Field(
        "topics",
        Array(Struct(Field("name", "string", null_since=6), Field("topic_id", "uuid", since=6))),
        since=6,
    ),
    Field("topic_names", Array("string"), until=5),
    Field("timeout_ms", "int32"),
)
DELETE_TOPICS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=1),
    Field(
        "responses",
        Array(
            Struct(
                Field("name", "string", null_since=6),
                Field("topic_id", "uuid", since=6),
                Field("error_code", "int16"),
                Field("error_message", "string", since=5, null_since=0),
            )
        ),
    ),
)

CREATE_PARTITIONS_REQUEST: Final = Struct(
    Field(
        "topics",
        Array(
            Struct(
                Field("name", "string"),
                Field("count", "int32"),
                Field("assignments", Array(Struct(Field("broker_ids", Array("int32")))), null_since=0),
            )
        ),
    ),
    Field("timeout_ms", "int32"),
    Field("validate_only", "bool"),
)
CREATE_PARTITIONS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field(
        "results",
        Array(
            Struct(
                Field("name", "string"),
                Field("error_code", "int16"),
                Field("error_message", "string", null_since=0),
            )
        ),
    ),
)

DESCRIBE_CONFIGS_REQUEST: Final = Struct(
    Field(
        "resources",
        Array(
            Struct(
                Field("resource_type", "int8"),
                Field("resource_name", "string"),
                Field("configuration_keys", Array("string"), null_since=0),
            )
        ),
    ),
    Field("include_synonyms", "bool", since=1),
    Field("include_documentation", "bool", since=3),
)
DESCRIBE_CONFIGS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field(
        "results",
        Array(
            Struct(
                Field("error_code", "int16"),
                Field("error_message", "string", null_since=0),
                Field("resource_type", "int8"),
                Field("resource_name", "string"),
                Field(
                    "configs",
                    Array(
                        Struct(
                            Field("name", "string"),
                            Field("value", "string", null_since=0),
                            Field("read_only", "bool"),
                            Field("config_source", "int8", since=1, default=-1),
                            Field("is_sensitive", "bool"),
                            Field(
                                "synonyms",
                                Array(
                                    Struct(
                                        Field("name", "string"),
                                        Field("value", "string", null_since=0),
                                        Field("source", "int8"),
                                    )
                                ),
                                since=1,
                            ),
                            Field("config_type", "int8", since=3),
                            Field("documentation", "string", since=3, null_since=0),
                        )
                    ),
                ),
            )
        ),
    ),
)

INCREMENTAL_ALTER_CONFIGS_REQUEST: Final = Struct(
    Field(
        "resources",
        Array(
            Struct(
                Field("resource_type", "int8"),
                Field("resource_name", "string"),
                Field(
                    "configs",
                    Array(
                        Struct(
                            Field("name", "string"),
                            Field("config_operation", "int8"),
                            Field("value", "string", null_since=0),
                        )
                    ),
                ),
            )
        ),
    ),
    Field("validate_only", "bool"),
)
INCREMENTAL_ALTER_CONFIGS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field(
        "responses",
        Array(
            Struct(
                Field("error_code", "int16"),
                Field("error_message", "string", null_since=0),
                Field("resource_type", "int8"),
                Field("resource_name", "string"),
            )
        ),
    ),
)

ALTER_CONFIGS_REQUEST: Final = Struct(
    Field(
        "resources",
        Array(
            Struct(
                Field("resource_type", "int8"),
                Field("resource_name", "string"),
                Field("configs", Array(Struct(Field("name", "string"), Field("value", "string", null_since=0)))),
            )
        ),
    ),
    Field("validate_only", "bool"),
)
ALTER_CONFIGS_RESPONSE: Final = INCREMENTAL_ALTER_CONFIGS_RESPONSE

DESCRIBE_CLUSTER_REQUEST: Final = Struct(
    Field("include_cluster_authorized_operations", "bool"),
    Field("endpoint_type", "int8", since=1, default=1),
    Field("include_fenced_brokers", "bool", since=2),
)
DESCRIBE_CLUSTER_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("error_code", "int16"),
    Field("error_message", "string", null_since=0),
    Field("endpoint_type", "int8", since=1, default=1),
    Field("cluster_id", "string"),
    Field("controller_id", "int32", default=-1),
    Field(
        "brokers",
        Array(
            Struct(
                Field("broker_id", "int32"),
                Field("host", "string"),
                Field("port", "int32"),
                Field("rack", "string", null_since=0),
                Field("is_fenced", "bool", since=2),
            )
        ),
    ),
    Field("cluster_authorized_operations", "int32", default=-(1 << 31)),
)
