"""Kafka's error codes, and the mapping from Basalt's errors to them."""

from __future__ import annotations

from typing import Final

from basaltmq import errors

UNKNOWN_SERVER_ERROR: Final = -1
NONE: Final = 0
OFFSET_OUT_OF_RANGE: Final = 1
CORRUPT_MESSAGE: Final = 2
UNKNOWN_TOPIC_OR_PARTITION: Final = 3
NOT_LEADER_OR_FOLLOWER: Final = 6
REQUEST_TIMED_OUT: Final = 7
MESSAGE_TOO_LARGE: Final = 10
OFFSET_METADATA_TOO_LARGE: Final = 12
COORDINATOR_NOT_AVAILABLE: Final = 15
INVALID_TOPIC_EXCEPTION: Final = 17
INVALID_REQUIRED_ACKS: Final = 21
ILLEGAL_GENERATION: Final = 22
INCONSISTENT_GROUP_PROTOCOL: Final = 23
INVALID_GROUP_ID: Final = 24
UNKNOWN_MEMBER_ID: Final = 25
INVALID_SESSION_TIMEOUT: Final = 26
REBALANCE_IN_PROGRESS: Final = 27
TOPIC_AUTHORIZATION_FAILED: Final = 29
GROUP_AUTHORIZATION_FAILED: Final = 30
CLUSTER_AUTHORIZATION_FAILED: Final = 31
INVALID_TIMESTAMP: Final = 32
UNSUPPORTED_SASL_MECHANISM: Final = 33
ILLEGAL_SASL_STATE: Final = 34
UNSUPPORTED_VERSION: Final = 35
TOPIC_ALREADY_EXISTS: Final = 36
INVALID_PARTITIONS: Final = 37
INVALID_REPLICATION_FACTOR: Final = 38
INVALID_REPLICA_ASSIGNMENT: Final = 39
INVALID_CONFIG: Final = 40
INVALID_REQUEST: Final = 42
UNSUPPORTED_FOR_MESSAGE_FORMAT: Final = 43
POLICY_VIOLATION: Final = 44
OUT_OF_ORDER_SEQUENCE_NUMBER: Final = 45
INVALID_PRODUCER_EPOCH: Final = 47
INVALID_TXN_STATE: Final = 48
INVALID_PRODUCER_ID_MAPPING: Final = 49
INVALID_TRANSACTION_TIMEOUT: Final = 50
CONCURRENT_TRANSACTIONS: Final = 51
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = 53
OPERATION_NOT_ATTEMPTED: Final = 55
KAFKA_STORAGE_ERROR: Final = 56
SASL_AUTHENTICATION_FAILED: Final = 58
NON_EMPTY_GROUP: Final = 68
GROUP_ID_NOT_FOUND: Final = 69
FETCH_SESSION_ID_NOT_FOUND: Final = 70
INVALID_FETCH_SESSION_EPOCH: Final = 71
UNSUPPORTED_COMPRESSION_TYPE: Final = 76
MEMBER_ID_REQUIRED: Final = 79
GROUP_MAX_SIZE_REACHED: Final = 81
FENCED_INSTANCE_ID: Final = 82
ELECTION_NOT_NEEDED: Final = 84
NO_REASSIGNMENT_IN_PROGRESS: Final = 85
INVALID_RECORD: Final = 87
GROUP_SUBSCRIBED_TO_TOPIC: Final = 86
UNKNOWN_LEADER_EPOCH: Final = 75
UNACCEPTABLE_CREDENTIAL: Final = 93
RESOURCE_NOT_FOUND: Final = 91
DUPLICATE_RESOURCE: Final = 92
UNKNOWN_TOPIC_ID: Final = 100
FETCH_SESSION_TOPIC_ID_ERROR: Final = 106
UNSTABLE_OFFSET_COMMIT: Final = 88
PRODUCER_FENCED: Final = 90
TRANSACTIONAL_ID_NOT_FOUND: Final = 105
FENCED_MEMBER_EPOCH: Final = 110
UNRELEASED_INSTANCE_ID: Final = 111
UNSUPPORTED_ASSIGNOR: Final = 112
STALE_MEMBER_EPOCH: Final = 113
INVALID_REGULAR_EXPRESSION: Final = 128


class Refused(Exception):
    """A rejected batch or request, with its Kafka error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (errors.OffsetOutOfRangeError, OFFSET_OUT_OF_RANGE),
    (errors.TopicNotFoundError, UNKNOWN_TOPIC_OR_PARTITION),
    (errors.ShardNotFoundError, UNKNOWN_TOPIC_OR_PARTITION),
    (errors.TopicExistsError, TOPIC_ALREADY_EXISTS),
    (errors.GroupNotFoundError, GROUP_ID_NOT_FOUND),
    (errors.NotLeaderError, NOT_LEADER_OR_FOLLOWER),
    (errors.AccessRefusedError, TOPIC_AUTHORIZATION_FAILED),
    (errors.UnsupportedCodecError, UNSUPPORTED_COMPRESSION_TYPE),
    (errors.LimitExceededError, MESSAGE_TOO_LARGE),
    (errors.TimedOutError, REQUEST_TIMED_OUT),
    (errors.PublishersBlockedError, REQUEST_TIMED_OUT),
    (errors.StoreStalledError, REQUEST_TIMED_OUT),
    (errors.VHostDownError, COORDINATOR_NOT_AVAILABLE),
    (errors.InvalidConfigError, INVALID_CONFIG),
    (errors.TimestampRangeError, INVALID_TIMESTAMP),
    (errors.InvalidArgumentError, INVALID_REQUEST),
    (errors.StorageError, KAFKA_STORAGE_ERROR),
)


def code_of(error: BaseException) -> int:
    """Return the Kafka error code of an error."""
    if isinstance(error, Refused):
        return error.code
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return UNKNOWN_SERVER_ERROR
