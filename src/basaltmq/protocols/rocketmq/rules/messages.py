"""Rules for messages of producers. They follow Apache's proxy. Each rule has its own status code.

body            not empty, at most `body_bytes_max`
message id      1 to 255 characters
properties      at most 128, 16 KiB together, no reserved or control characters in names
tag             not blank, no '|', no control characters
keys            not blank, no control characters
message group   at most 64 bytes, only for type FIFO
lite topic      at most 64 characters of a name, only for type LITE
delivery time   only for type DELAY, at most `delay_ms_max` ahead
digest          of the body as sent, before decompression
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Final, NamedTuple

from basaltmq.protocols.rocketmq.rules.names import check_lite_name
from basaltmq.protocols.rocketmq.rules.status import Refused
from basaltmq.wire import rocketmq_wire_pb2 as wire

PROPERTIES_MAX: Final = 128
PROPERTIES_BYTES_MAX: Final = 16 << 10
MESSAGE_ID_CHARACTERS_MAX: Final = 255
MESSAGE_GROUP_BYTES_MAX: Final = 64
MESSAGES_MAX: Final = 1_024
"""Messages of one request. Clients send one, or a batch of at most 4 MiB."""

RESERVED: Final = "rocketmq."
"""Record headers with this prefix are system properties."""

KEYS: Final = RESERVED + "keys"
"""Header with all keys of a message, if it has several."""

_RESERVED_NAMES: Final = frozenset(
    {
        *("KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG", "PGROUP", "MIN_OFFSET"),
        *("MAX_OFFSET", "BUYER_ID", "ORIGIN_MESSAGE_ID", "TRANSFER_FLAG", "CORRECTION_FLAG", "MQ2_FLAG", "MSG_REGION"),
        *("RECONSUME_TIME", "TRACE_ON", "UNIQ_KEY", "MAX_RECONSUME_TIMES", "CONSUME_START_TIME", "POP_CK", "CLUSTER"),
        *("POP_CK_OFFSET", "1ST_POP_TIME", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "INSTANCE_ID", "CORRELATION_ID"),
        *("REPLY_TO_CLIENT", "TTL", "ARRIVE_TIME", "PUSH_REPLY_TIME", "MSG_TYPE", "INNER_MULTI_DISPATCH"),
        *("INNER_MULTI_QUEUE_OFFSET", "__SHARDINGKEY", "__STARTDELIVERTIME"),
    }
)
"""Property names that RocketMQ reserves."""

TYPE_NAMES: Final[dict[int, str]] = {
    wire.NORMAL: "NORMAL",
    wire.FIFO: "FIFO",
    wire.DELAY: "DELAY",
    wire.TRANSACTION: "TRANSACTION",
    wire.LITE: "LITE",
    wire.PRIORITY: "PRIORITY",
}


class MessageLimits(NamedTuple):
    """Limits that settings can change."""

    body_bytes_max: int = 4 << 20
    delay_ms_max: int = 40 * 24 * 3_600_000


def check_message(message: wire.Message, limits: MessageLimits, now_ms: int) -> None:
    """Raise Refused for a message that breaks a rule."""
    system = message.system_properties
    if not message.body:
        raise Refused(wire.MESSAGE_BODY_EMPTY, "the body of a message must not be empty")
    if len(message.body) > limits.body_bytes_max:
        raise Refused(
            wire.MESSAGE_BODY_TOO_LARGE,
            f"a body of {len(message.body)} bytes exceeds the limit of {limits.body_bytes_max} bytes "
            "(rocketmq.body_bytes_max)",
        )
    if not 0 < len(system.message_id.strip()) <= MESSAGE_ID_CHARACTERS_MAX:
        raise Refused(
            wire.ILLEGAL_MESSAGE_ID,
            f"a message id has 1 to {MESSAGE_ID_CHARACTERS_MAX} characters and is not blank",
        )
    _check_properties(message)
    if system.HasField("tag") and (not system.tag.strip() or "|" in system.tag or _has_control(system.tag)):
        raise Refused(
            wire.ILLEGAL_MESSAGE_TAG, f"tag {system.tag!r:.80}: a tag is not blank and has no '|' or control character"
        )
    for key in system.keys:
        if not key.strip() or _has_control(key):
            raise Refused(wire.ILLEGAL_MESSAGE_KEY, f"key {key!r:.80}: a key is not blank and has no control character")
    _check_type(message, limits, now_ms)
    check_digest(message)


def _check_properties(message: wire.Message) -> None:
    if len(message.user_properties) > PROPERTIES_MAX:
        raise Refused(
            wire.MESSAGE_PROPERTIES_TOO_LARGE,
            f"a message has {len(message.user_properties)} properties; at most {PROPERTIES_MAX} are allowed",
        )
    size = 0
    for name, value in message.user_properties.items():
        size += len(name.encode()) + len(value.encode())
        if not name.strip() or name in _RESERVED_NAMES or name.startswith(RESERVED) or _has_control(name):
            raise Refused(
                wire.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"property {name!r:.80}: a name is not blank, not reserved, and has no control character",
            )
        if _has_control(value):
            raise Refused(
                wire.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property {name!r:.80} has a control character in its value"
            )
    if size > PROPERTIES_BYTES_MAX:
        raise Refused(
            wire.MESSAGE_PROPERTIES_TOO_LARGE,
            f"the properties of a message have {size} bytes; at most {PROPERTIES_BYTES_MAX} are allowed",
        )


def _check_type(message: wire.Message, limits: MessageLimits, now_ms: int) -> None:
    """Check that the properties match the message type."""
    system = message.system_properties
    kind = message_type(message)
    marks: dict[int, bool] = {
        wire.FIFO: system.HasField("message_group"),
        wire.DELAY: system.HasField("delivery_timestamp"),
        wire.LITE: system.HasField("lite_topic"),
        wire.PRIORITY: system.HasField("priority"),
    }
    wrong = [TYPE_NAMES[each] for each, is_set in marks.items() if is_set and each != kind]
    if wrong:
        raise Refused(
            wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"the message is of type {TYPE_NAMES[kind]}, and has a property of type {wrong[0]}",
        )
    missing = kind in marks and not marks[kind]
    if kind == wire.FIFO:
        group = system.message_group
        if missing or not group.strip() or len(group.encode()) > MESSAGE_GROUP_BYTES_MAX or _has_control(group):
            raise Refused(
                wire.ILLEGAL_MESSAGE_GROUP,
                f"a FIFO message needs a message group of at most {MESSAGE_GROUP_BYTES_MAX} bytes that is not blank",
            )
    elif kind == wire.DELAY:
        due_ms = millis(system.delivery_timestamp)
        if missing or due_ms > now_ms + limits.delay_ms_max:
            raise Refused(
                wire.ILLEGAL_DELIVERY_TIME,
                f"a DELAY message needs a delivery time at most {limits.delay_ms_max} ms ahead (rocketmq.delay_ms_max)",
            )
    elif kind == wire.LITE:
        check_lite_name(system.lite_topic)
    elif kind == wire.PRIORITY and (missing or system.priority < 0):
        raise Refused(wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, "a PRIORITY message needs a priority of 0 or more")


def message_type(message: wire.Message) -> int:
    """Return the type of a message. A client that sets none sends NORMAL."""
    return message.system_properties.message_type or wire.NORMAL


def check_digest(message: wire.Message) -> None:
    """Raise MESSAGE_CORRUPTED if the digest of the body as sent is wrong."""
    digest = message.system_properties.body_digest
    if not digest.checksum or digest.type == wire.DIGEST_TYPE_UNSPECIFIED:
        return
    found = checksum(digest.type, message.body)
    if found is not None and found.lstrip("0") != digest.checksum.upper().lstrip("0"):
        raise Refused(
            wire.MESSAGE_CORRUPTED, f"the digest of the body is {found}, and the message has {digest.checksum!r:.80}"
        )


def checksum(kind: int, body: bytes) -> str | None:
    """Return the digest of a body in uppercase hex, CRC32 without leading zeros; None for an unknown type."""
    if kind == wire.CRC32:
        return f"{zlib.crc32(body):X}"
    if kind == wire.MD5:
        return hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    if kind == wire.SHA1:
        return hashlib.sha1(body, usedforsecurity=False).hexdigest().upper()
    return None


def millis(time: object) -> int:
    """Return a timestamp or a duration in milliseconds."""
    return int(time.seconds) * 1000 + int(time.nanos) // 1_000_000  # type: ignore[attr-defined]


def _has_control(text: str) -> bool:
    return not text.isprintable() and any(each < " " or each == "\x7f" for each in text)
