"""Retained messages: set, replace, delete, options, wildcards over many of them, kill -9."""

from __future__ import annotations

import time

import pytest
from paho.mqtt.enums import MQTTProtocolVersion
from tests.interop.mqtt.device import V5, V311, Device, several
from tests.interop.server import Broker

MANY = 3000


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.1-5", "MQTT-3.3.1-6", "MQTT-3.3.1-7", "MQTT-3.3.1-8")
@pytest.mark.parametrize("version", [V311, V5])
def test_a_new_subscription_gets_the_last_retained_message(broker: Broker, version: MQTTProtocolVersion) -> None:
    port = broker.port("mqtt")
    topic = f"keep/{version}"
    with Device(port, version=version) as publisher:
        publisher.publish(topic, b"old", 1, retain=True)
        publisher.publish(topic, b"new", 2, retain=True)
        publisher.publish(topic, b"not kept", 1)
    with Device(port, version=version) as device:
        device.subscribe(topic, 2)
        message = device.wait(1)[0]
        assert (message.payload, message.qos, message.retain) == (b"new", 2, True)
        device.publish(topic, b"live", 1, retain=True)
        live = device.wait(2)[1]
        assert (live.payload, live.retain) == (b"live", False), "the flag marks messages of the past"
        device.publish(topic, b"", 1, retain=True)
        assert device.wait(3)[2].payload == b""
    with Device(port, version=version) as device:
        device.subscribe(topic, 1)
        assert device.settle() == [], "an empty payload deletes it"


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.1-9", "MQTT-3.3.1-10", "MQTT-3.3.1-11", "MQTT-3.8.4-3", "MQTT-3.8.4-4")
def test_retain_handling_selects_subscriptions_that_get_retained_messages(broker: Broker) -> None:
    with Device(broker.port("mqtt"), "handling") as device:
        device.publish("handling", b"kept", retain=True)
        device.subscribe("handling", 1, retainHandling=2)
        assert device.settle() == []
        device.subscribe("handling", 1, retainHandling=1)
        assert device.settle() == [], "1: not for a subscription that exists"
        device.subscribe("handling", 1, retainHandling=0)
        device.wait(1)
        device.unsubscribe("handling")
        device.subscribe("handling", 1, retainHandling=1)
        assert [each.payload for each in device.wait(2)] == [b"kept", b"kept"]


@pytest.mark.spec("G1")
def test_wildcards_get_all_retained_messages_in_order_and_only_those(own_broker: Broker) -> None:
    port = own_broker.port("mqtt")
    with Device(port, "filler") as device:
        for number in range(MANY):
            device.client.publish(f"many/{number:05d}/value", b"%d" % number, 1, True)
        device.publish("many", b"parent", retain=True)
        device.publish("manyother", b"no", retain=True)
        device.publish("$many/x", b"no", retain=True)
        device.until(lambda: len(device.acknowledged) == MANY + 3)
    own_broker.kill()
    own_broker.start()
    reader, other = Device(port, "reader"), Device(port, "other")
    with several(reader, other):
        reader.subscribe("many/#", 1)
        found = [each.payload for each in reader.wait(MANY + 1)]
        assert found == [b"parent", *(b"%d" % number for number in range(MANY))]
        other.subscribe("many/+/value", 1)
        other.subscribe("+/00007/value", 0)
        assert len(other.wait(MANY + 1)) == MANY + 1
        assert reader.settle() == found
    with Device(port, "all") as device:
        device.subscribe("#", 0)
        device.wait(MANY + 2)
        assert len(device.settle()) == MANY + 2, "all topics but those that begin with $"


@pytest.mark.spec("G1")
def test_a_retained_message_expires(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Device(port) as publisher:
        publisher.publish("fading/1", b"x", retain=True, MessageExpiryInterval=1)
        publisher.publish("fading/2", b"y", retain=True, MessageExpiryInterval=100)
    time.sleep(1.2)
    with Device(port) as device:
        device.subscribe("fading/+", 1)
        message = device.wait(1)[0]
        assert message.payload == b"y"
        assert message.properties.MessageExpiryInterval < 100
        assert device.settle() == [b"y"]
