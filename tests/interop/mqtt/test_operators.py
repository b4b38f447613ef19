"""The operator's view: sessions, subscriptions, retained messages, metrics, and `$SYS`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.interop.mqtt.device import Device
from tests.interop.server import ROOT, Broker


def basalt(broker: Broker, *arguments: str) -> str:
    command = [sys.executable, "-m", "basaltmq.cli", "mqtt", *arguments, "--server", broker.url("admin")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert not done.returncode, done.stderr
    return done.stdout


def listed(broker: Broker, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(basalt(broker, *arguments, "--json"))
    return found


@pytest.mark.spec("G1")
def test_sessions_and_subscriptions_are_listed_and_ended(own_broker: Broker) -> None:
    port = own_broker.port("mqtt")
    with Device(port, "a", expiry_s=600) as device:
        device.subscribe("ops/#", 2, identifier=4)
        device.subscribe("$share/g/ops", 1)
    with Device(port, "b") as here:
        here.subscribe("ops/#", 1)
        here.publish("ops/1", b"x")
        sessions = {each["client_id"]: each for each in listed(own_broker, "sessions")}
        assert sorted(sessions) == ["a", "b"]
        assert not sessions["a"]["connected"]
        assert (sessions["a"]["durable"], sessions["a"]["messages"], sessions["a"]["subscriptions"]) == (True, 1, 2)
        assert sessions["a"]["expires_at_ms"] > 0
        assert (sessions["b"]["connected"], sessions["b"]["user"]) == (True, "guest")
        found = listed(own_broker, "subscriptions")
        assert [(each["client_id"], each["filter"], each["identifier"]) for each in found] == [
            ("a", "$share/g/ops", None),
            ("a", "ops/#", 4),
            ("b", "ops/#", None),
        ]
        assert "disconnected" in basalt(own_broker, "disconnect", "b", "--reason", "maintenance")
        here.until(lambda: here.disconnect_code is not None)
        assert here.disconnect_code.value == 0x98
        assert "session deleted" in basalt(own_broker, "disconnect", "a", "--end-session")
    assert listed(own_broker, "sessions") == []
    names = [each["name"] for each in own_broker.call("GET", "/api/queues/%2F")]
    assert names == []


@pytest.mark.spec("G1")
def test_retained_messages_are_listed_and_deleted(own_broker: Broker) -> None:
    with Device(own_broker.port("mqtt")) as device:
        for number in range(5):
            device.publish(f"kept/{number}", b"x" * number + b"y", retain=True)
        found = listed(own_broker, "retained", "kept/+")
        assert [(each["topic"], each["payload_bytes"]) for each in found] == [
            (f"kept/{number}", number + 1) for number in range(5)
        ]
        assert "1 retained messages deleted" in basalt(own_broker, "retained", "kept/3", "--delete", "--yes")
        device.subscribe("kept/+", 1)
        device.wait(4)
        assert b"xxxy" not in device.settle()


@pytest.mark.spec("G1")
def test_metrics_and_sys_topics_count_messages(own_broker: Broker) -> None:
    with Device(own_broker.port("mqtt")) as device:
        device.subscribe("counted", 0)
        for _ in range(3):
            device.publish("counted", b"x", 1)
        device.wait(3)
        assert device.subscribe("$SYS/broker/+/+", 0) == 0
        device.until(lambda: len(device.messages) >= 7)
        found = {each.topic: (each.payload, each.retain) for each in device.messages[3:]}
        assert found["$SYS/broker/clients/connected"] == (b"1", True)
        assert found["$SYS/broker/messages/received"] == (b"3", True)
        assert device.publish("$SYS/broker/clients/connected", b"9", 1) == 0x87
        assert device.unsubscribe("$SYS/broker/+/+") == 0
        text = own_broker.api().stream("GET", "/metrics") if hasattr(own_broker.api(), "stream") else None
        del text
        connections = own_broker.call("GET", "/api/connections")
        assert [each["protocol"] for each in connections] == ["MQTT 5.0"]
