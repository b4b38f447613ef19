"""Message properties: the AMQP 0-9-1 content header, which is also the stored format.

    | flags u16 | property, in the order of the bits, for each bit set ... |

    bit 15 content-type    shortstr     bit 8 expiration   shortstr
        14 content-encoding shortstr        7 message-id   shortstr
        13 headers          table           6 timestamp    u64
        12 delivery-mode    u8              5 type         shortstr
        11 priority         u8              4 user-id      shortstr
        10 correlation-id   shortstr        3 app-id       shortstr
         9 reply-to         shortstr        2 cluster-id   shortstr

Bit 1 is unused. Bit 0 would announce more flags, which AMQP 0-9-1 does not define. Both are refused.

The broker passes properties through unchanged. On publish, `peek` reads the fields that affect routing and storage. It
also validates all fields, because consumers receive the same bytes.

A message in a queue stores them in an envelope, in the order of a delivery:

    envelope   | exchange shortstr | routing key shortstr | properties |
"""

from __future__ import annotations

import hashlib
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from basaltmq.broker.message import amqp_table
from basaltmq.broker.message.amqp_table import Table, Timestamp
from basaltmq.errors import BadExpirationError, MalformedPropertiesError, MalformedTableError

PERSISTENT: Final = 2
"""The delivery mode of a message that survives a restart."""

HAS_CONTENT_TYPE: Final = 1 << 15
HAS_CONTENT_ENCODING: Final = 1 << 14
HAS_HEADERS: Final = 1 << 13
HAS_DELIVERY_MODE: Final = 1 << 12
HAS_PRIORITY: Final = 1 << 11
HAS_CORRELATION_ID: Final = 1 << 10
HAS_REPLY_TO: Final = 1 << 9
HAS_EXPIRATION: Final = 1 << 8
HAS_MESSAGE_ID: Final = 1 << 7
HAS_TIMESTAMP: Final = 1 << 6
HAS_TYPE: Final = 1 << 5
HAS_USER_ID: Final = 1 << 4
HAS_APP_ID: Final = 1 << 3
HAS_CLUSTER_ID: Final = 1 << 2
_UNUSED: Final = 0b11

BARE_HEADER: Final = "x-amqp-1.0"
"""Header with the encoded sections of a message of AMQP 1.0. Consumers of other protocols do not get it."""

EXPIRATION_MS_MAX: Final = 315_360_000_000
"""Ten years, RabbitMQ's limit."""

NONE: Final = b"\0\0"
"""Encoded empty properties."""

_FLAGS: Final = Struct(">H")
_U64: Final = Struct(">Q")


class Peek(NamedTuple):
    """The properties that affect routing and storage."""

    delivery_mode: int
    priority: int
    expiration_ms: int | None
    user_id: bytes | None
    has_headers: bool
    has_reply_to: bool = False


class Properties(msgspec.Struct, kw_only=True):
    """Decoded properties. Headers stay encoded until they are read, so unchanged headers keep their bytes."""

    content_type: str | None = None
    content_encoding: str | None = None
    headers_raw: bytes | None = None
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: int | None = None
    type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None

    @property
    def headers(self) -> Table:
        """The decoded headers. Replace them with `set_headers`, or change single fields with `amqp_table.edit`."""
        return amqp_table.decode_all(self.headers_raw) if self.headers_raw is not None else {}

    def set_headers(self, headers: Table) -> None:
        self.headers_raw = amqp_table.encode(headers)


_TEXTS: Final = {
    HAS_CONTENT_TYPE: "content_type",
    HAS_CONTENT_ENCODING: "content_encoding",
    HAS_CORRELATION_ID: "correlation_id",
    HAS_REPLY_TO: "reply_to",
    HAS_EXPIRATION: "expiration",
    HAS_MESSAGE_ID: "message_id",
    HAS_TYPE: "type",
    HAS_USER_ID: "user_id",
    HAS_APP_ID: "app_id",
    HAS_CLUSTER_ID: "cluster_id",
}
_OCTETS: Final = {HAS_DELIVERY_MODE: "delivery_mode", HAS_PRIORITY: "priority"}
_IN_ORDER: Final = tuple(1 << bit for bit in range(15, 1, -1))

_COMMON: Final = {
    NONE: Peek(1, 0, None, None, False),
    b"\x10\0\1": Peek(1, 0, None, None, False),
    b"\x10\0\2": Peek(2, 0, None, None, False),
}
"""Common property bytes with their precomputed result."""


def peek(raw: bytes) -> Peek:
    """Validate all properties and return those that affect routing and storage."""
    found = _COMMON.get(raw)
    return found if found is not None else _peek(raw)


def _peek(raw: bytes) -> Peek:
    end = len(raw)
    if end < 2:
        raise MalformedPropertiesError(f"properties of {end} bytes have no flags")
    flags = raw[0] << 8 | raw[1]
    if flags & _UNUSED:
        raise MalformedPropertiesError(f"properties with flags {flags:#06x}: bits 0 and 1 are not used by AMQP 0-9-1")
    delivery_mode, priority = 1, 0
    expiration: bytes | None = None
    user_id: bytes | None = None
    at = 2
    try:
        if flags & HAS_CONTENT_TYPE:
            at += 1 + raw[at]
        if flags & HAS_CONTENT_ENCODING:
            at += 1 + raw[at]
        if flags & HAS_HEADERS:
            at = amqp_table.check(raw, at, end)
        if flags & HAS_DELIVERY_MODE:
            delivery_mode = raw[at]
            at += 1
        if flags & HAS_PRIORITY:
            priority = raw[at]
            at += 1
        if flags & HAS_CORRELATION_ID:
            at += 1 + raw[at]
        if flags & HAS_REPLY_TO:
            at += 1 + raw[at]
        if flags & HAS_EXPIRATION:
            start = at + 1
            at = start + raw[at]
            expiration = raw[start:at]
        if flags & HAS_MESSAGE_ID:
            at += 1 + raw[at]
        if flags & HAS_TIMESTAMP:
            at += 8
        if flags & HAS_TYPE:
            at += 1 + raw[at]
        if flags & HAS_USER_ID:
            start = at + 1
            at = start + raw[at]
            user_id = raw[start:at]
        if flags & HAS_APP_ID:
            at += 1 + raw[at]
        if flags & HAS_CLUSTER_ID:
            at += 1 + raw[at]
    except IndexError:
        raise _wrong_length(flags, end) from None
    except MalformedTableError as error:
        raise MalformedPropertiesError(f"the headers of a message are malformed: {error}") from None
    if at != end:
        raise _wrong_length(flags, end)
    expiration_ms = None if expiration is None else parse_expiration(expiration)
    return Peek(delivery_mode, priority, expiration_ms, user_id, flags & HAS_HEADERS != 0, flags & HAS_REPLY_TO != 0)


def _wrong_length(flags: int, size: int) -> MalformedPropertiesError:
    return MalformedPropertiesError(f"properties of {size} bytes do not match their flags {flags:#06x}")


def parse_expiration(raw: bytes) -> int:
    """Parse the expiration property: a number of milliseconds as text."""
    if raw.isdigit() and len(raw) <= len(str(EXPIRATION_MS_MAX)):
        value = int(raw)
        if value <= EXPIRATION_MS_MAX:
            return value
    raise BadExpirationError(
        f"invalid expiration {raw.decode(errors='backslashreplace')!r:.80}: "
        f"it must be a number of milliseconds from 0 to {EXPIRATION_MS_MAX}, as text"
    )


def parse(raw: bytes) -> Properties:
    """Decode properties."""
    if len(raw) < 2:
        raise MalformedPropertiesError(f"properties of {len(raw)} bytes have no flags")
    flags = int(_FLAGS.unpack_from(raw)[0])
    if flags & _UNUSED:
        raise MalformedPropertiesError(f"properties with flags {flags:#06x}: bits 0 and 1 are not used by AMQP 0-9-1")
    found = Properties()
    at, end = 2, len(raw)
    try:
        for bit in _IN_ORDER:
            if not flags & bit:
                continue
            if bit in _TEXTS:
                start = at + 1
                at = start + raw[at]
                # Clients send arbitrary bytes here. Bytes that are not UTF-8 survive decoding and encoding.
                setattr(found, _TEXTS[bit], raw[start:at].decode(errors="surrogateescape"))
            elif bit in _OCTETS:
                setattr(found, _OCTETS[bit], raw[at])
                at += 1
            elif bit == HAS_HEADERS:
                start, at = at, amqp_table.check(raw, at, end)
                found.headers_raw = raw[start:at]
            else:
                at += 8
                if at <= end:
                    found.timestamp = Timestamp(_U64.unpack_from(raw, at - 8)[0])
    except IndexError:
        raise _wrong_length(flags, end) from None
    except MalformedTableError as error:
        raise MalformedPropertiesError(f"the headers of a message are malformed: {error}") from None
    if at != end:
        raise _wrong_length(flags, end)
    return found


def encode(properties: Properties) -> bytes:
    """Encode properties."""
    flags = 0
    parts = []
    for bit in _IN_ORDER:
        if bit in _TEXTS:
            text = getattr(properties, _TEXTS[bit])
            if text is None:
                continue
            parts.append(encode_shortstr(text, _TEXTS[bit]))
        elif bit in _OCTETS:
            octet = getattr(properties, _OCTETS[bit])
            if octet is None:
                continue
            if type(octet) is not int or not 0 <= octet <= 0xFF:
                raise MalformedPropertiesError(f"{_OCTETS[bit]} of a message must be 0 to 255, got {octet!r:.80}")
            parts.append(bytes((octet,)))
        elif bit == HAS_HEADERS:
            if properties.headers_raw is None:
                continue
            parts.append(properties.headers_raw)
        else:
            seconds = properties.timestamp
            if seconds is None:
                continue
            if not isinstance(seconds, int) or not 0 <= seconds < 1 << 64:
                raise MalformedPropertiesError(
                    f"timestamp of a message must be seconds since 1970, got {seconds!r:.80}"
                )
            parts.append(_U64.pack(seconds))
        flags |= bit
    return _FLAGS.pack(flags) + b"".join(parts)


def encode_shortstr(text: str, what: str = "short string") -> bytes:
    """Encode a short string: up to 255 bytes, prefixed with their number."""
    try:
        raw = text.encode(errors="surrogateescape")
    except (AttributeError, UnicodeEncodeError):
        raise MalformedPropertiesError(f"{what} must be Unicode text, got {text!r:.80}") from None
    if len(raw) > 0xFF:
        raise MalformedPropertiesError(f"{what} of {len(raw)} bytes is over the limit of 255")
    return bytes((len(raw),)) + raw


EMPTY_ENVELOPE: Final = b"\0\0\0\0"
"""The meaning of an empty envelope: a message from a protocol without exchanges and properties."""


SHORT_BYTES_MAX: Final = 0xFF
"""Longest short string of AMQP."""


def encode_envelope(exchange: str, routing_key: str, properties: bytes) -> bytes:
    """Return the envelope of a message: exchange, routing key and properties."""
    return encode_shortstr(exchange, "exchange name") + encode_shortstr(routing_key, "routing key") + properties


def short_key(routing_key: str) -> str:
    """Return a routing key as consumers see it. One of more than 255 bytes (from MQTT) is truncated and ends with its
    hash."""
    if len(routing_key) <= SHORT_BYTES_MAX >> 2:
        return routing_key
    raw = routing_key.encode(errors="surrogateescape")
    if len(raw) <= SHORT_BYTES_MAX:
        return routing_key
    ending = "~" + hashlib.blake2b(raw, digest_size=16).hexdigest()
    return raw[: SHORT_BYTES_MAX - len(ending)].decode(errors="ignore") + ending


def decode_envelope(envelope: bytes) -> tuple[str, str, bytes]:
    """Return exchange, routing key and properties of an envelope."""
    envelope = envelope or EMPTY_ENVELOPE
    try:
        middle = 1 + envelope[0]
        start = middle + 1 + envelope[middle]
        if start + 2 > len(envelope):
            raise IndexError
    except IndexError:
        raise MalformedPropertiesError(f"the envelope of a message breaks off after {len(envelope)} bytes") from None
    exchange = envelope[1:middle].decode(errors="surrogateescape")
    return exchange, envelope[middle + 1 : start].decode(errors="surrogateescape"), envelope[start:]


def properties_start(envelope: bytes) -> int:
    """Return the position of the properties in an envelope."""
    middle = 1 + envelope[0]
    return middle + 1 + envelope[middle]


def visible(envelope: bytes) -> bytes:
    """Return an envelope without the encoded sections of AMQP 1.0, which consumers of other protocols do not get."""
    if BARE_HEADER.encode() not in envelope:
        return envelope
    start = properties_start(envelope)
    parsed = parse(envelope[start:])
    if parsed.headers_raw is not None:
        edited = amqp_table.edit(parsed.headers_raw, {}, [BARE_HEADER])
        parsed.headers_raw = None if edited == amqp_table.EMPTY else edited
    return envelope[:start] + encode(parsed)
