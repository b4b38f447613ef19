"""Shared subscriptions: each message to one member, and back to the group if that member leaves."""

from __future__ import annotations

import pytest
from tests.interop.mqtt.device import Device, several
from tests.interop.server import Broker


@pytest.mark.spec("G1")
def test_each_message_goes_to_one_member_of_each_group(broker: Broker) -> None:
    port = broker.port("mqtt")
    members = [Device(port, f"member-{number}") for number in range(3)]
    alone, publisher = Device(port, "alone"), Device(port)
    with several(*members, alone, publisher):
        for member in members:
            assert member.subscribe("$share/workers/shared/#", 1, identifier=5) == 1
        alone.subscribe("$share/others/shared/#", 1)
        alone.subscribe("shared/#", 0)
        for number in range(90):
            publisher.publish(f"shared/{number % 7}", b"%d" % number)
        alone.until(lambda: len(alone.messages) == 180)
        members[0].until(lambda: sum(len(each.messages) for each in members) == 90)
        counts = [len(each.settle(0.1)) for each in members]
        assert sum(counts) == 90
        assert min(counts) >= 20, counts
        assert members[0].messages[0].properties.SubscriptionIdentifier == [5]


@pytest.mark.spec("G1")
def test_unacknowledged_messages_of_a_member_that_ends_go_to_another(broker: Broker) -> None:
    port = broker.port("mqtt")
    stuck = Device(port, "stuck", acks=False)
    stuck.subscribe("$share/rescue/rescue/t", 1)
    with several(stuck), Device(port) as publisher:
        for number in range(10):
            publisher.publish("rescue/t", b"%d" % number)
        stuck.wait(10)
        with Device(port, "helper") as helper:
            helper.subscribe("$share/rescue/rescue/t", 1)
            stuck.drop()
            assert sorted(int(each.payload) for each in helper.wait(10)) == list(range(10))


@pytest.mark.spec("G1")
def test_a_group_of_a_durable_session_collects_messages_and_ends_with_it(own_broker: Broker) -> None:
    port = own_broker.port("mqtt")
    with Device(port, "member", clean=False, expiry_s=600) as member:
        member.subscribe("$share/g/jobs/+", 1)
    with Device(port) as publisher:
        publisher.publish("jobs/1", b"waiting")
    own_broker.kill()
    own_broker.start()
    with Device(port, "member", clean=False, expiry_s=600) as member:
        assert member.session_present
        assert member.wait(1)[0].payload == b"waiting"
        assert member.unsubscribe("$share/g/jobs/+") == 0
        assert member.unsubscribe("$share/g/jobs/+") == 0x11
    names = [each["name"] for each in own_broker.call("GET", "/api/queues/%2F")]
    assert not [name for name in names if name.startswith("mqtt.share")]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.8.2-3")
def test_retained_messages_are_not_sent_to_shared_subscriptions(broker: Broker) -> None:
    with Device(broker.port("mqtt"), "no-retained") as device:
        device.publish("sharedkept", b"kept", retain=True)
        assert device.subscribe("$share/g/sharedkept", 2) == 1, "shared subscriptions have at most QoS 1"
        assert device.settle() == []


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-4.8.2-4", "MQTT-4.8.2-5")
def test_a_shared_subscription_has_qos_1_so_no_qos_2_delivery_is_ever_cut_off(broker: Broker) -> None:
    """The standard binds a QoS 2 delivery to the member that it began with. A lower granted QoS leaves no such case."""
    port = broker.port("mqtt")
    stuck = Device(port, "share-2a", acks=False, clean=False, expiry_s=600)
    with several(stuck), Device(port) as publisher:
        assert stuck.subscribe("$share/two/share/two", 2) == 1
        for number in range(5):
            publisher.publish("share/two", b"%d" % number, 2)
        assert {each.qos for each in stuck.wait(5)} == {1}
        stuck.drop()
        with Device(port, "share-2b") as helper:
            assert helper.subscribe("$share/two/share/two", 2) == 1
            assert sorted(int(each.payload) for each in helper.wait(5)) == list(range(5))
    with Device(port, "share-2a", clean=True):
        pass
