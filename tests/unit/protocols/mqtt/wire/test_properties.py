"""Properties: where each is allowed, how often, and with which values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocols.mqtt.wire import strategies

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import properties as pr
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.errors import MqttError
from basaltmq.protocols.mqtt.wire.properties import NO_PROPERTIES, Properties
from basaltmq.varints import varint

TABLE_OF_THE_STANDARD = {
    0x01: "publish will",
    0x02: "publish will",
    0x03: "publish will",
    0x08: "publish will",
    0x09: "publish will",
    0x0B: "publish subscribe",
    0x11: "connect connack disconnect",
    0x12: "connack",
    0x13: "connack",
    0x15: "connect connack auth",
    0x16: "connect connack auth",
    0x17: "connect",
    0x18: "will",
    0x19: "connect",
    0x1A: "connack",
    0x1C: "connack disconnect",
    0x1F: "connack puback pubrec pubrel pubcomp suback unsuback disconnect auth",
    0x21: "connect connack",
    0x22: "connect connack",
    0x23: "publish",
    0x24: "connack",
    0x25: "connack",
    0x26: "will connect connack publish puback pubrec pubrel pubcomp subscribe suback unsubscribe unsuback "
    "disconnect auth",
    0x27: "connect connack",
    0x28: "connack",
    0x29: "connack",
    0x2A: "connack",
}
"""Table 2-4 of the standard."""

NUMBERS = {"will": pr.WILL} | {
    name: getattr(p, name.upper())
    for names in TABLE_OF_THE_STANDARD.values()
    for name in names.split()
    if name != "will"
}
VALUES: dict[str, Any] = {
    "payload_format": 1,
    "content_type": "x",
    "response_topic": "x",
    "correlation_data": b"x",
    "subscription_ids": (1,),
    "assigned_client_id": "x",
    "authentication_method": "x",
    "authentication_data": b"x",
    "response_information": "x",
    "server_reference": "x",
    "reason_string": "x",
    "user": (("a", "b"),),
}


def block_of(field: str) -> bytes:
    return pr.property_block(Properties(**{field: VALUES.get(field, 1)}))


def refusal(block: bytes, packet: int) -> int:
    raw = varint(len(block)) + block
    with pytest.raises(MqttError) as caught:
        pr.read_properties(raw, 0, len(raw), packet)
    return caught.value.reason_code


def test_properties_are_allowed_only_in_the_packets_of_the_standard() -> None:
    assert {kind.identifier for kind in pr.TABLE} == set(TABLE_OF_THE_STANDARD)
    assert {kind.field for kind in pr.TABLE} == set(Properties.__struct_fields__)
    for kind in pr.TABLE:
        allowed = {NUMBERS[name] for name in TABLE_OF_THE_STANDARD[kind.identifier].split()}
        block = block_of(kind.field)
        assert block[0] == kind.identifier
        if kind.field == "authentication_data":
            block += block_of("authentication_method")
        raw = varint(len(block)) + block
        for packet in range(16):
            if packet in allowed:
                found, at = pr.read_properties(raw, 0, len(raw), packet)
                assert getattr(found, kind.field) == VALUES.get(kind.field, 1)
                assert at == len(raw)
            else:
                assert refusal(block, packet) == rc.MALFORMED_PACKET


def test_unknown_identifiers_are_malformed() -> None:
    for identifier in set(range(256)) - set(TABLE_OF_THE_STANDARD):
        assert refusal(bytes((identifier, 0, 0, 0, 0)), p.CONNACK) == rc.MALFORMED_PACKET


@pytest.mark.parametrize("kind", pr.TABLE, ids=lambda kind: str(kind.field))
def test_a_property_occurs_once_except_user_properties_and_subscription_identifiers(kind: pr.Kind) -> None:
    packet = next(iter(kind.allowed))
    block = block_of(kind.field) * 2
    if kind.field == "authentication_data":
        block += block_of("authentication_method")
    if kind.field in ("user", "subscription_ids"):
        found, _ = pr.read_properties(bytes((len(block),)) + block, 0, len(block) + 1, packet)
        assert len(getattr(found, kind.field)) == 2
    else:
        assert refusal(block, packet) == rc.PROTOCOL_ERROR


@pytest.mark.mqtt("MQTT-3.3.2-14")
@pytest.mark.parametrize(
    ("block", "packet", "code"),
    [
        (b"\x01\x02", p.PUBLISH, rc.PROTOCOL_ERROR),
        (b"\x08\x00\x01+", p.PUBLISH, rc.PROTOCOL_ERROR),
        (b"\x08\x00\x03a/#", pr.WILL, rc.PROTOCOL_ERROR),
        (b"\x08\x00\x00", p.PUBLISH, rc.PROTOCOL_ERROR),
        (b"\x0b\x00", p.SUBSCRIBE, rc.PROTOCOL_ERROR),
        (b"\x16\x00\x00", p.CONNECT, rc.PROTOCOL_ERROR),
        (b"\x17\x02", p.CONNECT, rc.PROTOCOL_ERROR),
        (b"\x19\x02", p.CONNECT, rc.PROTOCOL_ERROR),
        (b"\x21\x00\x00", p.CONNECT, rc.PROTOCOL_ERROR),
        (b"\x23\x00\x00", p.PUBLISH, rc.TOPIC_ALIAS_INVALID),
        (b"\x24\x02", p.CONNACK, rc.PROTOCOL_ERROR),
        (b"\x25\x02", p.CONNACK, rc.PROTOCOL_ERROR),
        (b"\x27\x00\x00\x00\x00", p.CONNECT, rc.PROTOCOL_ERROR),
        (b"\x28\xff", p.CONNACK, rc.PROTOCOL_ERROR),
        (b"\x02\x00\x00\x00", p.PUBLISH, rc.MALFORMED_PACKET),
        (b"\x03\x00", p.PUBLISH, rc.MALFORMED_PACKET),
        (b"\x03\x00\x05abc", p.PUBLISH, rc.MALFORMED_PACKET),
        (b"\x26\x00\x01a", p.PUBLISH, rc.MALFORMED_PACKET),
        (b"\x21\x01", p.CONNECT, rc.MALFORMED_PACKET),
        (b"\x01", p.PUBLISH, rc.MALFORMED_PACKET),
    ],
)
def test_values_must_be_in_their_range_and_complete(block: bytes, packet: int, code: int) -> None:
    assert refusal(block, packet) == code


def test_properties_end_at_their_length() -> None:
    raw = b"\x03\x03\x00\x05" + b"payload"
    with pytest.raises(MqttError, match="crosses the end"):
        pr.read_properties(raw, 0, len(raw), p.PUBLISH)
    with pytest.raises(MqttError, match="cross the end of the packet"):
        pr.read_properties(b"\x7f\x03\x00\x01x", 0, 5, p.PUBLISH)


@pytest.mark.mqtt("MQTT-3.3.2-18", "MQTT-2.2.2-1")
@given(st.data(), st.sampled_from(sorted(NUMBERS.values())))
def test_properties_keep_their_order(data: st.DataObject, packet: int) -> None:
    given_properties = data.draw(strategies.properties(packet))
    raw = pr.write_properties(given_properties)
    assert pr.read_properties(raw + b"rest", 0, len(raw) + 4, packet) == (given_properties, len(raw))
    assert pr.write_properties(NO_PROPERTIES) == b"\0"
