"""Variable header and payload of all packets except CONNECT and PUBLISH: readers from the bytes of one packet.

A reader takes the data, the begin and end of the body, and the protocol version. Bodies of MQTT 5.0 may omit the
properties, and then the reason code if it is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.errors import ProtocolViolation
from basaltmq.protocols.mqtt.wire.fields import malformed, read_byte, read_text, read_u16
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties, read_properties, violation

FILTERS_MAX: Final = 4096
"""Topic filters in one SUBSCRIBE or UNSUBSCRIBE. Each costs about 2 us to decode. MQTT.js sends all in one packet."""

Reader = Callable[[bytes, int, int, int], p.Packet]

A = TypeVar("A", p.Puback, p.Pubrec, p.Pubrel, p.Pubcomp)


def read_packet_id(data: bytes, at: int, end: int) -> tuple[int, int]:
    packet_id, at = read_u16(data, at, end)
    if not packet_id:
        raise violation("the packet identifier is 0")
    return packet_id, at


def _reason(data: bytes, at: int, end: int, packet: int, codes: frozenset[int]) -> tuple[int, Properties]:
    """Read an optional reason code and optional properties up to the end."""
    if at == end:
        return rc.SUCCESS, NO_PROPERTIES
    reason_code = data[at]
    if reason_code not in codes:
        raise violation(f"reason code 0x{reason_code:02X} is not defined for this packet")
    if at + 1 == end:
        return reason_code, NO_PROPERTIES
    properties, at = read_properties(data, at + 1, end, packet)
    if at != end:
        raise malformed("the packet has bytes after its properties")
    return reason_code, properties


def _acknowledgement(kind: type[A], number: int, codes: frozenset[int]) -> Callable[[bytes, int, int, int], A]:
    def read(data: bytes, at: int, end: int, version: int) -> A:
        packet_id, at = read_packet_id(data, at, end)
        if at == end:
            return kind(packet_id)
        if version != p.V5:
            raise malformed("the packet has bytes after its packet identifier")
        return kind(packet_id, *_reason(data, at, end, number, codes))

    return read


def read_subscribe(data: bytes, at: int, end: int, version: int) -> p.Subscribe:
    packet_id, at = read_packet_id(data, at, end)
    properties = NO_PROPERTIES
    if version == p.V5:
        properties, at = read_properties(data, at, end, p.SUBSCRIBE)
        if len(properties.subscription_ids) > 1:
            raise violation("SUBSCRIBE has more than one subscription identifier")
    found: list[p.Subscription] = []
    while at < end:
        topic_filter, at = read_text(data, at, end)
        options, at = read_byte(data, at, end)
        topics.check_filter(topic_filter)
        found.append(_subscription(topic_filter, options, version))
        if len(found) > FILTERS_MAX:
            raise ProtocolViolation(rc.QUOTA_EXCEEDED, f"SUBSCRIBE has more than {FILTERS_MAX} topic filters")
    if not found:
        raise violation("SUBSCRIBE has no topic filter")
    return p.Subscribe(packet_id, tuple(found), properties)


def _subscription(topic_filter: str, options: int, version: int) -> p.Subscription:
    qos = options & 3
    if version != p.V5:
        # MQTT 3.1 does not define the upper bits. In 3.1.1 they are reserved.
        if qos == 3 or (options > 3 and version == p.V311):
            raise malformed(f"the requested QoS of topic filter {topic_filter[:80]!r} is invalid")
        return p.Subscription(topic_filter, qos)
    if options & 0xC0:
        raise malformed("reserved bits of the subscription options are set")
    retain_handling = options >> 4
    if qos == 3 or retain_handling == 3:
        raise violation("the subscription options have QoS 3 or retain handling 3")
    no_local = bool(options & 0x04)
    if no_local and topic_filter.startswith(topics.SHARE_PREFIX):
        raise violation("a shared subscription has the option No Local")
    return p.Subscription(topic_filter, qos, no_local, bool(options & 0x08), retain_handling)


def read_unsubscribe(data: bytes, at: int, end: int, version: int) -> p.Unsubscribe:
    packet_id, at = read_packet_id(data, at, end)
    properties = NO_PROPERTIES
    if version == p.V5:
        properties, at = read_properties(data, at, end, p.UNSUBSCRIBE)
    filters: list[str] = []
    while at < end:
        topic_filter, at = read_text(data, at, end)
        topics.check_filter(topic_filter)
        filters.append(topic_filter)
        if len(filters) > FILTERS_MAX:
            raise ProtocolViolation(rc.QUOTA_EXCEEDED, f"UNSUBSCRIBE has more than {FILTERS_MAX} topic filters")
    if not filters:
        raise violation("UNSUBSCRIBE has no topic filter")
    return p.Unsubscribe(packet_id, tuple(filters), properties)


def read_pingreq(data: bytes, at: int, end: int, version: int) -> p.Pingreq:
    if at != end:
        raise malformed("PINGREQ has a body")
    return PINGREQ


def read_disconnect(data: bytes, at: int, end: int, version: int) -> p.Disconnect:
    """Read a DISCONNECT of a client."""
    return _disconnect(data, at, end, version, rc.DISCONNECT_BY_CLIENT)


def _disconnect(data: bytes, at: int, end: int, version: int, codes: frozenset[int]) -> p.Disconnect:
    if at != end and version != p.V5:
        raise malformed("DISCONNECT has a body")
    return p.Disconnect(*_reason(data, at, end, p.DISCONNECT, codes))


def read_auth(data: bytes, at: int, end: int, version: int) -> p.Auth:
    """Read an AUTH of a client."""
    return _auth(data, at, end, version, rc.AUTH_BY_CLIENT)


def _auth(data: bytes, at: int, end: int, version: int, codes: frozenset[int]) -> p.Auth:
    if version != p.V5:
        raise malformed("packet type 15 is reserved before MQTT 5.0")
    reason_code, properties = _reason(data, at, end, p.AUTH, rc.AUTH)
    if reason_code not in codes:
        raise violation(f"AUTH has reason {rc.name(reason_code)}, which only the other side sends")
    if properties.authentication_method is None:
        raise violation("AUTH has no authentication method")
    return p.Auth(reason_code, properties)


PINGREQ: Final = p.Pingreq()
PINGRESP: Final = p.Pingresp()

read_puback: Final = _acknowledgement(p.Puback, p.PUBACK, rc.PUBACK)
read_pubrec: Final = _acknowledgement(p.Pubrec, p.PUBREC, rc.PUBREC)
read_pubrel: Final = _acknowledgement(p.Pubrel, p.PUBREL, rc.PUBREL)
read_pubcomp: Final = _acknowledgement(p.Pubcomp, p.PUBCOMP, rc.PUBCOMP)

FROM_CLIENT: Final[dict[int, Reader]] = {
    p.PUBACK: read_puback,
    p.PUBREC: read_pubrec,
    p.PUBREL: read_pubrel,
    p.PUBCOMP: read_pubcomp,
    p.SUBSCRIBE: read_subscribe,
    p.UNSUBSCRIBE: read_unsubscribe,
    p.PINGREQ: read_pingreq,
    p.DISCONNECT: read_disconnect,
    p.AUTH: read_auth,
}
"""Packets that a server receives after CONNECT, without PUBLISH."""
