"""Packets on a plain socket: order of acknowledgements, QoS 2 flows, reason codes of violations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.interop.mqtt.raw import Answer, Raw
from tests.interop.server import Broker

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.properties import Properties

DURABLE = Properties(session_expiry_s=600)


@pytest.fixture
def raw(broker: Broker) -> Iterator[Raw]:
    with Raw(broker.port("mqtt")) as connected:
        yield connected


def ended(raw: Raw) -> Answer:
    """The DISCONNECT of the server, after which it closes the connection."""
    found = list(raw.rest())
    assert found, "the server closed the connection without DISCONNECT"
    assert found[-1].kind == p.DISCONNECT
    return found[-1]


def subscribe(raw: Raw, topic_filter: str, qos: int = 2) -> None:
    raw.send(p.Subscribe(77, (p.Subscription(topic_filter, qos),)))
    answer = raw.expect(p.SUBACK)
    assert answer.packet_id == 77
    assert answer.body[-1] == qos


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.6.0-2", "MQTT-4.6.0-3", "MQTT-2.2.1-5", "MQTT-4.3.2-4", "MQTT-4.3.3-8", "MQTT-3.3.4-1")
@pytest.mark.parametrize("qos", [1, 2])
def test_acknowledgements_have_the_order_of_the_messages(broker: Broker, raw: Raw, qos: int) -> None:
    with Raw(broker.port("mqtt")) as other:
        other.connect("ordered-sub", properties=DURABLE)
        subscribe(other, "ordered/durable/#")
        raw.connect("ordered")
        # Messages without a queue are confirmed before the sync, retained ones after it.
        topics = [("ordered/durable/x", False), ("ordered/nobody", False), ("ordered/kept", True)] * 20
        raw.send(
            *(
                p.Publish(topic, b"x", qos, retain=retain, packet_id=packet_id)
                for packet_id, (topic, retain) in enumerate(topics, 1)
            )
        )
        kind = p.PUBACK if qos == 1 else p.PUBREC
        assert [raw.expect(kind).packet_id for _ in topics] == list(range(1, len(topics) + 1))


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.3.3-10", "MQTT-4.3.3-11", "MQTT-4.3.3-12", "MQTT-4.5.0-1")
@pytest.mark.parametrize("properties", [Properties(), DURABLE])
def test_a_repeated_qos_2_message_is_delivered_once(raw: Raw, properties: Properties) -> None:
    raw.connect(f"repeat-{properties.session_expiry_s}", properties=properties)
    subscribe(raw, f"repeat/{properties.session_expiry_s}", 0)
    topic = f"repeat/{properties.session_expiry_s}"
    received: list[Any] = []
    acknowledged: list[Any] = []
    raw.send(p.Publish(topic, b"1", 2, packet_id=9), p.Publish(topic, b"1", 2, dup=True, packet_id=9))
    while acknowledged.count(p.PUBREC) < 1 or not received:
        _note(raw.read(), received, acknowledged)
    raw.send(p.Publish(topic, b"1", 2, dup=True, packet_id=9), p.Pubrel(9))
    while p.PUBCOMP not in acknowledged:
        _note(raw.read(), received, acknowledged)
    raw.send(p.Publish(topic, b"2", 2, packet_id=9), p.Pubrel(1234))
    while len(received) < 2 or acknowledged.count(p.PUBCOMP) < 2:
        _note(raw.read(), received, acknowledged)
    assert received == [b"1", b"2"]


def _note(answer: Answer | None, received: list[bytes], acknowledged: list[int]) -> None:
    assert answer is not None
    if answer.kind == p.PUBLISH:
        received.append(answer.publish()[2])
    else:
        acknowledged.append(answer.kind)


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.3.3-4", "MQTT-4.3.3-5", "MQTT-4.3.3-6", "MQTT-4.4.0-1", "MQTT-4.3.3-1", "MQTT-4.3.3-2")
def test_pubrel_is_sent_again_after_a_reconnect_and_publish_is_not(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Raw(port) as raw:
        raw.connect("released", properties=DURABLE)
        subscribe(raw, "released")
        raw.send(p.Publish("released", b"x", 2, packet_id=1))
        answers = {answer.kind: answer for answer in (raw.read(), raw.read()) if answer is not None}
        assert answers.keys() == {p.PUBREC, p.PUBLISH}
        packet_id = answers[p.PUBLISH].publish()[1]
        raw.send(p.Pubrec(packet_id))
        assert raw.expect(p.PUBREL).packet_id == packet_id
    for _ in range(2):
        with Raw(port) as raw:
            raw.connect("released", clean_start=False, properties=DURABLE)
            assert raw.expect(p.PUBREL).packet_id == packet_id
            raw.send(p.Pingreq())
            raw.expect(p.PINGRESP)
    with Raw(port) as raw:
        raw.connect("released", clean_start=False, properties=DURABLE)
        raw.expect(p.PUBREL)
        raw.send(p.Pubcomp(packet_id), p.Pingreq())
        raw.expect(p.PINGRESP)
    with Raw(port) as raw:
        raw.connect("released", clean_start=False, properties=DURABLE)
        raw.send(p.Pingreq())
        raw.expect(p.PINGRESP)


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.4.0-2", "MQTT-4.9.0-2", "MQTT-4.9.0-3", "MQTT-3.3.4-9", "MQTT-3.3.4-10", "MQTT-3.12.4-1")
def test_a_message_that_the_client_refuses_is_not_sent_again(broker: Broker, raw: Raw) -> None:
    raw.connect("refuser", properties=Properties(session_expiry_s=600, receive_maximum=1))
    subscribe(raw, "refuser")
    with Raw(broker.port("mqtt")) as other:
        other.connect("refused-pub")
        other.send(p.Publish("refuser", b"1", 2, packet_id=1), p.Publish("refuser", b"2", 1, packet_id=2))
        assert other.read() is not None
        assert other.read() is not None
    first = raw.expect(p.PUBLISH).publish()
    raw.send(p.Pingreq())
    raw.expect(p.PINGRESP)
    raw.send(p.Pubrec(first[1], 0x80))
    second = raw.expect(p.PUBLISH).publish()
    assert (first[2], second[2]) == (b"1", b"2")


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.4-7", "MQTT-4.13.2-1", "MQTT-3.14.4-1", "MQTT-3.14.4-2", "MQTT-3.14.2-2")
def test_exceeding_the_receive_maximum_closes_the_connection(raw: Raw) -> None:
    maximum = raw.connect("flooder").properties.receive_maximum
    assert maximum == 1024
    raw.send(b"".join(_publish2(number) for number in range(1, maximum + 2)))
    last = ended(raw)
    assert last.reason_code == 0x93
    assert last.properties.session_expiry_s is None


def _publish2(packet_id: int) -> bytes:
    return encode(p.Publish("flood", b"x", 2, packet_id=packet_id), p.V5)


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.2.2-17", "MQTT-3.3.2-9", "MQTT-3.3.2-12")
def test_invalid_packets_close_the_connection_with_their_reason_code(broker: Broker) -> None:
    wrong: list[tuple[bytes | p.Packet, int]] = [
        (p.Publish("t", b"", properties=Properties(topic_alias=65)), 0x94),
        (p.Publish("", b"", properties=Properties(topic_alias=3)), 0x82),
        (b"\x30\x03\x00\x01#", 0x90),
        (b"\x36\x05\x00\x01t\x00\x01", 0x81),
        (b"\x82\x09\x00\x01\x00\x00\x03a/#\x03", 0x82),
        (b"\x60\x02\x00\x01", 0x81),
        (b"\x10\x00", 0x82),
        (p.Disconnect(0, Properties(session_expiry_s=5)), 0x82),
        (p.Auth(0x18, Properties(authentication_method="x")), 0x82),
    ]
    with Raw(broker.port("mqtt")) as witness:
        witness.connect("witness")
        for packet, reason_code in wrong:
            with Raw(broker.port("mqtt")) as raw:
                raw.connect("wrong")
                raw.send(packet)
                assert ended(raw).reason_code == reason_code, packet
        witness.send(p.Pingreq())
        witness.expect(p.PINGRESP)


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.2.2-7", "MQTT-3.1.4-2", "MQTT-3.1.4-6", "MQTT-3.14.0-1", "MQTT-4.12.0-1", "MQTT-3.2.0-2")
@pytest.mark.mqtt("MQTT-3.2.2-8")
def test_a_refused_connect_gets_its_reason_code_and_nothing_else(broker: Broker) -> None:
    refused: list[tuple[p.Connect, int]] = [
        (p.Connect("a", username="guest", password=b"wrong"), 0x86),
        (p.Connect("a", username="nowhere:guest", password=b"guest"), 0x86),
        (p.Connect("x" * 241), 0x85),
        (p.Connect("a", properties=Properties(authentication_method="KERBEROS")), 0x8C),
        (p.Connect("a", will=p.Will("$SYS/x", b"")), 0x90),
        (p.Connect("", version=p.V311, clean_start=False), 2),
    ]
    for connect, reason_code in refused:
        with Raw(broker.port("mqtt")) as raw:
            raw.send(connect, p.Publish("after", b"x", 1, packet_id=1), version=connect.version)
            assert raw.expect(p.CONNACK).reason_code == reason_code
            assert connect.version != p.V5 or reason_code in rc.CONNACK
            assert raw.read() is None


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.8.4-5", "MQTT-3.8.4-6", "MQTT-3.8.4-7", "MQTT-3.9.3-1", "MQTT-3.10.4-5", "MQTT-3.10.4-6")
@pytest.mark.mqtt("MQTT-3.11.3-1", "MQTT-2.2.1-6", "MQTT-3.8.4-1", "MQTT-3.8.4-2", "MQTT-3.10.4-4")
@pytest.mark.mqtt("MQTT-3.9.3-2", "MQTT-3.11.3-2")
def test_each_filter_of_a_request_has_its_reason_code(raw: Raw) -> None:
    raw.connect("filters")
    wanted = ("a/b", "." * 30_000, "$share/g/a", "filters/+")
    raw.send(p.Subscribe(5, tuple(p.Subscription(each, 2) for each in wanted)))
    answer = raw.expect(p.SUBACK)
    assert (answer.packet_id, list(answer.body[-4:])) == (5, [2, 0x8F, 1, 2])
    assert set(answer.body[-4:]) <= rc.SUBACK
    raw.send(p.Unsubscribe(6, ("filters/+", "unknown", "a/b")))
    answer = raw.expect(p.UNSUBACK)
    assert (answer.packet_id, list(answer.body[-3:])) == (6, [0, 0x11, 0])
    assert set(answer.body[-3:]) <= rc.UNSUBACK


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.2.2-21", "MQTT-3.1.3-6", "MQTT-3.1.3-7", "MQTT-3.2.2-16", "MQTT-3.1.4-5", "MQTT-3.2.0-1")
@pytest.mark.mqtt("MQTT-3.2.2-9", "MQTT-3.2.2-13")
def test_connack_announces_the_limits(raw: Raw) -> None:
    found = raw.connect("").properties
    assert found.assigned_client_id is not None
    assert found.assigned_client_id.startswith("auto-")
    assert (found.receive_maximum, found.topic_alias_maximum) == (1024, 64)
    assert found.maximum_packet_size == 16 << 20
    assert found.maximum_qos is None
    assert found.retain_available is None
    assert found.response_information is None


@pytest.mark.spec("G1")
def test_a_packet_above_the_limit_closes_the_connection_before_it_is_read(raw: Raw) -> None:
    raw.connect("huge")
    raw.send(b"\x30\xff\xff\xff\x7f")
    assert ended(raw).reason_code == 0x95


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.2.2-10", "MQTT-3.2.2-12")
def test_the_server_announces_no_lower_maximum_qos_and_accepts_each_one(broker: Broker) -> None:
    port = broker.port("mqtt")
    for qos in (0, 1, 2):
        with Raw(port) as raw:
            found = raw.connect(f"any-qos-{qos}", will=p.Will("any-qos", b"", qos, False))
            assert found.reason_code == 0
            assert found.properties.maximum_qos is None
            raw.send(p.Subscribe(1, (p.Subscription("any-qos", qos),)))
            assert raw.expect(p.SUBACK).body[-1] == qos
            raw.send(p.Disconnect())
