"""Properties of MQTT 5.0 (section 2.2.2): one value class for all packets, and its encoding.

    | length varint | property | property | ...
    property: | identifier varint | value |       all identifiers are below 0x80, so they have one byte

Every property except User Property and Subscription Identifier may occur once. `TABLE` says which packets may have a
property. An identifier that is unknown or belongs to other packets makes a packet malformed; a value outside its range
is a protocol error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.errors import MqttError, ProtocolViolation
from basaltmq.protocols.mqtt.wire.fields import (
    U16,
    U32,
    malformed,
    read_binary,
    read_byte,
    read_text,
    read_u16,
    read_u32,
    read_varint,
    write_binary,
    write_text,
)
from basaltmq.varints import varint

USER_PROPERTIES_MAX: Final = 1000
"""User properties per packet. Each costs about 2 us and 120 bytes, whatever its size on the wire."""


class Properties(Struct, frozen=True, gc=False, kw_only=True):
    """All properties of a packet. None means that the packet does not have the property."""

    payload_format: int | None = None
    """1 if the payload is UTF-8 text."""
    message_expiry_s: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    subscription_ids: tuple[int, ...] = ()
    session_expiry_s: int | None = None
    assigned_client_id: str | None = None
    server_keep_alive_s: int | None = None
    authentication_method: str | None = None
    authentication_data: bytes | None = None
    request_problem_information: bool | None = None
    will_delay_s: int | None = None
    request_response_information: bool | None = None
    response_information: str | None = None
    server_reference: str | None = None
    reason_string: str | None = None
    receive_maximum: int | None = None
    topic_alias_maximum: int | None = None
    topic_alias: int | None = None
    maximum_qos: int | None = None
    retain_available: bool | None = None
    user: tuple[tuple[str, str], ...] = ()
    """User properties: names may repeat, and the order is significant."""
    maximum_packet_size: int | None = None
    wildcard_subscription_available: bool | None = None
    subscription_ids_available: bool | None = None
    shared_subscription_available: bool | None = None


NO_PROPERTIES: Final = Properties()

WILL: Final = 0
"""Place of will properties in `allowed`; the other places are the packet types."""

SUBSCRIPTION_ID: Final = 0x0B
USER: Final = 0x26

_Reader = Callable[[bytes, int, int], tuple[Any, int]]
_Writer = Callable[[Any], bytes]


class Kind(Struct, frozen=True):
    """One row of the table of properties."""

    identifier: int
    field: str
    read: _Reader
    write: _Writer
    allowed: frozenset[int]
    """Packet types that may have the property; 0 is the will of CONNECT."""
    check: Callable[[Any], MqttError | None] | None = None


def violation(text: str) -> ProtocolViolation:
    return ProtocolViolation(rc.PROTOCOL_ERROR, text)


def _not_zero(value: int) -> MqttError | None:
    return None if value else violation("a property that must not be 0 is 0")


def _alias(value: int) -> MqttError | None:
    return None if value else ProtocolViolation(rc.TOPIC_ALIAS_INVALID, "the topic alias is 0; the first one is 1")


def _bit(value: int) -> MqttError | None:
    return None if value < 2 else violation(f"a property that must be 0 or 1 is {value}")


def _response_topic(value: str) -> MqttError | None:
    return None if topics.is_name(value) else violation("the response topic is empty or contains a wildcard")


def _read_flag(data: bytes, at: int, end: int) -> tuple[bool, int]:
    value, at = read_byte(data, at, end)
    if value > 1:
        raise violation(f"a property that must be 0 or 1 is {value}")
    return value == 1, at


def _write_byte(value: int) -> bytes:
    return bytes((value,))


_CONNECT, _CONNACK, _PUBLISH, _SUBSCRIBE, _UNSUBSCRIBE, _DISCONNECT, _AUTH = 1, 2, 3, 8, 10, 14, 15
_ACKS: Final = (4, 5, 6, 7, 9, 11)


def _kind(
    identifier: int,
    field: str,
    read: _Reader,
    write: _Writer,
    *allowed: int,
    check: Callable[[Any], MqttError | None] | None = None,
) -> Kind:
    return Kind(identifier, field, read, write, frozenset(allowed), check)


TABLE: Final = (
    _kind(0x01, "payload_format", read_byte, _write_byte, _PUBLISH, WILL, check=_bit),
    _kind(0x02, "message_expiry_s", read_u32, U32.pack, _PUBLISH, WILL),
    _kind(0x03, "content_type", read_text, write_text, _PUBLISH, WILL),
    _kind(0x08, "response_topic", read_text, write_text, _PUBLISH, WILL, check=_response_topic),
    _kind(0x09, "correlation_data", read_binary, write_binary, _PUBLISH, WILL),
    _kind(SUBSCRIPTION_ID, "subscription_ids", read_varint, varint, _PUBLISH, _SUBSCRIBE, check=_not_zero),
    _kind(0x11, "session_expiry_s", read_u32, U32.pack, _CONNECT, _CONNACK, _DISCONNECT),
    _kind(0x12, "assigned_client_id", read_text, write_text, _CONNACK),
    _kind(0x13, "server_keep_alive_s", read_u16, U16.pack, _CONNACK),
    _kind(0x15, "authentication_method", read_text, write_text, _CONNECT, _CONNACK, _AUTH),
    _kind(0x16, "authentication_data", read_binary, write_binary, _CONNECT, _CONNACK, _AUTH),
    _kind(0x17, "request_problem_information", _read_flag, _write_byte, _CONNECT),
    _kind(0x18, "will_delay_s", read_u32, U32.pack, WILL),
    _kind(0x19, "request_response_information", _read_flag, _write_byte, _CONNECT),
    _kind(0x1A, "response_information", read_text, write_text, _CONNACK),
    _kind(0x1C, "server_reference", read_text, write_text, _CONNACK, _DISCONNECT),
    _kind(0x1F, "reason_string", read_text, write_text, _CONNACK, *_ACKS, _DISCONNECT, _AUTH),
    _kind(0x21, "receive_maximum", read_u16, U16.pack, _CONNECT, _CONNACK, check=_not_zero),
    _kind(0x22, "topic_alias_maximum", read_u16, U16.pack, _CONNECT, _CONNACK),
    _kind(0x23, "topic_alias", read_u16, U16.pack, _PUBLISH, check=_alias),
    _kind(0x24, "maximum_qos", read_byte, _write_byte, _CONNACK, check=_bit),
    _kind(0x25, "retain_available", _read_flag, _write_byte, _CONNACK),
    _kind(
        USER,
        "user",
        read_text,
        write_text,
        *(WILL, _CONNECT, _CONNACK, _PUBLISH, _SUBSCRIBE, _UNSUBSCRIBE, *_ACKS, _DISCONNECT, _AUTH),
    ),
    _kind(0x27, "maximum_packet_size", read_u32, U32.pack, _CONNECT, _CONNACK, check=_not_zero),
    _kind(0x28, "wildcard_subscription_available", _read_flag, _write_byte, _CONNACK),
    _kind(0x29, "subscription_ids_available", _read_flag, _write_byte, _CONNACK),
    _kind(0x2A, "shared_subscription_available", _read_flag, _write_byte, _CONNACK),
)

_BY_IDENTIFIER: Final = {kind.identifier: kind for kind in TABLE}
_PLAIN: Final = tuple(
    (kind.field, bytes((kind.identifier,)), kind.write)
    for kind in TABLE
    if kind.identifier not in (SUBSCRIPTION_ID, USER)
)
_SUBSCRIPTION_ID_BYTE: Final = bytes((SUBSCRIPTION_ID,))
_USER_BYTE: Final = bytes((USER,))


def read_properties(data: bytes, at: int, end: int, packet: int) -> tuple[Properties, int]:
    """Read the properties of a packet type, or of a will if `packet` is WILL."""
    length, at = read_varint(data, at, end)
    if not length:
        return NO_PROPERTIES, at
    after = at + length
    if after > end:
        raise malformed("the properties cross the end of the packet")
    found: dict[str, Any] = {}
    user: list[tuple[str, str]] = []
    subscription_ids: list[int] = []
    while at < after:
        kind = _BY_IDENTIFIER.get(data[at])
        if kind is None or packet not in kind.allowed:
            raise malformed(f"property 0x{data[at]:02X} is not defined for this packet")
        value, at = kind.read(data, at + 1, after)
        if kind.identifier == USER:
            given, at = read_text(data, at, after)
            user.append((value, given))
            if len(user) > USER_PROPERTIES_MAX:
                raise ProtocolViolation(rc.QUOTA_EXCEEDED, f"more than {USER_PROPERTIES_MAX} user properties")
            continue
        if kind.check is not None and (error := kind.check(value)) is not None:
            raise error
        if kind.identifier == SUBSCRIPTION_ID:
            subscription_ids.append(value)
        elif kind.field in found:
            raise violation(f"property 0x{kind.identifier:02X} occurs twice")
        else:
            found[kind.field] = value
    if subscription_ids:
        found["subscription_ids"] = tuple(subscription_ids)
    if user:
        found["user"] = tuple(user)
    if "authentication_data" in found and "authentication_method" not in found:
        raise violation("there is authentication data without an authentication method")
    return Properties(**found), at


def property_block(properties: Properties) -> bytes:
    """Encode properties without the length in front, so that a fan-out can append to a shared block."""
    if properties is NO_PROPERTIES:
        return b""
    parts: list[bytes] = []
    for field, identifier, write in _PLAIN:
        value = getattr(properties, field)
        if value is not None:
            parts += (identifier, write(value))
    for subscription_id in properties.subscription_ids:
        parts += (_SUBSCRIPTION_ID_BYTE, varint(subscription_id))
    for name, value in properties.user:
        parts += (_USER_BYTE, write_text(name), write_text(value))
    return b"".join(parts)


def write_properties(properties: Properties) -> bytes:
    """Encode properties with their length."""
    block = property_block(properties)
    return varint(len(block)) + block
