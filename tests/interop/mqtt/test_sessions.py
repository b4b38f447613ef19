"""Sessions: durable ones with their messages in both directions, takeover, expiry, receive maximum."""

from __future__ import annotations

import time

import pytest
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.reasoncodes import ReasonCode
from tests.interop.mqtt.device import V5, V31, V311, Device, several, wait_for_messages
from tests.interop.mqtt.raw import Raw
from tests.interop.server import Broker

from basaltmq.protocols.mqtt.wire import packets as p


def code_of(code: ReasonCode) -> int:
    return int(code.value)


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-4", "MQTT-3.1.2-5", "MQTT-3.1.2-6", "MQTT-3.1.2-23", "MQTT-3.2.2-2", "MQTT-3.2.2-3")
@pytest.mark.mqtt("MQTT-3.1.4-4", "MQTT-4.6.0-5", "MQTT-4.6.0-6")
@pytest.mark.parametrize("version", [V31, V311, V5])
def test_a_durable_session_collects_messages_while_its_client_is_away(
    broker: Broker, version: MQTTProtocolVersion
) -> None:
    port = broker.port("mqtt")
    name = f"away{version}"
    expiry_s = 600 if version == V5 else 0
    with Device(port, name, version=version, clean=False, expiry_s=expiry_s) as device:
        assert not device.session_present
        device.subscribe(f"away/{version}/#", 2)
    with Device(port, version=V5) as publisher:
        for number in range(50):
            publisher.publish(f"away/{version}/{number}", b"%d" % number, number % 2 + 1)
    with Device(port, name, version=version, clean=False, expiry_s=expiry_s) as device:
        assert version == V31 or device.session_present, "MQTT 3.1 has no such flag"
        device.wait(50)
        for qos, numbers in ((1, range(0, 50, 2)), (2, range(1, 50, 2))):
            # QoS 1 may overtake QoS 2.
            assert [int(each.payload) for each in device.messages if each.qos == qos] == list(numbers)
    with Device(port, name, version=version, clean=True) as device:
        assert not device.session_present
        assert device.settle() == []


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.1.0-1")
def test_a_durable_session_survives_kill_9_with_its_subscriptions_and_messages(own_broker: Broker) -> None:
    port = own_broker.port("mqtt")
    with Device(port, "kept", clean=False, expiry_s=600) as device:
        device.subscribe("kept/+", 2, identifier=7)
        device.subscribe("other", 0)
    with Device(port) as publisher:
        publisher.publish("kept/1", b"before", 2)
    own_broker.kill()
    own_broker.start()
    with Device(port) as publisher:
        publisher.publish("kept/2", b"after", 1)
    with Device(port, "kept", clean=False, expiry_s=600) as device:
        assert device.session_present
        assert sorted((each.topic, each.payload, each.qos) for each in device.wait(2)) == [
            ("kept/1", b"before", 2),
            ("kept/2", b"after", 1),
        ]
        assert device.messages[0].properties.SubscriptionIdentifier == [7]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.3.1-1", "MQTT-4.6.0-1", "MQTT-2.2.1-4", "MQTT-4.3.2-1", "MQTT-4.3.2-2", "MQTT-4.3.2-3")
@pytest.mark.parametrize("crash", [False, True])
def test_unacknowledged_messages_are_sent_again_with_their_identifiers_and_order(
    own_broker: Broker, crash: bool
) -> None:
    port = own_broker.port("mqtt")
    device = Device(port, "again", clean=False, expiry_s=600, acks=False)
    with several(device):
        device.subscribe("again", 1)
        with Device(port) as publisher:
            for number in range(10):
                publisher.publish("again", b"%d" % number)
        first = [(each.payload, each.mid) for each in device.wait(10)]
        assert not any(each.dup for each in device.messages)
        device.client.ack(first[0][1], 1)
        device.client.ack(first[4][1], 1)
        wait_for_messages(own_broker, "again", 8)
        if crash:
            own_broker.kill()
            own_broker.start()
        device.drop()
    with Device(port, "again", clean=False, expiry_s=600, acks=False) as device:
        assert device.session_present
        expected = [each for each in first if each[0] not in (b"0", b"4")]
        assert [(each.payload, each.mid) for each in device.wait(8)] == expected
        assert all(each.dup for each in device.messages)
        with Device(port) as publisher:
            publisher.publish("again", b"new")
        new = device.wait(9)[8]
        assert new.payload == b"new"
        assert not new.dup
        assert new.mid not in [mid for _, mid in expected]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.4-3", "MQTT-3.1.3-2")
def test_a_second_connection_takes_the_session_over(broker: Broker) -> None:
    port = broker.port("mqtt")
    first = Device(port, "twice", expiry_s=60)
    first.subscribe("twice", 1)
    second = Device(port, "twice", clean=False, expiry_s=60)
    with several(first, second):
        first.until(lambda: first.disconnect_code is not None)
        assert code_of(first.disconnect_code) == 0x8E
        assert second.session_present
        second.publish("twice", b"x")
        assert second.wait(1)[0].payload == b"x"


@pytest.mark.spec("G1")
def test_the_session_of_another_user_is_refused(own_broker: Broker) -> None:
    own_broker.call("PUT", "/api/users/eve", {"password": "secret", "tags": ""})
    own_broker.call("PUT", "/api/permissions/%2F/eve", {"configure": ".*", "write": ".*", "read": ".*"})
    port = own_broker.port("mqtt")
    with Device(port, "mine", expiry_s=60, user="guest", password="guest") as device:  # noqa: S106
        device.subscribe("mine", 1)
        thief = Device(port, "mine", clean=False, user="eve", password="secret")  # noqa: S106
        with several(thief):
            assert code_of(thief.connack[1]) == 0x87
        device.publish("mine", b"still here")
        assert device.wait(1)[0].payload == b"still here"


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.1.0-2")
def test_a_session_expires_and_its_queue_is_deleted(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Device(port, "brief", expiry_s=1) as device:
        device.subscribe("brief", 1)
    names = [each["name"] for each in broker.call("GET", "/api/queues/%2F")]
    assert "mqtt.session.brief" in names
    until = time.monotonic() + 20
    while "mqtt.session.brief" in names:
        assert time.monotonic() < until, "the session did not expire"
        time.sleep(0.2)
        names = [each["name"] for each in broker.call("GET", "/api/queues/%2F")]
    with Device(port, "brief", clean=False) as device:
        assert not device.session_present


@pytest.mark.spec("G1")
def test_disconnect_may_change_the_expiry_of_a_durable_session(broker: Broker) -> None:
    port = broker.port("mqtt")
    device = Device(port, "changing", expiry_s=600)
    device.subscribe("changing", 1)
    device.disconnect(SessionExpiryInterval=0)
    with Device(port, "changing", clean=False) as device:
        assert not device.session_present


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.9.0-1")
def test_no_more_messages_are_sent_than_the_receive_maximum_allows(broker: Broker) -> None:
    port = broker.port("mqtt")
    device = Device(port, "window", acks=False, connect_fields={"ReceiveMaximum": 3})
    with several(device):
        device.subscribe("window", 1)
        with Device(port) as publisher:
            for number in range(8):
                publisher.publish("window", b"%d" % number)
        device.wait(3)
        assert device.settle() == [b"0", b"1", b"2"]
        device.client.ack(device.messages[1].mid, 1)
        device.wait(4)
        assert device.settle() == [b"0", b"1", b"2", b"3"]


@pytest.mark.spec("G1")
def test_a_client_without_an_id_gets_one(broker: Broker) -> None:
    with Device(broker.port("mqtt")) as device:
        assert device.connack[2].AssignedClientIdentifier.startswith("auto-")


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-22", "MQTT-3.2.2-22")
def test_a_silent_client_is_disconnected(broker: Broker) -> None:
    with Raw(broker.port("mqtt")) as raw:
        raw.connect("silent", keep_alive_s=1)
        assert raw.expect(p.DISCONNECT).reason_code == 0x8D
        assert raw.read() is None
