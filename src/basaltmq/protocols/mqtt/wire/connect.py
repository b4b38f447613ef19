"""CONNECT: protocol name and level, connect flags, payload (section 3.1).

    | name text | level u8 | flags u8 | keep alive u16 | properties (5.0) |
    | client id text | will properties (5.0) | will topic text | will payload binary |
    | user name text | password binary |

    flags   user name | password | will retain | will QoS (2 bits) | will | clean start | reserved

Levels are 3 (MQTT 3.1, name `MQIsdp`), 4 (3.1.1) and 5 (5.0). Bridges of mosquitto set bit 0x80 of levels 3 and 4.
"""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.errors import ProtocolViolation
from basaltmq.protocols.mqtt.wire.fields import (
    U16,
    malformed,
    read_binary,
    read_byte,
    read_text,
    read_u16,
    write_binary,
    write_text,
)
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, WILL, read_properties, write_properties

NAME_BYTES_MAX: Final = 6
BRIDGE: Final = 0x80

_NAMES: Final = {p.V31: b"MQIsdp", p.V311: b"MQTT", p.V5: b"MQTT"}

_RESERVED: Final = 0x01
_CLEAN: Final = 0x02
_WILL: Final = 0x04
_WILL_RETAIN: Final = 0x20
_PASSWORD: Final = 0x40
_USERNAME: Final = 0x80


def read_version(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Read name and level. Return (level without the bridge bit, bridge bit, next position).

    The response to an unsupported version has the format of the closest supported one: `response_version`.
    """
    name, at = read_binary(data, at, end)
    if name not in _NAMES.values():
        raise ProtocolViolation(
            rc.UNSUPPORTED_PROTOCOL_VERSION, f"the protocol name is {name[: 2 * NAME_BYTES_MAX]!r} instead of 'MQTT'"
        )
    level, at = read_byte(data, at, end)
    version, bridge = level & ~BRIDGE, level & BRIDGE
    if _NAMES.get(version) != name or (bridge and version == p.V5):
        raise UnsupportedLevel(level)
    return version, bridge, at


class UnsupportedLevel(ProtocolViolation):
    """The protocol level is none of 3, 4 and 5."""

    def __init__(self, level: int) -> None:
        super().__init__(
            rc.UNSUPPORTED_PROTOCOL_VERSION,
            f"protocol level {level} is not supported; use MQTT 3.1 (3), 3.1.1 (4) or 5.0 (5)",
        )
        self.response_version: Final = p.V5 if level & ~BRIDGE > p.V5 else p.V311
        """Version of the CONNACK: clients of later versions understand 5.0, earlier ones 3.1.1."""


def read_connect(data: bytes, at: int, end: int, version: int, bridge: int) -> p.Connect:
    """Read what follows the protocol level."""
    flags, at = read_byte(data, at, end)
    _check_flags(flags, version)
    keep_alive_s, at = read_u16(data, at, end)
    properties = NO_PROPERTIES
    if version == p.V5:
        properties, at = read_properties(data, at, end, p.CONNECT)
    client_id, at = read_text(data, at, end)
    clean_start = bool(flags & _CLEAN)
    if not client_id and (version == p.V31 or (version == p.V311 and not clean_start)):
        raise ProtocolViolation(
            rc.CLIENT_IDENTIFIER_NOT_VALID, "the client identifier is empty; set one, or use a clean session with 3.1.1"
        )
    will = None
    if flags & _WILL:
        will, at = _read_will(data, at, end, flags, version)
    username, password = None, None
    # MQTT 3.1 allows packets that end before the user name or password that their flags announce.
    if flags & _USERNAME and (at < end or version != p.V31):
        username, at = read_text(data, at, end)
    if flags & _PASSWORD and (at < end or version != p.V31):
        password, at = read_binary(data, at, end)
    if at != end:
        raise malformed(f"CONNECT has {end - at} bytes after its last field")
    return p.Connect(
        client_id, version, clean_start, keep_alive_s, will, username, password, properties, is_bridge=bool(bridge)
    )


def _check_flags(flags: int, version: int) -> None:
    if flags & _RESERVED and version != p.V31:
        raise malformed("the reserved flag of CONNECT is set")
    if flags & _WILL:
        if flags >> 3 & 3 == 3:
            raise malformed("the will has QoS 3")
    elif flags >> 3 & 7:
        raise malformed("CONNECT has will QoS or will retain without a will")
    if flags & _PASSWORD and not flags & _USERNAME and version != p.V5:
        raise malformed("CONNECT has a password without a user name, which MQTT allows since 5.0")


def _read_will(data: bytes, at: int, end: int, flags: int, version: int) -> tuple[p.Will, int]:
    properties = NO_PROPERTIES
    if version == p.V5:
        properties, at = read_properties(data, at, end, WILL)
    topic, at = read_text(data, at, end)
    topics.check_name(topic)
    payload, at = read_binary(data, at, end)
    return p.Will(topic, payload, flags >> 3 & 3, bool(flags & _WILL_RETAIN), properties), at


def write_connect(packet: p.Connect) -> bytes:
    """Encode the variable header and the payload."""
    version, will = packet.version, packet.will
    flags = _CLEAN if packet.clean_start else 0
    payload = [write_text(packet.client_id)]
    if will is not None:
        flags |= _WILL | will.qos << 3 | (_WILL_RETAIN if will.retain else 0)
        if version == p.V5:
            payload.append(write_properties(will.properties))
        payload += (write_text(will.topic), write_binary(will.payload))
    if packet.username is not None:
        flags |= _USERNAME
        payload.append(write_text(packet.username))
    if packet.password is not None:
        flags |= _PASSWORD
        payload.append(write_binary(packet.password))
    level = version | (BRIDGE if packet.is_bridge else 0)
    head = write_binary(_NAMES[version]) + bytes((level, flags)) + U16.pack(packet.keep_alive_s)
    if version == p.V5:
        head += write_properties(packet.properties)
    return head + b"".join(payload)
