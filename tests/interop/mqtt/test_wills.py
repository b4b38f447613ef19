"""Wills: when they are published, with delay, and after kill -9."""

from __future__ import annotations

import time
from typing import Any

import pytest
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from tests.interop.mqtt.device import V5, V311, Device, properties
from tests.interop.server import Broker

DELAY_S = 6
"""Delay of a will whose client returns before: longer than a busy machine needs for three connections."""


def will(topic: str, payload: bytes = b"gone", delay_s: int = 0, **fields: Any) -> dict[str, Any]:
    made = {"topic": topic, "payload": payload, "qos": 1, **fields}
    if delay_s:
        made["properties"] = properties(PacketTypes.WILLMESSAGE, WillDelayInterval=delay_s)
    return made


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-8", "MQTT-3.1.2-10", "MQTT-3.1.2-15", "MQTT-3.14.4-3")
@pytest.mark.parametrize("version", [V311, V5])
def test_a_lost_connection_publishes_the_will_and_disconnect_does_not(
    broker: Broker, version: MQTTProtocolVersion
) -> None:
    port = broker.port("mqtt")
    with Device(port, version=version) as watcher:
        watcher.subscribe(f"will/{version}/#", 1)
        polite = Device(port, f"polite{version}", version=version, will=will(f"will/{version}/polite"))
        polite.disconnect()
        lost = Device(port, f"lost{version}", version=version, will=will(f"will/{version}/lost", retain=True))
        lost.drop()
        assert [each.topic for each in watcher.wait(1)] == [f"will/{version}/lost"]
        assert watcher.settle() == [b"gone"]
    with Device(port) as late:
        late.subscribe(f"will/{version}/lost", 1)
        assert late.wait(1)[0].retain


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.3-9")
def test_a_delayed_will_is_not_published_if_the_client_returns(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Device(port) as watcher:
        watcher.subscribe("delayed/#", 1)
        for name in ("back", "away"):
            Device(port, name, expiry_s=60, will=will(f"delayed/{name}", delay_s=DELAY_S)).drop()
        with Device(port, "back", clean=False, expiry_s=60) as back:
            assert back.session_present
            # That of `back`, which was lost first, would come first.
            assert [each.topic for each in watcher.wait(1)] == ["delayed/away"]
            assert watcher.settle() == [b"gone"]


@pytest.mark.spec("G1")
def test_a_delayed_will_is_published_when_its_session_ends(broker: Broker) -> None:
    port = broker.port("mqtt")
    with Device(port) as watcher:
        watcher.subscribe("ended/#", 1)
        Device(port, "ended-1", expiry_s=1, will=will("ended/expired", delay_s=1000)).drop()
        Device(port, "ended-2", expiry_s=600, will=will("ended/cleaned", delay_s=1000)).drop()
        time.sleep(0.2)
        Device(port, "ended-2", clean=True).disconnect()
        assert sorted(each.topic for each in watcher.wait(2)) == ["ended/cleaned", "ended/expired"]


@pytest.mark.spec("G1")
@pytest.mark.mqtt("MQTT-3.1.2-7")
def test_wills_are_published_after_kill_9_and_a_restart(own_broker: Broker) -> None:
    port = own_broker.port("mqtt")
    with Device(port, "watcher", clean=False, expiry_s=600) as watcher:
        watcher.subscribe("killed/#", 1)
    devices = [
        Device(port, "killed-1", will=will("killed/1")),
        Device(port, "killed-2", expiry_s=600, will=will("killed/2")),
        Device(port, "killed-3", expiry_s=600, will=will("killed/3", delay_s=1000)),
    ]
    own_broker.kill()
    for device in devices:
        device.drop()
    own_broker.start()
    with Device(port, "watcher", clean=False, expiry_s=600) as watcher:
        assert sorted(each.topic for each in watcher.wait(2)) == ["killed/1", "killed/2"]
        with Device(port, "killed-3", clean=False, expiry_s=600) as back:
            assert back.session_present
        assert len(watcher.settle()) == 2
