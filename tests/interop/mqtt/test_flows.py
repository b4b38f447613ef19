"""Flows of QoS 1 and 2 on a plain socket: quotas, reused identifiers, expiry, and ends of connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.interop.mqtt.device import wait_for_messages
from tests.interop.mqtt.raw import Answer, Raw
from tests.interop.server import Broker

from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.connect import write_connect
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.properties import Properties

DURABLE = Properties(session_expiry_s=600)
CONNECT = p.CONNECT << 4


@pytest.fixture
def raw(broker: Broker) -> Iterator[Raw]:
    with Raw(broker.port("mqtt")) as connected:
        yield connected


def subscribe(raw: Raw, topic_filter: str, qos: int = 2) -> None:
    raw.send(p.Subscribe(77, (p.Subscription(topic_filter, qos),)))
    assert raw.expect(p.SUBACK).body[-1] == min(qos, 1 if topic_filter.startswith("$share") else 2)


def published(broker: Broker, *packets: p.Publish) -> None:
    """Publish with another client, and complete the flows."""
    with Raw(broker.port("mqtt")) as other:
        other.connect("")
        for packet in packets:
            other.send(packet)
            if packet.qos:
                answer = other.read()
                assert answer is not None
                assert answer.reason_code < 0x80
                if packet.qos == 2:
                    other.send(p.Pubrel(packet.packet_id))
                    other.expect(p.PUBCOMP)


def ponged(raw: Raw) -> list[Answer]:
    """The packets before the answer to PINGREQ."""
    raw.send(p.Pingreq())
    found = []
    while (answer := raw.read()) is not None and answer.kind != p.PINGRESP:
        found.append(answer)
    return found


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.3.3-3", "MQTT-4.9.0-1", "MQTT-4.9.0-2")
@pytest.mark.parametrize("expiry_s", [0, 600])
def test_pubcomp_makes_room_for_the_next_message(broker: Broker, raw: Raw, expiry_s: int) -> None:
    topic = f"window/{expiry_s}"
    raw.connect(topic, properties=Properties(session_expiry_s=expiry_s, receive_maximum=1))
    subscribe(raw, topic)
    published(broker, *(p.Publish(topic, b"%d" % number, 2, packet_id=number) for number in range(1, 6)))
    for number in range(1, 6):
        _, packet_id, payload = raw.expect(p.PUBLISH).publish()
        assert payload == b"%d" % number
        assert ponged(raw) == []
        raw.send(p.Pubrec(packet_id))
        raw.expect(p.PUBREL)
        assert ponged(raw) == [], "PUBREC leaves the message in flight"
        raw.send(p.Pubcomp(packet_id))


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.3.2-5", "MQTT-3.3.1-3")
def test_an_identifier_is_free_after_puback_and_dup_is_not_forwarded(broker: Broker, raw: Raw) -> None:
    raw.connect("reuse")
    subscribe(raw, "reuse", 1)
    published(broker, *(p.Publish("reuse", b"%d" % number, 1, dup=True, packet_id=7) for number in range(3)))
    answers = [raw.expect(p.PUBLISH) for _ in range(3)]
    assert [each.publish()[2] for each in answers] == [b"0", b"1", b"2"]
    assert [each.flags >> 3 for each in answers] == [0, 0, 0]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.3.3-9")
def test_an_identifier_is_free_after_a_refused_qos_2_message(broker: Broker, raw: Raw) -> None:
    raw.connect("again")
    subscribe(raw, "again", 0)
    raw.send(p.Publish("$SYS/x", b"read-only", 2, packet_id=3))
    assert raw.expect(p.PUBREC).reason_code == 0x87
    raw.send(p.Publish("again", b"new", 2, packet_id=3))
    answers = {answer.kind: answer for answer in (raw.read(), raw.read()) if answer is not None}
    assert answers[p.PUBREC].reason_code == 0
    assert answers[p.PUBLISH].publish()[2] == b"new"


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.6.0-4")
def test_pubrel_packets_have_the_order_of_pubrec(broker: Broker, raw: Raw) -> None:
    raw.connect("released", properties=DURABLE)
    subscribe(raw, "released/#")
    published(broker, *(p.Publish("released/a", b"", 2, packet_id=number) for number in range(1, 10)))
    ids = [raw.expect(p.PUBLISH).publish()[1] for _ in range(9)]
    order = [*ids[::2], *ids[1::2]]
    raw.send(*(p.Pubrec(each) for each in order))
    assert [raw.expect(p.PUBREL).packet_id for _ in order] == order


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.3.3-7", "MQTT-4.3.3-13")
def test_the_flow_of_a_sent_qos_2_message_is_completed_after_its_expiry(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Raw(port) as raw:
        raw.connect("late", properties=DURABLE)
        subscribe(raw, "late")
        expiry = Properties(message_expiry_s=3)
        published(broker, p.Publish("late", b"expires", 2, packet_id=1, properties=expiry))
        first = raw.expect(p.PUBLISH).publish()[1]
    published(broker, p.Publish("late", b"stays", 2, packet_id=1))
    wait_for_messages(broker, "late", 1)
    with Raw(port) as raw:
        raw.connect("late", clean_start=False, properties=DURABLE)
        answers = [raw.read(), raw.read()]
        kinds = {answer.kind: answer for answer in answers if answer is not None}
        assert kinds[p.PUBREL].packet_id == first, "the client must be able to forget the identifier"
        _, packet_id, payload = kinds[p.PUBLISH].publish()
        assert payload == b"stays"
        assert packet_id != first
        raw.send(p.Pubcomp(first), p.Pubrec(packet_id))
        raw.expect(p.PUBREL)


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.10.4-1", "MQTT-3.10.4-2", "MQTT-3.10.4-3")
def test_unsubscribe_ends_one_filter_and_completes_what_was_sent(broker: Broker, raw: Raw) -> None:
    raw.connect("leaver")
    subscribe(raw, "leave/+", 1)
    subscribe(raw, "leave/a", 1)
    published(broker, p.Publish("leave/a", b"1", 1, packet_id=1))
    _, packet_id, _ = raw.expect(p.PUBLISH).publish()
    raw.send(p.Unsubscribe(8, ("leave/+",)))
    raw.expect(p.UNSUBACK)
    published(broker, p.Publish("leave/a", b"2", 1, packet_id=1), p.Publish("leave/b", b"3", 1, packet_id=1))
    assert raw.expect(p.PUBLISH).publish()[2] == b"2", "the other filter stays"
    assert ponged(raw) == []
    raw.send(p.Puback(packet_id), p.Unsubscribe(9, ("leave/a",)))
    raw.expect(p.UNSUBACK)
    published(broker, p.Publish("leave/a", b"4", 1, packet_id=1))
    assert ponged(raw) == []


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.8.2-6")
def test_a_message_that_a_member_refuses_is_not_sent_to_another(broker: Broker, raw: Raw) -> None:
    with Raw(broker.port("mqtt")) as other:
        members = [raw, other]
        for number, member in enumerate(members):
            member.connect(f"refuse-{number}")
            subscribe(member, "$share/refuse/refuse", 1)
        published(broker, *(p.Publish("refuse", b"%d" % number, 1, packet_id=1) for number in range(4)))
        seen: list[bytes] = []
        for member in members:
            for answer in ponged(member):
                _, packet_id, payload = answer.publish()
                seen.append(payload)
                member.send(p.Puback(packet_id, 0x80))
        assert sorted(seen) == [b"0", b"1", b"2", b"3"]
        assert [ponged(member) for member in members] == [[], []]
        raw.close()
        assert ponged(other) == []


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.2-7", "MQTT-3.1.2-27", "MQTT-3.1.2-28", "MQTT-3.3.4-5")
def test_aliases_end_with_their_connection_and_need_a_maximum(broker: Broker, raw: Raw) -> None:
    port = broker.port("mqtt")
    found = raw.connect("aliased", properties=Properties(session_expiry_s=600, request_response_information=False))
    assert found.properties.response_information is None
    raw.send(p.Subscribe(1, (p.Subscription("aliased", 0),), Properties(subscription_ids=(5,))))
    raw.expect(p.SUBACK)
    raw.send(p.Publish("aliased", b"1", properties=Properties(topic_alias=4)))
    raw.send(p.Publish("", b"2", properties=Properties(topic_alias=4)))
    for payload in (b"1", b"2"):
        answer = raw.expect(p.PUBLISH)
        assert answer.publish() == ("aliased", 0, payload), "the client accepts no alias, so the topic is written out"
        assert bytes((0x0B, 5)) in answer.body
    raw.close()
    with Raw(port) as again:
        again.connect("aliased", clean_start=False, properties=DURABLE)
        again.send(p.Publish("", b"3", properties=Properties(topic_alias=4)))
        assert [each.reason_code for each in again.rest()] == [0x82]


@pytest.mark.spec("G1")
def test_a_publish_without_subscribers_is_acknowledged_with_that_reason(raw: Raw) -> None:
    raw.connect("alone")
    raw.send(p.Publish("alone/nobody", b"", 1, packet_id=1), p.Publish("alone/nobody", b"", 2, packet_id=2))
    assert raw.expect(p.PUBACK).reason_code == 0x10
    assert raw.expect(p.PUBREC).reason_code == 0x10
    raw.send(p.Pubrel(2))
    assert raw.expect(p.PUBCOMP).reason_code == 0


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.14.4-2")
def test_a_client_that_keeps_sending_still_gets_the_disconnect_reason(raw: Raw) -> None:
    raw.connect("deaf")
    more = encode(p.Publish("deaf", b"x" * 60_000), p.V5)
    raw.send(p.Publish("", b"", properties=Properties(topic_alias=9)))
    for _ in range(50):
        raw.send(more)
    assert [each.reason_code for each in raw.rest()] == [0x82]


@pytest.mark.spec("G1")
@pytest.mark.parametrize("version", [p.V31, p.V311])
def test_a_malformed_connect_before_5_0_is_closed_without_a_response(raw: Raw, version: int) -> None:
    body = write_connect(p.Connect("malformed", version)) + b"more"
    raw.send(bytes((CONNECT, len(body))) + body)
    assert raw.read() is None
