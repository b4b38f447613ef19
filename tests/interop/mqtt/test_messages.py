"""Publish and subscribe with paho-mqtt: QoS, properties, aliases, limits."""

from __future__ import annotations

import time
from typing import Any

import pytest
from paho.mqtt.enums import MQTTProtocolVersion
from tests.interop.mqtt.device import V5, V31, V311, Device, publish_properties, several
from tests.interop.server import Broker

VERSIONS = (V31, V311, V5)


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.8.4-8", "MQTT-4.3.1-1")
@pytest.mark.parametrize("version", VERSIONS)
def test_the_lower_qos_of_publish_and_subscription_applies(broker: Broker, version: MQTTProtocolVersion) -> None:
    port = broker.port("mqtt")
    subscriber = Device(port, f"low-s{version}", version=version)
    publisher = Device(port, f"low-p{version}", version=version)
    with several(subscriber, publisher):
        for granted in (0, 1, 2):
            assert subscriber.subscribe(f"low/{version}/{granted}", granted) == granted
            for qos in (0, 1, 2):
                assert publisher.publish(f"low/{version}/{granted}", b"%d" % qos, qos) in (0, 16)
        found = {(each.topic[-1], each.payload): each.qos for each in subscriber.wait(9)}
        assert found == {(str(granted), b"%d" % qos): min(granted, qos) for granted in (0, 1, 2) for qos in (0, 1, 2)}


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.4-2", "MQTT-3.3.4-3", "MQTT-3.3.4-4")
def test_overlapping_subscriptions_get_one_message_with_the_highest_qos_and_all_identifiers(broker: Broker) -> None:
    with Device(broker.port("mqtt"), "overlap") as device:
        device.subscribe("over/#", 0, identifier=3)
        device.subscribe("over/+", 2, identifier=1)
        device.subscribe("over/lap", 1, identifier=300)
        device.publish("over/lap", b"one", 2)
        message = device.wait(1)[0]
        assert device.settle() == [b"one"]
        assert message.qos == 2
        assert sorted(message.properties.SubscriptionIdentifier) == [1, 3, 300]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.2-4", "MQTT-3.3.2-6", "MQTT-3.3.2-15", "MQTT-3.3.2-16", "MQTT-3.3.2-17", "MQTT-3.3.2-20")
def test_properties_arrive_unchanged(broker: Broker) -> None:
    with Device(broker.port("mqtt"), "properties") as device:
        device.subscribe("props", 1)
        user = [("b", "1"), ("a", "2"), ("b", "3"), ("CC", "not a route"), ("", "empty")]
        device.publish(
            "props",
            b"payload",
            PayloadFormatIndicator=1,
            ContentType="text/plain; charset=utf-8",
            ResponseTopic="answers/a.b",
            CorrelationData=b"\0\xff binary",
            UserProperty=user,
            MessageExpiryInterval=100,
        )
        found = device.wait(1)[0].properties
        assert found.PayloadFormatIndicator == 1
        assert found.ContentType == "text/plain; charset=utf-8"
        assert found.ResponseTopic == "answers/a.b"
        assert found.CorrelationData == b"\0\xff binary"
        assert found.UserProperty == user
        assert 90 <= found.MessageExpiryInterval <= 100


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.8.3-3", "MQTT-3.3.1-12", "MQTT-3.3.1-13")
def test_no_local_and_retain_as_published_are_respected(broker: Broker) -> None:
    port = broker.port("mqtt")
    one, other = Device(port, "local-1"), Device(port, "local-2")
    with several(one, other):
        one.subscribe("local/t", 1, noLocal=True)
        other.subscribe("local/t", 1, retainAsPublished=True)
        one.publish("local/t", b"mine", retain=True)
        other.publish("local/t", b"yours", retain=True)
        assert [each.payload for each in one.wait(1)] == [b"yours"]
        assert one.settle() == [b"yours"]
        assert [(each.payload, each.retain) for each in other.wait(2)] == [(b"mine", True), (b"yours", True)]
        assert not one.messages[0].retain, "without the option the flag of a new message is 0"


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.2-3")
def test_topics_with_amqp_separators_and_wildcards_are_distinct(broker: Broker) -> None:
    with Device(broker.port("mqtt"), "dots") as device:
        device.subscribe("dots/a.b/+", 1)
        for topic in ("dots/a.b/x", "dots/a/b/x", "dots/a.b/x.y", "dots/a.b/*", "dots/a.b/%2E", "dots/a.b/"):
            device.publish(topic, topic.encode())
        expected = [b"dots/a.b/x", b"dots/a.b/x.y", b"dots/a.b/*", b"dots/a.b/%2E", b"dots/a.b/"]
        assert [each.payload for each in device.wait(5)] == expected
        assert device.settle() == expected
        assert [each.topic.encode() for each in device.messages] == expected


@pytest.mark.spec("G1")
def test_wildcards_do_not_match_topics_that_begin_with_a_dollar(broker: Broker) -> None:
    with Device(broker.port("mqtt"), "dollar") as device:
        device.subscribe("#", 1, retainHandling=2)
        device.subscribe("+/dollar/t", 1)
        device.publish("$mine/dollar/t", b"hidden")
        device.publish("mine/dollar/t", b"seen")
        device.wait(1)
        assert device.settle() == [b"seen"]
        device.subscribe("$mine/#", 1)
        device.publish("$mine/dollar/t", b"shown")
        assert device.wait(2)[1].payload == b"shown"


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-25")
def test_a_message_above_the_maximum_packet_size_of_a_client_is_dropped(broker: Broker) -> None:
    port = broker.port("mqtt")
    small = Device(port, "small", connect_fields={"MaximumPacketSize": 200})
    with several(small, Device(port, "other")):
        small.subscribe("large", 1)
        small.publish("large", b"x" * 100)
        other = Device(port, "large-p")
        with other:
            other.publish("large", b"y" * 300)
            other.publish("large", b"z")
        assert [each.payload[:1] for each in small.wait(2)] == [b"x", b"z"]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-26", "MQTT-3.3.2-11")
def test_topic_aliases_are_used_in_both_directions(broker: Broker) -> None:
    with Device(broker.port("mqtt"), "alias", connect_fields={"TopicAliasMaximum": 2}) as device:
        device.subscribe("alias/#", 1)
        device.publish("alias/a", b"1", TopicAlias=1)
        device.client.publish("", b"2", 1, properties=publish_properties(TopicAlias=1))
        for number in range(3, 8):
            device.publish(f"alias/{'abc'[number % 3]}", b"%d" % number)
        found = [(each.topic, each.payload) for each in device.wait(7)]
        # paho does not resolve aliases: it shows them.
        names: dict[int, str] = {}
        seen = []
        for message in device.messages:
            alias: Any = getattr(message.properties, "TopicAlias", None)
            if alias is not None and message.topic:
                names[alias] = message.topic
            seen.append((message.topic or names[alias or 0], message.payload))
        assert [topic for topic, _ in found].count("") >= 3, "aliases must replace repeated topics"
        assert len(names) == 2
        assert seen[:2] == [("alias/a", b"1"), ("alias/a", b"2")]
        assert seen[2:] == [(f"alias/{'abc'[number % 3]}", b"%d" % number) for number in range(3, 8)]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.2-5")
def test_an_unread_message_expires(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Device(port, "expiry", clean=True, expiry_s=60) as device:
        device.subscribe("expiry", 1)
    with Device(port, "expiry-p") as publisher:
        publisher.publish("expiry", b"short", MessageExpiryInterval=1)
        publisher.publish("expiry", b"long", MessageExpiryInterval=1000)
        time.sleep(1.5)
    with Device(port, "expiry", clean=False) as device:
        assert device.session_present
        message = device.wait(1)[0]
        assert message.payload == b"long"
        assert message.properties.MessageExpiryInterval < 1000
        assert device.settle() == [b"long"]
