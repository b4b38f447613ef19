"""A message in a queue, and its row (SPEC C4).

The key holds queue, fairness key, enqueue time and id. The value holds the rest:

    | layout u8 | priority u8 | attempts u32 | weight u32 | leased ns u64 | expires ns u64
    | labels bytes u32 | properties bytes u32 | payload bytes u32 | labels | properties | payload |

`labels` is a MessagePack array of a map (headers) and an array (throttle keys), or empty if both are empty. `headers`
are text for scripts and people. `properties` is a protocol's own encoding of non-text properties, opaque here. Zero in
`leased ns` and `expires ns` means never. The fixed head allows readers to decode single fields in place.

Encoding a row takes about 0.4 us, with headers 0.7 us.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Final

import msgspec

from basaltmq.decoding import msgpack_decoder
from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError
from basaltmq.ids import check_id
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import queues as queue_keys

LAYOUT: Final = 2

PAYLOAD_BYTES_MAX: Final = 128 << 20
"""RabbitMQ's default limit. A payload is one value in memory, and two of this size fit a batch."""

PROPERTIES_BYTES_MAX: Final = 1 << 20
HEADERS_BYTES_MAX: Final = 1 << 20
"""Eight AMQP frames of headers. A script receives all of them."""

HEADERS_MAX: Final = 1024
THROTTLE_KEYS_MAX: Final = 64
"""Every delivery needs a token of each key, so each key adds to the cost of a delivery."""

QUEUE_NAME_BYTES_MAX: Final = 255
"""The limit of an AMQP short string, the smallest limit of the supported protocols."""

FAIRNESS_KEY_BYTES_MAX: Final = 1024
"""The fairness key is part of every message key."""

HEAD: Final = Struct(">BBIIQQIII")
"""The fixed part of a row, before the labels."""

_ENCODE_LABELS: Final = msgspec.msgpack.Encoder().encode
_DECODE_LABELS: Final = msgpack_decoder(tuple[dict[str, str], tuple[str, ...]])


class Message(msgspec.Struct, kw_only=True, gc=False):
    """A message in a queue."""

    id: bytes
    queue: str
    payload: bytes
    enqueued_ns: int
    fairness_key: str = "default"
    headers: dict[str, str] = {}
    properties: bytes = b""
    weight: int = 1
    throttle_keys: tuple[str, ...] = ()
    attempts: int = 0
    priority: int = 0
    leased_ns: int = 0
    expires_ns: int = 0

    def key(self) -> bytes:
        """The row key, constant while the message is in the queue."""
        return queue_keys.message_key(self.queue, self.fairness_key, self.enqueued_ns, self.id)


def check_message(message: Message) -> Message:
    """Check every field once, when the message enters. The encoder does not check."""
    check_id(message.id)
    check_queue_name(message.queue)
    _check_text("fairness key", message.fairness_key, FAIRNESS_KEY_BYTES_MAX)
    _check_bytes("payload", message.payload, PAYLOAD_BYTES_MAX)
    _check_bytes("properties", message.properties, PROPERTIES_BYTES_MAX)
    for name, low, high in _NUMBERS:
        value = getattr(message, name)
        if type(value) is not int or not low <= value <= high:
            raise InvalidArgumentError(f"{name} of a message must be {low} to {high}, not {value!r:.80}")
    _check_headers(message.headers)
    if len(message.throttle_keys) > THROTTLE_KEYS_MAX:
        raise LimitExceededError(f"{len(message.throttle_keys)} throttle keys exceed the limit of {THROTTLE_KEYS_MAX}")
    for key in message.throttle_keys:
        _check_text("throttle key", key, FAIRNESS_KEY_BYTES_MAX)
    return message


_U8_MAX: Final = (1 << 8) - 1
_U32_MAX: Final = (1 << 32) - 1
_U64_MAX: Final = (1 << 64) - 1
_NUMBERS: Final = (
    ("enqueued_ns", 0, _U64_MAX),
    ("leased_ns", 0, _U64_MAX),
    ("expires_ns", 0, _U64_MAX),
    ("weight", 1, _U32_MAX),
    ("attempts", 0, _U32_MAX),
    ("priority", 0, _U8_MAX),
)


def check_queue_name(name: str) -> str:
    _check_text("queue name", name, QUEUE_NAME_BYTES_MAX)
    if not name:
        raise InvalidArgumentError("a queue name must have at least one character")
    return name


def _check_text(what: str, text: str, bytes_max: int) -> int:
    try:
        size = len(text.encode())
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgumentError(f"a {what} must be Unicode text, not {text!r:.80}") from None
    if size > bytes_max:
        raise LimitExceededError(f"a {what} of {size} bytes of UTF-8 exceeds the limit of {bytes_max}")
    return size


def _check_bytes(what: str, raw: bytes, bytes_max: int) -> None:
    if not isinstance(raw, bytes):
        raise InvalidArgumentError(f"a message's {what} must be bytes, not {type(raw).__name__}")
    if len(raw) > bytes_max:
        raise LimitExceededError(f"a {what} of {len(raw)} bytes exceeds the limit of {bytes_max}")


def _check_headers(headers: dict[str, str]) -> None:
    if not isinstance(headers, dict):
        raise InvalidArgumentError(f"headers must be a dict of text, not {type(headers).__name__}")
    if len(headers) > HEADERS_MAX:
        raise LimitExceededError(f"{len(headers)} headers exceed the limit of {HEADERS_MAX}")
    size = 0
    for name, value in headers.items():
        size += _check_text("header name", name, key_parts.STRING_BYTES_MAX)
        size += _check_text("header value", value, HEADERS_BYTES_MAX)
    if size > HEADERS_BYTES_MAX:
        raise LimitExceededError(f"headers of {size} bytes exceed the limit of {HEADERS_BYTES_MAX}")


def encode_row(message: Message) -> bytes:
    """Return the row value of a checked message."""
    properties = message.properties
    payload = message.payload
    try:
        labels = b""
        if message.headers or message.throttle_keys:
            labels = _ENCODE_LABELS((message.headers, message.throttle_keys))
        head = HEAD.pack(
            LAYOUT,
            message.priority,
            message.attempts,
            message.weight,
            message.leased_ns,
            message.expires_ns,
            len(labels),
            len(properties),
            len(payload),
        )
        return head + labels + properties + payload
    except (struct.error, TypeError, AttributeError, OverflowError, UnicodeEncodeError) as error:
        check_message(message)
        raise InvalidArgumentError(f"message {message.id.hex()} cannot be stored: {error}") from None


def decode_row(key: bytes, row: bytes) -> Message:
    """Decode a message from its key and row value."""
    queue, fairness_key, enqueued_ns, message_id = queue_keys.decode_message_key(key)
    if len(row) < HEAD.size or row[0] != LAYOUT:
        raise _damaged(queue, message_id, row)
    _, priority, attempts, weight, leased_ns, expires_ns, labels_bytes, properties_bytes, payload_bytes = (
        HEAD.unpack_from(row)
    )
    at = HEAD.size + labels_bytes
    middle = at + properties_bytes
    if middle + payload_bytes != len(row):
        raise _damaged(queue, message_id, row)
    headers: dict[str, str] = {}
    throttle_keys: tuple[str, ...] = ()
    if labels_bytes:
        try:
            headers, throttle_keys = _DECODE_LABELS(row[HEAD.size : at])
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _damaged(queue, message_id, row) from None
    return Message(
        id=message_id,
        queue=queue,
        payload=row[middle:],
        enqueued_ns=enqueued_ns,
        fairness_key=fairness_key,
        headers=headers,
        properties=row[at:middle],
        weight=weight,
        throttle_keys=throttle_keys,
        attempts=attempts,
        priority=priority,
        leased_ns=leased_ns,
        expires_ns=expires_ns,
    )


def are_labels(raw: bytes) -> bool:
    """Whether the labels of a row, which may be empty, can be decoded."""
    if raw:
        try:
            _DECODE_LABELS(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
    return True


def _damaged(queue: str, message_id: bytes, row: bytes) -> CorruptionError:
    return CorruptionError(f"the row of message {message_id.hex()} in queue {queue!r} is damaged ({len(row)} bytes)")
