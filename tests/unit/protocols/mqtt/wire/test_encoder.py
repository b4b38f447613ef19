"""The encoder adapts packets to the receiver: its version, its maximum packet size, and its request for problem
information."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocols.mqtt.wire import strategies
from tests.unit.protocols.mqtt.wire.client_decoder import ClientDecoder

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.encoder import PacketTooLarge, encode, encode_publish, publish_head
from basaltmq.protocols.mqtt.wire.fields import read_varint, write_text
from basaltmq.protocols.mqtt.wire.properties import Properties, property_block
from basaltmq.varints import varint

WORDY = Properties(reason_string="because", user=(("name", "value"),))
WITH_REASON: list[p.Packet] = [
    p.Connack(properties=WORDY),
    p.Puback(1, 0x80, WORDY),
    p.Pubrec(1, 0x80, WORDY),
    p.Pubrel(1, 0x92, WORDY),
    p.Pubcomp(1, 0x92, WORDY),
    p.Suback(1, (0,), WORDY),
    p.Unsuback(1, (0,), WORDY),
    p.Disconnect(0x82, WORDY),
    p.Auth(0x18, WORDY),
]


def decoded(raw: bytes) -> p.Packet:
    (packet,) = ClientDecoder(p.V5).feed(raw)
    return packet


@pytest.mark.mqtt("MQTT-3.2.2-19", "MQTT-3.2.2-20", "MQTT-3.4.2-2", "MQTT-3.4.2-3", "MQTT-3.5.2-2", "MQTT-3.5.2-3")
@pytest.mark.mqtt("MQTT-3.6.2-2", "MQTT-3.6.2-3", "MQTT-3.7.2-2", "MQTT-3.7.2-3", "MQTT-3.9.2-1", "MQTT-3.9.2-2")
@pytest.mark.mqtt("MQTT-3.11.2-1", "MQTT-3.11.2-2", "MQTT-3.14.2-3", "MQTT-3.14.2-4", "MQTT-3.15.2-2", "MQTT-3.15.2-3")
@pytest.mark.mqtt("MQTT-3.1.2-24")
@pytest.mark.parametrize("packet", WITH_REASON, ids=lambda packet: type(packet).__name__)
def test_reason_strings_and_user_properties_are_omitted_where_they_do_not_fit(packet: p.Packet) -> None:
    whole = encode(packet, p.V5)
    assert decoded(encode(packet, p.V5, bytes_max=len(whole))) == packet
    short = encode(packet, p.V5, bytes_max=len(whole) - 1)
    assert len(short) < len(whole) - 20
    found = decoded(short)
    assert type(found) is type(packet)
    assert not isinstance(found, p.Pingreq | p.Pingresp)
    assert found.properties == Properties()
    with pytest.raises(PacketTooLarge, match="the receiver allows"):
        encode(packet, p.V5, bytes_max=len(short) - 1)


@pytest.mark.mqtt("MQTT-3.1.2-24")
def test_a_publish_that_is_too_large_is_not_shortened() -> None:
    packet = p.Publish("a", b"x" * 100, properties=WORDY.__class__(user=WORDY.user))
    with pytest.raises(PacketTooLarge):
        encode(packet, p.V5, bytes_max=len(encode(packet, p.V5)) - 1)


@pytest.mark.mqtt("MQTT-3.1.2-29")
@pytest.mark.parametrize("packet", WITH_REASON, ids=lambda packet: type(packet).__name__)
def test_a_client_may_decline_problem_information(packet: p.Packet) -> None:
    found = decoded(encode(packet, p.V5, has_problem_information=False))
    assert not isinstance(found, p.Pingreq | p.Pingresp)
    keeps_it = isinstance(packet, p.Connack | p.Disconnect)
    assert found.properties == (WORDY if keeps_it else Properties())
    publish = p.Publish("a", b"", properties=Properties(user=(("a", "b"),)))
    assert decoded(encode(publish, p.V5, has_problem_information=False)) == publish


@pytest.mark.mqtt("MQTT-3.2.2-1", "MQTT-3.2.2-6")
def test_session_present_is_0_in_a_failure_and_in_3_1() -> None:
    assert encode(p.Connack(True), p.V5) == b"\x20\x03\x01\x00\x00"
    assert encode(p.Connack(True, rc.NOT_AUTHORIZED), p.V5) == b"\x20\x03\x00\x87\x00"
    assert encode(p.Connack(True), p.V311) == b"\x20\x02\x01\x00"
    assert encode(p.Connack(True), p.V31) == b"\x20\x02\x00\x00"


@pytest.mark.parametrize(
    ("reason_code", "code"),
    [
        (rc.SUCCESS, 0),
        (rc.UNSUPPORTED_PROTOCOL_VERSION, 1),
        (rc.CLIENT_IDENTIFIER_NOT_VALID, 2),
        (rc.SERVER_UNAVAILABLE, 3),
        (rc.QUOTA_EXCEEDED, 3),
        (rc.BAD_USER_NAME_OR_PASSWORD, 4),
        (rc.BAD_AUTHENTICATION_METHOD, 4),
        (rc.NOT_AUTHORIZED, 5),
        (rc.BANNED, 5),
    ],
)
def test_connack_of_3_x_has_the_closest_return_code(reason_code: int, code: int) -> None:
    assert encode(p.Connack(False, reason_code), p.V311) == bytes((0x20, 2, 0, code))


def test_failures_of_3_x_subscriptions_are_0x80_and_unsuback_has_no_codes() -> None:
    assert (
        encode(p.Suback(1, (0, 2, rc.NOT_AUTHORIZED, rc.QUOTA_EXCEEDED)), p.V311) == b"\x90\x06\x00\x01\x00\x02\x80\x80"
    )
    assert encode(p.Unsuback(1, (0, 0x11)), p.V311) == b"\xb0\x02\x00\x01"


def test_every_reason_code_of_the_tables_has_a_name() -> None:
    tables = (rc.CONNACK, rc.PUBACK, rc.PUBREL, rc.SUBACK, rc.UNSUBACK, rc.AUTH)
    used = frozenset().union(*tables, rc.DISCONNECT_BY_CLIENT, rc.DISCONNECT_BY_SERVER)
    assert used == set(rc.NAMES)


@given(strategies.publishes(p.V5, by_server=True))
def test_publish_packets_assembled_from_parts_equal_encoded_ones(packet: p.Publish) -> None:
    flags = packet.qos << 1 | packet.retain | packet.dup << 3
    topic, block = write_text(packet.topic), property_block(packet.properties)
    expected = encode(packet, p.V5)
    assert encode_publish(flags, topic, packet.packet_id, block, packet.payload) == expected
    head = publish_head(flags, topic, packet.packet_id, block, len(packet.payload))
    assert head + packet.payload == expected


@pytest.mark.mqtt("MQTT-1.5.5-1")
@given(st.one_of(st.integers(0, 268_435_455), st.sampled_from([127, 128, 16_383, 16_384, 2_097_151, 2_097_152])))
def test_variable_integers_round_trip_in_their_shortest_form(value: int) -> None:
    raw = varint(value)
    assert read_varint(raw, 0, len(raw)) == (value, len(raw))
    assert len(raw) == max(1, -(-value.bit_length() // 7))
