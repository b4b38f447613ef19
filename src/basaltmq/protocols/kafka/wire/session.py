"""Schemas of the APIs for versions, authentication, SCRAM credentials, coordinators and producer ids."""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.kafka.wire.schema import EVER, Array, Field, Struct

API_VERSIONS_REQUEST: Final = Struct(
    Field("client_software_name", "string", since=3),
    Field("client_software_version", "string", since=3),
)
API_VERSIONS_KEY: Final = Struct(
    Field("api_key", "int16"), Field("min_version", "int16"), Field("max_version", "int16")
)
API_VERSIONS_RESPONSE: Final = Struct(
    Field("error_code", "int16"),
    Field("api_keys", Array(API_VERSIONS_KEY)),
    Field("throttle_time_ms", "int32", since=1),
    Field(
        "supported_features",
        Array(Struct(Field("name", "string"), Field("min_version", "int16"), Field("max_version", "int16"))),
        since=3,
        tag=0,
    ),
    Field("finalized_features_epoch", "int64", since=3, tag=1, default=-1),
    Field(
        "finalized_features",
        Array(
            Struct(Field("name", "string"), Field("max_version_level", "int16"), Field("min_version_level", "int16"))
        ),
        since=3,
        tag=2,
    ),
)

SASL_HANDSHAKE_REQUEST: Final = Struct(Field("mechanism", "string"))
SASL_HANDSHAKE_RESPONSE: Final = Struct(Field("error_code", "int16"), Field("mechanisms", Array("string")))

SASL_AUTHENTICATE_REQUEST: Final = Struct(Field("auth_bytes", "bytes"))
SASL_AUTHENTICATE_RESPONSE: Final = Struct(
    Field("error_code", "int16"),
    Field("error_message", "string", null_since=0),
    Field("auth_bytes", "bytes"),
    Field("session_lifetime_ms", "int64", since=1),
)

INIT_PRODUCER_ID_REQUEST: Final = Struct(
    Field("transactional_id", "string", null_since=0),
    Field("transaction_timeout_ms", "int32"),
    Field("producer_id", "int64", since=3, default=-1),
    Field("producer_epoch", "int16", since=3, default=-1),
)
INIT_PRODUCER_ID_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("error_code", "int16"),
    Field("producer_id", "int64", default=-1),
    Field("producer_epoch", "int16"),
)

FIND_COORDINATOR_REQUEST: Final = Struct(
    Field("key", "string", until=3),
    Field("key_type", "int8", since=1),
    Field("coordinator_keys", Array("string"), since=4),
)
FIND_COORDINATOR_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32", since=1),
    Field("error_code", "int16", until=3),
    Field("error_message", "string", since=1, until=3, null_since=1),
    Field("node_id", "int32", until=3),
    Field("host", "string", until=3),
    Field("port", "int32", until=3),
    Field(
        "coordinators",
        Array(
            Struct(
                Field("key", "string"),
                Field("node_id", "int32"),
                Field("host", "string"),
                Field("port", "int32"),
                Field("error_code", "int16"),
                Field("error_message", "string", null_since=0),
            )
        ),
        since=4,
        until=EVER,
    ),
)

DESCRIBE_SCRAM_REQUEST: Final = Struct(Field("users", Array(Struct(Field("name", "string"))), null_since=0))
DESCRIBE_SCRAM_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field("error_code", "int16"),
    Field("error_message", "string", null_since=0),
    Field(
        "results",
        Array(
            Struct(
                Field("user", "string"),
                Field("error_code", "int16"),
                Field("error_message", "string", null_since=0),
                Field("credential_infos", Array(Struct(Field("mechanism", "int8"), Field("iterations", "int32")))),
            )
        ),
    ),
)

ALTER_SCRAM_REQUEST: Final = Struct(
    Field("deletions", Array(Struct(Field("name", "string"), Field("mechanism", "int8")))),
    Field(
        "upsertions",
        Array(
            Struct(
                Field("name", "string"),
                Field("mechanism", "int8"),
                Field("iterations", "int32"),
                Field("salt", "bytes"),
                Field("salted_password", "bytes"),
            )
        ),
    ),
)
ALTER_SCRAM_RESPONSE: Final = Struct(
    Field("throttle_time_ms", "int32"),
    Field(
        "results",
        Array(
            Struct(
                Field("user", "string"),
                Field("error_code", "int16"),
                Field("error_message", "string", null_since=0),
            )
        ),
    ),
)
