"""The decoder refuses what the standards forbid, with the reason code they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.protocols.mqtt.wire import bodies, topics
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.decoder import Decoder, Limits
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.errors import MalformedPacket, MqttError, ProtocolViolation
from basaltmq.protocols.mqtt.wire.fields import write_binary, write_text
from basaltmq.protocols.mqtt.wire.properties import USER_PROPERTIES_MAX, Properties
from basaltmq.varints import varint

MALFORMED, VIOLATION = rc.MALFORMED_PACKET, rc.PROTOCOL_ERROR


def framed(first: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return bytes((first,)) + varint(len(body)) + body


def connected(version: int = p.V5, limits: Limits | None = None) -> Decoder:
    decoder = Decoder(limits or Limits())
    (packet,) = decoder.feed(encode(p.Connect("c", version), version))
    assert isinstance(packet, p.Connect)
    return decoder


def error_of(decoder: Decoder, raw: bytes) -> MqttError:
    with pytest.raises(MqttError) as caught:
        list(decoder.feed(raw))
    is_malformed = caught.value.reason_code == MALFORMED
    assert isinstance(caught.value, MalformedPacket if is_malformed else ProtocolViolation)
    return caught.value


def refusal(raw: bytes, version: int = p.V5) -> int:
    """The reason code with which a packet after CONNECT is refused."""
    return error_of(connected(version), raw).reason_code


def connect(version: int, flags: int, *payload: bytes, name: bytes = b"MQTT", level: int | None = None) -> bytes:
    head = write_binary(name) + bytes((version if level is None else level, flags, 0, 60))
    return framed(0x10, head, b"\0" if version == p.V5 else b"", *(payload or (write_text("c"),)))


@pytest.mark.mqtt("MQTT-3.1.0-1")
@pytest.mark.parametrize("first", [0x00, 0x20, 0x30, 0x82, 0xC0, 0xE0, 0xF0, 0x16, 0x47])
def test_the_first_packet_must_be_connect_by_its_first_byte(first: int) -> None:
    expected = MALFORMED if first >> 4 == p.CONNECT else VIOLATION
    assert error_of(Decoder(Limits()), bytes((first, 0xFF))).reason_code == expected


@pytest.mark.mqtt("MQTT-3.1.0-2")
def test_a_second_connect_is_a_protocol_error() -> None:
    assert refusal(encode(p.Connect("c"), p.V5)) == VIOLATION


@pytest.mark.mqtt("MQTT-2.1.3-1", "MQTT-3.6.1-1", "MQTT-3.8.1-1", "MQTT-3.10.1-1", "MQTT-3.14.1-1", "MQTT-3.15.1-1")
@pytest.mark.parametrize("version", [p.V311, p.V5])
@pytest.mark.parametrize("kind", [4, 5, 6, 7, 8, 10, 12, 14, 15])
def test_reserved_flags_must_have_their_value(kind: int, version: int) -> None:
    right = 2 if kind in (p.PUBREL, p.SUBSCRIBE, p.UNSUBSCRIBE) else 0
    for flags in range(16):
        if flags != right:
            assert refusal(bytes((kind << 4 | flags, 2, 0, 1)), version) == MALFORMED


def test_mqtt_3_1_ignores_the_flags_of_other_packets_than_publish() -> None:
    (packet,) = connected(p.V31).feed(framed(0x8A, b"\0\1", write_text("a"), b"\1"))
    assert packet == p.Subscribe(1, (p.Subscription("a", 1),))


@pytest.mark.parametrize("first", [0x20, 0x90, 0xB0, 0xD0])
def test_packets_of_servers_are_a_protocol_error(first: int) -> None:
    assert refusal(bytes((first, 2, 0, 1))) == VIOLATION


def test_type_0_is_malformed_and_type_15_too_before_5_0() -> None:
    assert refusal(b"\0\0") == MALFORMED
    assert refusal(b"\xf0\0", p.V311) == MALFORMED


@pytest.mark.mqtt("MQTT-1.5.5-1")
def test_the_remaining_length_has_at_most_four_bytes_and_its_shortest_form_in_5_0() -> None:
    assert refusal(b"\xc0\x80\x80\x80\x80") == MALFORMED
    assert refusal(b"\xc0\x80\x00") == MALFORMED
    assert list(connected(p.V311).feed(b"\xc0\x80\x80\x00")) == [p.Pingreq()]
    long_connect = encode(p.Connect("c"), p.V5)
    padded = long_connect[:1] + bytes((long_connect[1] | 0x80, 0)) + long_connect[2:]
    assert error_of(Decoder(Limits()), padded).reason_code == MALFORMED


@pytest.mark.mqtt("MQTT-1.5.5-1")
def test_variable_integers_of_properties_have_their_shortest_form() -> None:
    assert refusal(framed(0x30, write_text("a"), b"\x80\x00")) == MALFORMED
    assert refusal(framed(0x82, b"\0\1\x03\x0b\x81\x00", write_text("a"), b"\0")) == MALFORMED
    assert refusal(framed(0x82, b"\0\1\x06\x0b\x80\x80\x80\x80\x01", write_text("a"), b"\0")) == MALFORMED


@pytest.mark.mqtt("MQTT-3.2.2-15")
def test_a_packet_over_the_limit_is_refused_at_its_header() -> None:
    decoder = connected(limits=Limits(packet_bytes_max=100))
    assert list(decoder.feed(framed(0x30, write_text("a"), b"\0", bytes(94)))) != []
    assert error_of(decoder, b"\x30\x63").reason_code == rc.PACKET_TOO_LARGE


def test_connect_has_its_own_limit_because_its_sender_is_not_authenticated() -> None:
    decoder = Decoder(Limits(connect_bytes_max=50))
    assert error_of(decoder, b"\x10\x80\x01").reason_code == rc.PACKET_TOO_LARGE
    decoder = connected(limits=Limits(connect_bytes_max=50))
    assert len(list(decoder.feed(framed(0x30, write_text("a"), b"\0", bytes(1000))))) == 1


def test_only_the_size_of_an_incomplete_packet_is_buffered() -> None:
    decoder = connected()
    raw = framed(0x30, write_text("a"), b"\0", bytes(100_000))
    for at in range(0, len(raw) - 1, 1000):
        assert list(decoder.feed(raw[at : min(at + 1000, len(raw) - 1)])) == []
        assert decoder.buffered_bytes == min(at + 1000, len(raw) - 1)
    assert len(list(decoder.feed(raw[-1:]))) == 1
    assert decoder.buffered_bytes == 0


def test_a_failed_decoder_repeats_its_error() -> None:
    decoder = connected()
    iterator = decoder.feed(encode(p.Pingreq(), p.V5) + b"\x36\x00" + encode(p.Pingreq(), p.V5))
    assert next(iterator) == p.Pingreq()
    for _ in range(2):
        with pytest.raises(MalformedPacket):
            list(decoder.packets())


@pytest.mark.mqtt("MQTT-1.5.4-1", "MQTT-1.5.4-2", "MQTT-3.3.2-1", "MQTT-4.7.3-2", "MQTT-3.1.3-4", "MQTT-3.1.3-11")
@pytest.mark.mqtt("MQTT-3.1.3-12", "MQTT-3.8.3-1", "MQTT-3.10.3-1", "MQTT-3.3.2-13", "MQTT-3.3.2-19", "MQTT-1.5.7-1")
@pytest.mark.parametrize(
    "bad", [b"a\0b", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xc0\x80", b"\xff", b"\xf4\x90\x80\x80", b"\xe2\x82"]
)
def test_strings_must_be_utf_8_without_null_and_surrogates(bad: bytes) -> None:
    field = write_binary(bad)
    assert refusal(framed(0x30, field, b"\0")) == MALFORMED
    assert refusal(framed(0x30, field), p.V311) == MALFORMED
    assert refusal(framed(0x82, b"\0\1\0", field, b"\0")) == MALFORMED
    assert refusal(framed(0xA2, b"\0\1\0", field)) == MALFORMED
    good = write_text("a")
    for block in (b"\x08" + field, b"\x03" + field, b"\x26" + field + good, b"\x26" + good + field):
        assert refusal(framed(0x30, good, bytes((len(block),)), block)) == MALFORMED
    for raw in (
        connect(p.V5, 2, field),
        connect(p.V5, 6, good, b"\0", field, good),
        connect(p.V5, 0x82, good, field),
    ):
        assert error_of(Decoder(Limits()), raw).reason_code == MALFORMED


@pytest.mark.mqtt("MQTT-1.5.4-3", "MQTT-4.7.3-4")
def test_a_byte_order_mark_and_unusual_characters_are_kept() -> None:
    topic = "﻿a/\u0001é/é/￿"
    (packet,) = connected().feed(framed(0x30, write_text(topic), b"\0"))
    assert isinstance(packet, p.Publish)
    assert packet.topic == topic


@pytest.mark.mqtt("MQTT-3.1.2-1", "MQTT-3.1.2-2")
@pytest.mark.parametrize(
    ("name", "level", "answer"),
    [
        (b"MQTT", 6, p.V5),
        (b"MQTT", 0x7F, p.V5),
        (b"MQTT", 3, p.V311),
        (b"MQTT", 0, p.V311),
        (b"MQTT", 0x85, p.V311),
        (b"MQTT", 0x82, p.V311),
        (b"MQIsdp", 4, p.V311),
        (b"MQIsdp", 5, p.V311),
        (b"mqtt", 5, 0),
        (b"", 5, 0),
        (b"HTTP/1.1", 5, 0),
    ],
)
def test_other_names_and_levels_are_an_unsupported_version(name: bytes, level: int, answer: int) -> None:
    decoder = Decoder(Limits())
    assert error_of(decoder, connect(p.V5, 2, name=name, level=level)).reason_code == rc.UNSUPPORTED_PROTOCOL_VERSION
    assert decoder.version == answer


@pytest.mark.parametrize(("name", "level", "version"), [(b"MQIsdp", 0x83, 3), (b"MQTT", 0x84, 4), (b"MQTT", 4, 4)])
def test_a_bridge_is_marked_by_a_bit_of_the_protocol_level(name: bytes, level: int, version: int) -> None:
    (packet,) = Decoder(Limits()).feed(connect(version, 2, name=name, level=level))
    assert packet == p.Connect("c", version, keep_alive_s=60, is_bridge=level >= 0x80)


@pytest.mark.mqtt("MQTT-3.1.2-3", "MQTT-3.1.2-11", "MQTT-3.1.2-12", "MQTT-3.1.2-13", "MQTT-3.1.4-1")
@pytest.mark.parametrize("flags", [0x03, 0x0A, 0x12, 0x22, 0x3A, 0x1E])
@pytest.mark.parametrize("version", [p.V311, p.V5])
def test_connect_flags_must_agree_with_each_other(flags: int, version: int) -> None:
    will = (b"\0" if version == p.V5 else b"", write_text("t"), write_text(""))
    raw = connect(version, flags, write_text("c"), *(will if flags & 4 else ()))
    assert error_of(Decoder(Limits()), raw).reason_code == MALFORMED


def test_a_password_without_a_user_name_is_allowed_since_5_0() -> None:
    (packet,) = Decoder(Limits()).feed(connect(p.V5, 0x42, write_text("c"), write_binary(b"secret")))
    assert isinstance(packet, p.Connect)
    assert (packet.username, packet.password) == (None, b"secret")
    raw = connect(p.V311, 0x42, write_text("c"), write_binary(b"secret"))
    assert error_of(Decoder(Limits()), raw).reason_code == MALFORMED


@pytest.mark.mqtt("MQTT-3.1.2-9", "MQTT-3.1.2-16", "MQTT-3.1.2-17", "MQTT-3.1.2-18", "MQTT-3.1.2-19", "MQTT-3.1.3-3")
@pytest.mark.parametrize("version", [p.V311, p.V5])
def test_the_payload_of_connect_has_exactly_the_fields_of_its_flags(version: int) -> None:
    properties = b"\0" if version == p.V5 else b""
    fields = [write_text("c"), properties + write_text("t"), write_text("w"), write_text("u"), write_text("p")]
    (packet,) = Decoder(Limits()).feed(connect(version, 0xC6, *fields))
    assert isinstance(packet, p.Connect)
    assert (packet.username, packet.password, packet.will) == ("u", b"p", p.Will("t", b"w"))
    for count in range(1, 5):
        assert error_of(Decoder(Limits()), connect(version, 0xC6, *fields[:count])).reason_code == MALFORMED
    assert error_of(Decoder(Limits()), connect(version, 0xC6, *fields, b"x")).reason_code == MALFORMED
    assert error_of(Decoder(Limits()), connect(version, 0x02, b"\0")).reason_code == MALFORMED


def test_mqtt_3_1_clients_may_omit_announced_fields() -> None:
    for flags, fields, username in ((0xC2, [], None), (0xC2, [write_text("u")], "u")):
        raw = connect(p.V31, flags, write_text("c"), *fields, name=b"MQIsdp")
        (packet,) = Decoder(Limits()).feed(raw)
        assert isinstance(packet, p.Connect)
        assert (packet.username, packet.password) == (username, None)


@pytest.mark.mqtt("MQTT-3.1.3-5", "MQTT-3.1.3-8")
def test_an_empty_client_identifier_is_allowed_where_the_server_can_assign_one() -> None:
    def code(version: int, flags: int) -> int:
        name = b"MQIsdp" if version == p.V31 else b"MQTT"
        raw = connect(version, flags, write_text(""), name=name)
        try:
            (packet,) = Decoder(Limits()).feed(raw)
        except MqttError as error:
            return error.reason_code
        assert isinstance(packet, p.Connect)
        return 0

    refused = rc.CLIENT_IDENTIFIER_NOT_VALID
    assert [code(p.V31, 2), code(p.V311, 0), code(p.V311, 2), code(p.V5, 0), code(p.V5, 2)] == [
        refused,
        refused,
        0,
        0,
        0,
    ]
    long_id = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" * 100
    (packet,) = Decoder(Limits()).feed(encode(p.Connect(long_id, p.V31), p.V31))
    assert isinstance(packet, p.Connect)
    assert packet.client_id == long_id


def test_a_will_topic_must_be_a_topic_name() -> None:
    for topic in ("", "a/#", "+"):
        raw = connect(p.V5, 6, write_text("c"), b"\0", write_text(topic), write_text("w"))
        assert error_of(Decoder(Limits()), raw).reason_code == rc.TOPIC_NAME_INVALID


@pytest.mark.mqtt("MQTT-3.3.1-2", "MQTT-3.3.1-4")
@pytest.mark.parametrize("first", [0x36, 0x37, 0x3E, 0x3F, 0x38, 0x39])
def test_qos_3_and_dup_with_qos_0_are_malformed(first: int) -> None:
    for version in (p.V31, p.V311, p.V5):
        assert refusal(framed(first, write_text("a"), b"\0\1\0"), version) == MALFORMED


@pytest.mark.mqtt("MQTT-3.3.2-2", "MQTT-4.7.0-1", "MQTT-4.7.3-1")
def test_topic_names_have_no_wildcards_and_are_not_empty() -> None:
    for topic in ("+", "a/+", "#", "a#", "a+b"):
        for version in (p.V31, p.V311, p.V5):
            properties = b"\0" if version == p.V5 else b""
            assert refusal(framed(0x30, write_text(topic), properties), version) == rc.TOPIC_NAME_INVALID
    assert refusal(framed(0x30, write_text("")), p.V311) == rc.TOPIC_NAME_INVALID
    assert refusal(framed(0x30, write_text(""), b"\0")) == VIOLATION


@pytest.mark.mqtt("MQTT-4.7.3-3")
def test_the_levels_of_topics_are_limited() -> None:
    (packet,) = connected().feed(framed(0x30, write_text("a" * 65_535), b"\0"))
    assert isinstance(packet, p.Publish)
    assert len(packet.topic) == 65_535
    deep = "/" * (topics.TOPIC_LEVELS_MAX - 1)
    assert len(list(connected().feed(framed(0x30, write_text(deep), b"\0")))) == 1
    assert refusal(framed(0x30, write_text(deep + "/"), b"\0")) == rc.TOPIC_NAME_INVALID
    assert refusal(framed(0x82, b"\0\1\0", write_text(deep + "/"), b"\0")) == rc.TOPIC_FILTER_INVALID


@pytest.mark.mqtt("MQTT-3.3.2-8")
def test_a_topic_alias_stands_for_a_topic_and_is_not_0() -> None:
    (packet,) = connected().feed(framed(0x30, write_text(""), b"\x03\x23\x00\x07"))
    assert isinstance(packet, p.Publish)
    assert (packet.topic, packet.properties.topic_alias) == ("", 7)
    assert refusal(framed(0x30, write_text("a"), b"\x03\x23\x00\x00")) == rc.TOPIC_ALIAS_INVALID


@pytest.mark.mqtt("MQTT-3.3.4-6")
def test_clients_send_no_subscription_identifiers_in_publish() -> None:
    assert refusal(framed(0x30, write_text("a"), b"\x02\x0b\x01")) == VIOLATION


@pytest.mark.mqtt("MQTT-2.2.1-2", "MQTT-2.2.1-3")
def test_packet_identifiers_are_not_0_and_qos_0_has_none() -> None:
    for version in (p.V31, p.V311, p.V5):
        properties = b"\0" if version == p.V5 else b""
        assert refusal(framed(0x32, write_text("a"), b"\0\0", properties), version) == VIOLATION
        assert refusal(framed(0x82, b"\0\0", properties, write_text("a"), b"\0"), version) == VIOLATION
        assert refusal(framed(0xA2, b"\0\0", properties, write_text("a")), version) == VIOLATION
        for first in (0x40, 0x50, 0x62, 0x70):
            assert refusal(bytes((first, 2, 0, 0)), version) == VIOLATION
    (packet,) = connected(p.V311).feed(framed(0x30, write_text("a"), b"\0\1"))
    assert packet == p.Publish("a", b"\0\1")


@pytest.mark.mqtt("MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-3.6.2-1", "MQTT-3.7.2-1", "MQTT-3.14.2-1", "MQTT-3.15.2-1")
def test_each_packet_has_its_own_reason_codes() -> None:
    allowed = {0x40: rc.PUBACK, 0x50: rc.PUBREC, 0x62: rc.PUBREL, 0x70: rc.PUBCOMP}
    for first, codes in allowed.items():
        for code in range(256):
            raw = bytes((first, 3, 0, 1, code))
            if code in codes:
                assert len(list(connected().feed(raw))) == 1
            else:
                assert refusal(raw) == VIOLATION
    method = b"\x04\x15\x00\x01x"
    for code in range(256):
        assert (code in rc.DISCONNECT_BY_CLIENT) == _accepts(bytes((0xE0, 1, code)))
        assert (code in rc.AUTH_BY_CLIENT) == _accepts(framed(0xF0, bytes((code,)), method))


def _accepts(raw: bytes) -> bool:
    try:
        return len(list(connected().feed(raw))) == 1
    except ProtocolViolation:
        return False


@pytest.mark.mqtt("MQTT-3.8.3-2", "MQTT-3.10.3-2")
@pytest.mark.parametrize("version", [p.V31, p.V311, p.V5])
def test_subscribe_and_unsubscribe_have_a_filter(version: int) -> None:
    for first in (0x82, 0xA2):
        assert refusal(framed(first, b"\0\1", b"\0" if version == p.V5 else b""), version) == VIOLATION


@pytest.mark.mqtt("MQTT-3.8.3-4", "MQTT-3.8.3-5")
@pytest.mark.parametrize(
    ("topic_filter", "options", "version", "code"),
    [
        ("a", 0x03, p.V5, VIOLATION),
        ("a", 0x30, p.V5, VIOLATION),
        ("a", 0x40, p.V5, MALFORMED),
        ("a", 0x80, p.V5, MALFORMED),
        ("$share/g/a", 0x04, p.V5, VIOLATION),
        ("a", 0x03, p.V311, MALFORMED),
        ("a", 0x04, p.V311, MALFORMED),
        ("a", 0x80, p.V311, MALFORMED),
        ("a", 0x03, p.V31, MALFORMED),
    ],
)
def test_subscription_options_are_checked(topic_filter: str, options: int, version: int, code: int) -> None:
    properties = b"\0" if version == p.V5 else b""
    assert refusal(framed(0x82, b"\0\1", properties, write_text(topic_filter), bytes((options,))), version) == code


@pytest.mark.mqtt("MQTT-4.7.1-1", "MQTT-4.7.1-2", "MQTT-4.8.2-1", "MQTT-4.8.2-2")
@pytest.mark.parametrize(
    "topic_filter",
    [
        "",
        "a#",
        "#/a",
        "a/#/b",
        "##",
        "a+",
        "+a/b",
        "a/b+",
        "$share",
        "$share/",
        "$share/g",
        "$share/g/",
        "$share//a",
        "$share/g+/a",
        "$share/#/a",
        "$share/g/a#",
    ],
)
def test_invalid_filters_are_refused_in_subscribe_and_unsubscribe(topic_filter: str) -> None:
    for version in (p.V31, p.V311, p.V5):
        properties = b"\0" if version == p.V5 else b""
        field = write_text(topic_filter)
        assert refusal(framed(0x82, b"\0\1", properties, field, b"\0"), version) == rc.TOPIC_FILTER_INVALID
        assert refusal(framed(0xA2, b"\0\1", properties, field), version) == rc.TOPIC_FILTER_INVALID


def test_subscribe_has_at_most_one_subscription_identifier_and_it_is_not_0() -> None:
    for block in (b"\x02\x0b\x00", b"\x04\x0b\x01\x0b\x02"):
        assert refusal(framed(0x82, b"\0\1", block, write_text("a"), b"\0")) == VIOLATION


def test_the_number_of_filters_and_user_properties_has_a_limit() -> None:
    one = write_text("a")
    assert refusal(framed(0x82, b"\0\1\0", (one + b"\0") * (bodies.FILTERS_MAX + 1))) == rc.QUOTA_EXCEEDED
    assert refusal(framed(0xA2, b"\0\1\0", one * (bodies.FILTERS_MAX + 1))) == rc.QUOTA_EXCEEDED
    block = (b"\x26" + one + one) * (USER_PROPERTIES_MAX + 1)
    assert refusal(framed(0x30, one, varint(len(block)), block)) == rc.QUOTA_EXCEEDED


def test_ping_disconnect_and_acknowledgements_have_no_body_before_5_0() -> None:
    for version in (p.V31, p.V311):
        assert refusal(b"\xe0\x01\x00", version) == MALFORMED
        for first in (0x40, 0x50, 0x62, 0x70):
            assert refusal(bytes((first, 3, 0, 1, 0)), version) == MALFORMED
    for version in (p.V31, p.V311, p.V5):
        assert refusal(b"\xc0\x01\x00", version) == MALFORMED


def test_auth_needs_a_method() -> None:
    assert refusal(b"\xf0\x00") == VIOLATION
    assert refusal(b"\xf0\x01\x18") == VIOLATION
    assert refusal(b"\xf0\x02\x18\x00") == VIOLATION


VALID = [
    encode(packet, p.V5)
    for packet in (
        p.Publish("a/b", b"payload", 1, packet_id=3, properties=Properties(content_type="x", user=(("a", "b"),))),
        p.Puback(1, 0x80, Properties(reason_string="why")),
        p.Subscribe(1, (p.Subscription("a", 1), p.Subscription("b/#", 2)), Properties(subscription_ids=(5,))),
        p.Unsubscribe(1, ("a", "b")),
        p.Disconnect(4, Properties(session_expiry_s=5)),
        p.Auth(0x18, Properties(authentication_method="x", authentication_data=b"y")),
    )
]


@pytest.mark.mqtt("MQTT-4.13.1-1")
@given(st.sampled_from(VALID), st.data())
def test_truncated_packets_raise_only_mqtt_errors(raw: bytes, data: st.DataObject) -> None:
    body = raw[2:]
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    try:
        (packet,) = connected().feed(framed(raw[0], cut))
    except MqttError:
        return
    # What is left is complete: fields at the end may be omitted.
    assert encode(packet, p.V5)[2:] in (cut, cut + b"\0", cut[:-1], cut[:-2])


@given(st.binary(max_size=60), st.sampled_from([p.V31, p.V311, p.V5]))
def test_random_bytes_raise_only_mqtt_errors(noise: bytes, version: int) -> None:
    for decoder in (Decoder(Limits()), connected(version)):
        try:
            list(decoder.feed(noise))
        except MqttError:
            continue
