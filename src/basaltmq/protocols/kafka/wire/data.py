"""Schemas of the APIs for records and offsets: Produce, Fetch, ListOffsets, DeleteRecords, OffsetForLeaderEpoch."""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct

PRODUCE_REQUEST: Final = Struct(
    Field("transactional_id", "string", since=3, null_since=3),
    Field("acks", "int16"),
    Field("timeout_ms", "int32"),
    Field(
        "topics",
        Array(
            Struct(
                Field("name", "string"),
                Field("partitions", Array(Struct(Field("index", "int32"), Field("records", "records", null_since=0)))),
            )
        ),
    ),
)
PRODUCE_RESPONSE: Final = Struct(
    Field(
        "topics",
        Array(
            Struct(
                Field("name", "string"),
                Field(
                    "partitions",
                    Array(
                        Struct(
                            Field("index", "int32"),
                            Field("error_code", "int16"),
                            Field("base_offset", "int64", default=-1),
                            Field("log_append_time_ms", "int64", since=2, default=-1),
                            Field("log_start_offset", "int64", since=5, default=-1),
                            Field(
                                "record_errors",
                                Array(
                                    Struct(
                                        Field("batch_index", "int32"),
                                        Field("message", "string", null_since=0),
                                    )
                                ),
                                since=8,
                            ),
                            Field("error_message", "string", since=8, null_since=0),
                        )
                    ),
                ),
            )
        ),
    ),
    Field("throttle_time_ms", "int32", since=1),
)

FETCH_REQUEST: Final = Struct(
    Field("replica_id", "int32", until=14, default=-1),
    Field("max_wait_ms", "int32"),
    Field("min_bytes", "int32"),
    Field("max_bytes", "int32", since=3, default=0x7FFFFFFF),
    Field("isolation_level", "int8", since=4),
    Field("session_id", "int32", since=7),
    Field("session_epoch", "int32", since=7, default=-1),
    Field(
        "topics",
        Array(
            Struct(
                Field("topic", "string", until=12),
                Field("topic_id", "uuid", since=13),
                Field(
                    "partitions",
                    Array(
                        Struct(
                            Field("partition", "int32"),
                            Field("current_leader_epoch", "int32", since=9, default=-1),
                            Field("fetch_offset", "int64"),
                            Field("last_fetched_epoch", "int32", since=12, default=-1),
                            Field("log_start_offset", "int64", since=5, default=-1),
                            Field("partition_max_bytes", "int32"),
                        )
                    ),
                ),
            )
        ),
    ),
    Field(
        "forgotten_topics",
        Array(
            Struct(
                Field("topic", "string", until=12),
                Field("topic_id", "uuid", since=13),
                Field("partitions", Array("int32")),
            )
        ),
        since=7,
    ),
    Field("rack_id", "string", since=11),
    Field("cluster_id", "string", since=12, null_since=12, tag=0),
)
FETCH_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=1),
    Field("error_code", "int16", since=7),
    Field("session_id", "int32", since=7),
    Field(
        "topics",
        Array(
            Struct(
                Field("topic", "string", until=12),
                Field("topic_id", "uuid", since=13),
                Field(
                    "partitions",
                    Array(
                        Struct(
                            Field("partition", "int32"),
                            Field("error_code", "int16"),
                            Field("high_watermark", "int64", default=-1),
                            Field("last_stable_offset", "int64", since=4, default=-1),
                            Field("log_start_offset", "int64", since=5, default=-1),
                            Field(
                                "aborted_transactions",
                                Array(Struct(Field("producer_id", "int64"), Field("first_offset", "int64"))),
                                since=4,
                                null_since=0,
                            ),
                            Field("preferred_read_replica", "int32", since=11, default=-1),
                            Field("records", "records", null_since=0),
                        )
                    ),
                ),
            )
        ),
    ),
)

LIST_OFFSETS_REQUEST: Final = Struct(
    Field("replica_id", "int32"),
    Field("isolation_level", "int8", since=2),
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
                            Field("current_leader_epoch", "int32", since=4, default=-1),
                            Field("timestamp", "int64"),
                        )
                    ),
                ),
            )
        ),
    ),
    Field("timeout_ms", "int32", since=10),
)
LIST_OFFSETS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=2),
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
                            Field("error_code", "int16"),
                            Field("timestamp", "int64", default=-1),
                            Field("offset", "int64", default=-1),
                            Field("leader_epoch", "int32", since=4, default=-1),
                        )
                    ),
                ),
            )
        ),
    ),
)

DELETE_RECORDS_REQUEST: Final = Struct(
    Field(
        "topics",
        Array(
            Struct(
                Field("name", "string"),
                Field("partitions", Array(Struct(Field("partition_index", "int32"), Field("offset", "int64")))),
            )
        ),
    ),
    Field("timeout_ms", "int32"),
)
DELETE_RECORDS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
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
                            Field("low_watermark", "int64", default=-1),
                            Field("error_code", "int16"),
                        )
                    ),
                ),
            )
        ),
    ),
)

OFFSET_FOR_LEADER_EPOCH_REQUEST: Final = Struct(
    Field("replica_id", "int32", since=3, default=-2),
    Field(
        "topics",
        Array(
            Struct(
                Field("topic", "string"),
                Field(
                    "partitions",
                    Array(
                        Struct(
                            Field("partition", "int32"),
                            Field("current_leader_epoch", "int32", since=2, default=-1),
                            Field("leader_epoch", "int32"),
                        )
                    ),
                ),
            )
        ),
    ),
)
OFFSET_FOR_LEADER_EPOCH_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=2),
    Field(
        "topics",
        Array(
            Struct(
                Field("topic", "string"),
                Field(
                    "partitions",
                    Array(
                        Struct(
                            Field("error_code", "int16"),
                            Field("partition", "int32"),
                            Field("leader_epoch", "int32", since=1, default=-1),
                            Field("end_offset", "int64", default=-1),
                        )
                    ),
                ),
            )
        ),
    ),
)
