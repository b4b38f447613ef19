"""Schemas of the transaction APIs."""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.wire.schema import Array, Field, Struct

_PRODUCER: Final = (Field("producer_id", "int64"), Field("producer_epoch", "int16"))
_PARTITION_ERRORS: Final = Array(Struct(Field("partition_index", "int32"), Field("error_code", "int16")))
_CODE: Final = Struct(Field("throttle_time_ms", "int32"), Field("error_code", "int16"))

ADD_PARTITIONS_TO_TXN_REQUEST: Final = Struct(
    Field("transactional_id", "string"),
    *_PRODUCER,
    Field("topics", Array(Struct(Field("name", "string"), Field("partitions", Array("int32"))))),
)
ADD_PARTITIONS_TO_TXN_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("results", Array(Struct(Field("name", "string"), Field("results", _PARTITION_ERRORS)))),
)

ADD_OFFSETS_TO_TXN_REQUEST: Final = Struct(Field("transactional_id", "string"), *_PRODUCER, Field("group_id", "string"))
ADD_OFFSETS_TO_TXN_RESPONSE: Final = _CODE

END_TXN_REQUEST: Final = Struct(Field("transactional_id", "string"), *_PRODUCER, Field("committed", "bool"))
END_TXN_RESPONSE: Final = _CODE

TXN_OFFSET_COMMIT_REQUEST: Final = Struct(
    Field("transactional_id", "string"),
    Field("group_id", "string"),
    *_PRODUCER,
    Field("generation_id", "int32", since=3, default=-1),
    Field("member_id", "string", since=3),
    Field("group_instance_id", "string", since=3, null_since=3),
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
                            Field("committed_leader_epoch", "int32", since=2, default=-1),
                            Field("committed_metadata", "string", null_since=0),
                        )
                    ),
                ),
            )
        ),
    ),
)
TXN_OFFSET_COMMIT_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("topics", Array(Struct(Field("name", "string"), Field("partitions", _PARTITION_ERRORS)))),
)

DESCRIBE_PRODUCERS_REQUEST: Final = Struct(
    Field("topics", Array(Struct(Field("name", "string"), Field("partition_indexes", Array("int32")))))
)
DESCRIBE_PRODUCERS_RESPONSE: Final = Struct(
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
                            Field("error_code", "int16"),
                            Field("error_message", "string", null_since=0),
                            Field(
                                "active_producers",
                                Array(
                                    Struct(
                                        Field("producer_id", "int64"),
                                        Field("producer_epoch", "int32"),
                                        Field("last_sequence", "int32", default=-1),
                                        Field("last_timestamp", "int64", default=-1),
                                        Field("coordinator_epoch", "int32"),
                                        Field("current_txn_start_offset", "int64", default=-1),
                                    )
                                ),
                            ),
                        )
                    ),
                ),
            )
        ),
    ),
)

DESCRIBE_TRANSACTIONS_REQUEST: Final = Struct(Field("transactional_ids", Array("string")))
DESCRIBE_TRANSACTIONS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field(
        "transaction_states",
        Array(
            Struct(
                Field("error_code", "int16"),
                Field("transactional_id", "string"),
                Field("transaction_state", "string"),
                Field("transaction_timeout_ms", "int32"),
                Field("transaction_start_time_ms", "int64", default=-1),
                Field("producer_id", "int64", default=-1),
                Field("producer_epoch", "int16", default=-1),
                Field("topics", Array(Struct(Field("topic", "string"), Field("partitions", Array("int32"))))),
            )
        ),
    ),
)

LIST_TRANSACTIONS_REQUEST: Final = Struct(
    Field("state_filters", Array("string")), Field("producer_id_filters", Array("int64"))
)
LIST_TRANSACTIONS_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("error_code", "int16"),
    Field("unknown_state_filters", Array("string")),
    Field(
        "transaction_states",
        Array(
            Struct(
                Field("transactional_id", "string"),
                Field("producer_id", "int64"),
                Field("transaction_state", "string"),
            )
        ),
    ),
)

APIS: Final = (
    (24, "AddPartitionsToTxn", 3, ADD_PARTITIONS_TO_TXN_REQUEST, ADD_PARTITIONS_TO_TXN_RESPONSE),
    (25, "AddOffsetsToTxn", 3, ADD_OFFSETS_TO_TXN_REQUEST, ADD_OFFSETS_TO_TXN_RESPONSE),
    (26, "EndTxn", 3, END_TXN_REQUEST, END_TXN_RESPONSE),
    (28, "TxnOffsetCommit", 3, TXN_OFFSET_COMMIT_REQUEST, TXN_OFFSET_COMMIT_RESPONSE),
    (61, "DescribeProducers", 0, DESCRIBE_PRODUCERS_REQUEST, DESCRIBE_PRODUCERS_RESPONSE),
    (65, "DescribeTransactions", 0, DESCRIBE_TRANSACTIONS_REQUEST, DESCRIBE_TRANSACTIONS_RESPONSE),
    (66, "ListTransactions", 0, LIST_TRANSACTIONS_REQUEST, LIST_TRANSACTIONS_RESPONSE),
)
"""(API key, name, highest version, request, response). The lowest version is 0; only the highest is flexible."""
