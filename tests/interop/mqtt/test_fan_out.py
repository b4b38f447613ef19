"""Messages of QoS 0 to many connected subscribers, which get them without a queue."""

from __future__ import annotations

import pytest
from tests.interop.mqtt.device import V311, Device, several
from tests.interop.mqtt.raw import Raw
from tests.interop.server import Broker

from basaltmq.protocols.mqtt.wire import packets as p

SLOW_MESSAGES = 1500
SLOW_BYTES = 8192
"""Together more than the sockets and the broker's buffer of a connection hold."""


@pytest.mark.spec("G1")
def test_subscribers_with_different_options_get_the_same_messages(broker: Broker) -> None:
    port = broker.port("mqtt")
    old, new, marked, durable = (
        Device(port, "fan-old", version=V311),
        Device(port, "fan-new"),
        Device(port, "fan-marked"),
        Device(port, "fan-durable", expiry_s=60),
    )
    with several(old, new, marked, durable), Device(port) as source:
        old.subscribe("fan/+", 0)
        new.subscribe("fan/#", 2)
        marked.subscribe("fan/1", 1, retainAsPublished=True, identifier=7)
        durable.subscribe("fan/1", 1)
        for number in range(50):
            source.publish("fan/1", b"%d" % number, 0, retain=True, UserProperty=[("unit", "K")])
        for device in (old, new, marked, durable):
            assert [bytes(each.payload) for each in device.wait(50)] == [b"%d" % number for number in range(50)]
            assert {each.qos for each in device.messages} == {0}
        assert {each.retain for each in new.messages} == {False}
        assert {each.retain for each in marked.messages} == {True}
        assert marked.messages[0].properties.SubscriptionIdentifier == [7]
        assert new.messages[0].properties.UserProperty == [("unit", "K")]
        assert not hasattr(new.messages[0].properties, "SubscriptionIdentifier")


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.8.3-3")
def test_a_publisher_with_no_local_gets_only_messages_of_others(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Device(port, "local-1") as one, Device(port, "local-2") as two:
        one.subscribe("local", 0, noLocal=True)
        two.subscribe("local", 0)
        for number in range(10):
            one.publish("local", b"own %d" % number, 0)
        assert [bytes(each.payload) for each in two.wait(10)] == [b"own %d" % number for number in range(10)]
        two.publish("local", b"other", 0)
        assert [bytes(each.payload) for each in one.wait(1)] == [b"other"]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-24")
def test_a_packet_above_the_limit_of_one_subscriber_reaches_the_others(broker: Broker) -> None:
    port = broker.port("mqtt")
    small = Device(port, "small", connect_fields={"MaximumPacketSize": 100})
    with several(small), Device(port, "large") as large, Device(port) as source:
        small.subscribe("sizes", 0)
        large.subscribe("sizes", 0)
        source.publish("sizes", b"x" * 200, 0)
        source.publish("sizes", b"end", 0)
        assert [len(each.payload) for each in large.wait(2)] == [200, 3]
        assert [bytes(each.payload) for each in small.wait(1)] == [b"end"]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.6.0-6")
def test_a_subscriber_that_stops_reading_gets_all_messages_in_order_and_delays_no_other(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Raw(port) as slow, Raw(port) as source, Device(port, "quick") as quick:
        slow.connect("slow")
        slow.send(p.Subscribe(1, (p.Subscription("flood", 0),)))
        slow.expect(p.SUBACK)
        quick.subscribe("flood", 0)
        source.connect("source")
        for number in range(SLOW_MESSAGES):
            source.send(p.Publish("flood", b"%08d" % number + bytes(SLOW_BYTES - 8)))
        quick.wait(SLOW_MESSAGES)
        # The client reads again: its backlog comes before what is published meanwhile.
        received = []
        for number in range(SLOW_MESSAGES):
            received.append(int(slow.expect(p.PUBLISH).publish()[2][:8]))
            source.send(p.Publish("flood", b"%08d" % (SLOW_MESSAGES + number)))
        received += [int(slow.expect(p.PUBLISH).publish()[2][:8]) for _ in range(SLOW_MESSAGES)]
        assert received == list(range(2 * SLOW_MESSAGES))
        quick.wait(2 * SLOW_MESSAGES)
