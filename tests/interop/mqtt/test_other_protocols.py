"""MQTT and the other protocols: AMQP queues and streams get device messages, and AMQP publishers reach devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from tests.interop.mqtt.device import V311, Device
from tests.interop.server import Broker

WAIT_S = 60.0


@pytest.fixture
def channel(broker: Broker) -> Iterator[Any]:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url()))
    yield connection.channel()
    connection.close()


def get(channel: Any, queue: str) -> tuple[Any, Any, bytes]:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        found = channel.basic_get(queue, auto_ack=True)
        if found[0] is not None:
            return found  # type: ignore[no-any-return]
        time.sleep(0.02)
    raise AssertionError(f"no message in {queue}")


@pytest.mark.spec("G1")
def test_an_amqp_queue_gets_messages_of_devices_with_their_properties(broker: Broker, channel: Any) -> None:
    channel.queue_declare("from-devices", durable=True)
    channel.queue_bind("from-devices", "amq.topic", "plant.*.temperature")
    with Device(broker.port("mqtt")) as device:
        device.publish(
            "plant/7/temperature",
            b"21.5",
            1,
            ContentType="text/plain",
            ResponseTopic="plant/answers",
            CorrelationData=b"c-1",
            UserProperty=[("unit", "C"), ("unit", "F")],
            MessageExpiryInterval=60,
        )
        device.publish("plant/7/pressure", b"no", 1)
        device.publish("plant/8/temperature", b"22", 0)
    method, properties, body = get(channel, "from-devices")
    assert (method.exchange, method.routing_key, body) == ("amq.topic", "plant.7.temperature", b"21.5")
    assert properties.content_type == "text/plain"
    assert properties.reply_to == "plant.answers"
    assert properties.correlation_id == "c-1"
    assert properties.headers["unit"] == "C"
    assert properties.expiration == "60000"
    assert properties.delivery_mode == 2
    assert get(channel, "from-devices")[1].delivery_mode == 1


@pytest.mark.spec("G1")
def test_an_amqp_publisher_reaches_devices(broker: Broker, channel: Any) -> None:
    with Device(broker.port("mqtt")) as device, Device(broker.port("mqtt"), version=V311) as old:
        for each in (device, old):
            each.subscribe("commands/#", 2)
        properties = pika.BasicProperties(
            content_type="application/json",
            reply_to="replies.to.me",
            correlation_id="42",
            headers={"kind": "reset", "number": 7},
            delivery_mode=2,
        )
        channel.confirm_delivery()
        channel.basic_publish("amq.topic", "commands.plant.7", b"{}", properties)
        channel.basic_publish("amq.topic", "commands", b"transient")
        message = device.wait(2)[0]
        assert (message.topic, message.payload, message.qos) == ("commands/plant/7", b"{}", 1)
        assert message.properties.ContentType == "application/json"
        assert message.properties.ResponseTopic == "replies/to/me"
        assert message.properties.CorrelationData == b"42"
        assert message.properties.UserProperty == [("kind", "reset")]
        assert [(each.topic, each.qos) for each in device.messages] == [("commands/plant/7", 1), ("commands", 0)]
        assert [each.payload for each in old.wait(2)] == [b"{}", b"transient"]


@pytest.mark.spec("G1")
def test_a_stream_stores_messages_of_devices(broker: Broker, channel: Any) -> None:
    channel.queue_declare("device-log", durable=True, arguments={"x-queue-type": "stream"})
    channel.queue_bind("device-log", "amq.topic", "log.#")
    with Device(broker.port("mqtt")) as device:
        for number in range(5):
            device.publish(f"log/{number}", b"%d" % number, 1)
    channel.basic_qos(prefetch_count=10)
    seen = []
    for method, _, body in channel.consume(
        "device-log", inactivity_timeout=WAIT_S, arguments={"x-stream-offset": "first"}
    ):
        seen.append((method.routing_key, body))
        channel.basic_ack(method.delivery_tag)
        if len(seen) == 5:
            break
    channel.cancel()
    assert seen == [(f"log.{number}", b"%d" % number) for number in range(5)]


@pytest.mark.spec("G1")
def test_a_topic_of_65535_bytes_reaches_devices_and_its_cut_routing_key_amqp_queues(
    broker: Broker, channel: Any
) -> None:
    longest = "long/" + "ü" * 32_765
    other = longest[:-1] + "ö"
    assert len(longest.encode()) == 65_535
    port = broker.port("mqtt")
    channel.queue_declare("long-topics", durable=True)
    channel.queue_bind("long-topics", "amq.topic", "long.#")
    with Device(port, "long-away", clean=False, expiry_s=600) as away:
        away.subscribe("long/#", 2)
    with Device(port, "long-exact") as exact, Device(port, "long-3", version=V311) as old:
        exact.subscribe(longest, 1)
        old.subscribe("+/+", 1)
        exact.publish(longest, b"one", 1, retain=True)
        exact.publish(other, b"two", 2)
        exact.publish(longest, b"three", 0)
        assert [(each.topic, each.payload) for each in exact.wait(2)] == [(longest, b"one"), (longest, b"three")]
        wanted = [(longest, b"one"), (other, b"two"), (longest, b"three")]
        assert [(each.topic, each.payload) for each in old.wait(3)] == wanted
    with Device(port, "long-late") as late:
        late.subscribe("long/#", 1)
        assert [(each.topic, each.payload, each.retain) for each in late.wait(1)] == [(longest, b"one", True)]
    with Device(port, "long-away", clean=False, expiry_s=600) as away:
        # QoS 2 waits for its packet identifier, so it may come after QoS 0.
        assert sorted((each.topic, each.payload) for each in away.wait(3)) == sorted(wanted)
    keys = set()
    for payload, topic in ((b"one", longest), (b"two", other), (b"three", longest)):
        method, properties, body = get(channel, "long-topics")
        assert body == payload
        assert method.routing_key.startswith("long.üü")
        assert len(method.routing_key.encode()) <= 255
        assert properties.headers["x-mqtt-topic"] == topic.encode()
        keys.add(method.routing_key)
    assert len(keys) == 2
    # An AMQP publisher cannot choose another topic with the header.
    forged = pika.BasicProperties(headers={"x-mqtt-topic": b"elsewhere"})
    with Device(port, "long-forged") as device:
        device.subscribe("long/#", 1, retainHandling=2)
        channel.basic_publish("amq.topic", "long.amqp", b"mine", forged)
        assert device.wait(1)[0].topic == "long/amqp"
