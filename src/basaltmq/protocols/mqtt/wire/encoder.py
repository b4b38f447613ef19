"""Packets to bytes.

`encode` serves every packet. A fan-out encodes topic, properties and payload once and calls `publish_head` per
subscriber: only the flags, the packet identifier and the length differ.

A client may limit the size of packets and may decline reason strings and user properties. `encode` then omits them
(section 3.1.2.11.4 and 3.1.2.11.7). A packet that is still too large raises PacketTooLarge, and the caller drops it.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.connect import write_connect
from basaltmq.protocols.mqtt.wire.errors import MqttError
from basaltmq.protocols.mqtt.wire.fields import U16, write_text
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, property_block, write_properties
from basaltmq.varints import varint

PINGREQ: Final = bytes((p.PINGREQ << 4, 0))
PINGRESP: Final = bytes((p.PINGRESP << 4, 0))

ACKNOWLEDGEMENT_BYTES: Final = 4
"""An acknowledgement without a reason code."""

RETAIN: Final = 0x01
DUP: Final = 0x08


class PacketTooLarge(MqttError):
    """The packet exceeds the maximum packet size of the receiver, so it must not be sent."""

    code = "mqtt_packet_too_large"


def encode(
    packet: p.Packet, version: int, *, bytes_max: int = p.PACKET_BYTES_MAX, has_problem_information: bool = True
) -> bytes:
    """Encode a packet for a protocol version.

    `bytes_max` is the receiver's maximum packet size. `has_problem_information` is False if the client declined reason
    strings and user properties; PUBLISH, CONNACK and DISCONNECT have them anyway.
    """
    if not has_problem_information and not isinstance(packet, p.Publish | p.Connack | p.Disconnect):
        packet = without_problem_information(packet)
    raw = _encode(packet, version)
    if len(raw) > bytes_max:
        raw = raw if isinstance(packet, p.Publish) else _encode(without_problem_information(packet), version)
        if len(raw) > bytes_max:
            raise PacketTooLarge(
                rc.PACKET_TOO_LARGE, f"{type(packet).__name__} has {len(raw)} bytes; the receiver allows {bytes_max}"
            )
    return raw


def without_problem_information(packet: p.Packet) -> p.Packet:
    """Return the packet without its reason string and user properties."""
    if isinstance(packet, p.Pingreq | p.Pingresp):
        return packet
    properties = packet.properties
    if properties.reason_string is None and not properties.user:
        return packet
    return replace(packet, properties=replace(properties, reason_string=None, user=()))


def publish_head(flags: int, topic_field: bytes, packet_id: int, properties: bytes | None, payload_bytes: int) -> bytes:
    """Encode a PUBLISH up to its payload.

    `flags` are QoS << 1, RETAIN and DUP. `topic_field` is the topic with its length (`fields.write_text`).
    `properties` is None before MQTT 5.0, else a block without its length (`properties.property_block`).
    """
    identifier = U16.pack(packet_id) if flags & 6 else b""
    if properties is None:
        body = topic_field + identifier
    else:
        body = topic_field + identifier + varint(len(properties)) + properties
    return bytes((0x30 | flags,)) + varint(len(body) + payload_bytes) + body


def acknowledgement(kind: int, packet_id: int) -> bytes:
    """Encode PUBACK, PUBREC or PUBCOMP without a reason code. All versions have the same bytes."""
    return bytes((kind << 4, 2, packet_id >> 8, packet_id & 0xFF))


def encode_publish(flags: int, topic_field: bytes, packet_id: int, properties: bytes | None, payload: bytes) -> bytes:
    """Encode a PUBLISH from encoded parts; see `publish_head`."""
    return publish_head(flags, topic_field, packet_id, properties, len(payload)) + payload


def _encode(packet: p.Packet, version: int) -> bytes:
    match packet:
        case p.Publish():
            return _publish(packet, version)
        case p.Puback():
            return _acknowledgement(p.PUBACK, packet, version)
        case p.Pubrec():
            return _acknowledgement(p.PUBREC, packet, version)
        case p.Pubrel():
            return _acknowledgement(p.PUBREL, packet, version)
        case p.Pubcomp():
            return _acknowledgement(p.PUBCOMP, packet, version)
        case p.Pingreq():
            return PINGREQ
        case p.Pingresp():
            return PINGRESP
        case p.Connack():
            return _connack(packet, version)
        case p.Suback() | p.Unsuback():
            return _reasons(packet, version)
        case p.Subscribe():
            return _subscribe(packet, version)
        case p.Unsubscribe():
            return _unsubscribe(packet, version)
        case p.Connect():
            return _framed(p.CONNECT << 4, write_connect(packet))
        case p.Disconnect():
            return _framed(p.DISCONNECT << 4, _reason(packet) if version == p.V5 else b"")
        case p.Auth():
            assert version == p.V5, "AUTH exists since MQTT 5.0"
            return _framed(p.AUTH << 4, _reason(packet))


def _framed(first: int, body: bytes) -> bytes:
    return bytes((first,)) + varint(len(body)) + body


def _publish(packet: p.Publish, version: int) -> bytes:
    assert bool(packet.packet_id) == bool(packet.qos), "QoS 1 and 2 have a packet identifier, QoS 0 has none"
    flags = packet.qos << 1 | (RETAIN if packet.retain else 0) | (DUP if packet.dup else 0)
    properties = property_block(packet.properties) if version == p.V5 else None
    return encode_publish(flags, write_text(packet.topic), packet.packet_id, properties, packet.payload)


def _acknowledgement(kind: int, packet: p.Puback | p.Pubrec | p.Pubrel | p.Pubcomp, version: int) -> bytes:
    assert packet.packet_id, "an acknowledgement needs a packet identifier"
    first = kind << 4 | (2 if kind == p.PUBREL else 0)
    if version != p.V5 or (not packet.reason_code and packet.properties is NO_PROPERTIES):
        return bytes((first, 2, packet.packet_id >> 8, packet.packet_id & 0xFF))
    return _framed(first, U16.pack(packet.packet_id) + _reason(packet))


def _reason(packet: p.Puback | p.Pubrec | p.Pubrel | p.Pubcomp | p.Disconnect | p.Auth) -> bytes:
    """Encode reason code and properties in their shortest form."""
    block = property_block(packet.properties)
    if block:
        return bytes((packet.reason_code,)) + varint(len(block)) + block
    return bytes((packet.reason_code,)) if packet.reason_code else b""


def _connack(packet: p.Connack, version: int) -> bytes:
    # A failure never has the flag. MQTT 3.1 has no such flag.
    flag = packet.session_present and packet.reason_code < rc.FAILURE_MIN and version != p.V31
    if version != p.V5:
        return bytes((p.CONNACK << 4, 2, flag, rc.connack_3(packet.reason_code)))
    return _framed(p.CONNACK << 4, bytes((flag, packet.reason_code)) + write_properties(packet.properties))


def _reasons(packet: p.Suback | p.Unsuback, version: int) -> bytes:
    head = U16.pack(packet.packet_id)
    if version == p.V5:
        body = head + write_properties(packet.properties) + bytes(packet.reason_codes)
    elif isinstance(packet, p.Suback):
        body = head + bytes(rc.suback_3(each) for each in packet.reason_codes)
    else:
        body = head
    return _framed((p.SUBACK if isinstance(packet, p.Suback) else p.UNSUBACK) << 4, body)


def _subscribe(packet: p.Subscribe, version: int) -> bytes:
    parts = [U16.pack(packet.packet_id)]
    if version == p.V5:
        parts.append(write_properties(packet.properties))
    for each in packet.subscriptions:
        options = each.qos
        if version == p.V5:
            options |= each.no_local << 2 | each.retain_as_published << 3 | each.retain_handling << 4
        parts += (write_text(each.filter), bytes((options,)))
    return _framed(p.SUBSCRIBE << 4 | 2, b"".join(parts))


def _unsubscribe(packet: p.Unsubscribe, version: int) -> bytes:
    parts = [U16.pack(packet.packet_id)]
    if version == p.V5:
        parts.append(write_properties(packet.properties))
    parts += [write_text(each) for each in packet.filters]
    return _framed(p.UNSUBSCRIBE << 4 | 2, b"".join(parts))
