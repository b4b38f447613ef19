"""Rules: messages of a topic filter land in a partitioned stream."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pika
import pytest
from tests.interop.mqtt.device import Device, several
from tests.interop.server import ROOT, Broker

from basaltmq.errors import BasaltError

WAIT_S = 30.0
PARTITIONS = 4


def rule(broker: Broker, *arguments: str) -> str:
    command = [sys.executable, "-m", "basaltmq.cli", "mqtt", "rule", *arguments, "--server", broker.url("admin")]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return done.stdout if not done.returncode else f"failed: {done.stderr}"


def create_topic(broker: Broker, name: str, partitions: int = PARTITIONS) -> None:
    broker.call("PUT", f"/api/topics/%2F/{name}", {"partitions": partitions})


def records(broker: Broker, topic: str, partitions: int = PARTITIONS) -> list[dict[str, Any]]:
    """All records, with their partition."""
    found: list[dict[str, Any]] = []
    for partition in range(partitions):
        page = broker.call("GET", f"/api/topics/%2F/{topic}/{partition}/lines", offset=0)["records"]
        found += [{**each, "partition": partition} for each in page]
    return found


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.spec("G1")
def test_messages_of_a_filter_fill_the_partitions_by_key(broker: Broker) -> None:
    create_topic(broker, "sensors")
    assert "copied" in rule(broker, "set", "by-device", "sensors/#", "sensors", "--key", "level 2")
    will = {"topic": "sensors/9/will", "payload": b"gone", "qos": 1}
    port = broker.port("mqtt")
    with several(sender := Device(port), dying := Device(port, will=will)):
        for number in range(30):
            sender.publish(f"sensors/{number % 5}/a.b", b"%d" % number, number % 3, UserProperty=[("unit", "C")])
        sender.publish("elsewhere/1", b"no")
        sender.publish("sensors", b"no second level")
        dying.drop()
        connection = pika.BlockingConnection(pika.URLParameters(broker.url()))
        connection.channel().basic_publish("amq.topic", "sensors.amqp.x", b"from AMQP")
        connection.close()
        until(lambda: len(records(broker, "sensors")) >= 33)
    found = records(broker, "sensors")
    assert len(found) == 33
    by_key: dict[Any, list[dict[str, Any]]] = {}
    for each in found:
        by_key.setdefault(each.get("key"), []).append(each)
    assert set(by_key) == {"0", "1", "2", "3", "4", "9", "amqp", None}
    for key in "01234":
        assert len({each["partition"] for each in by_key[key]}) == 1
        assert [int(each["value"]) for each in by_key[key]] == list(range(int(key), 30, 5)), "in order"
    assert {each["partition"] for key in "01234" for each in by_key[key]} != {0}
    headers = dict(by_key["3"][0]["headers"])
    assert (headers["topic"], headers["unit"]) == ("sensors/3/a.b", "C")
    listed = json.loads(rule(broker, "list", "--json"))
    assert [(each["name"], each["waiting"], each["appended"]) for each in listed] == [("by-device", 0, 33)]


@pytest.mark.spec("G1")
@pytest.mark.promise("P1")
def test_messages_wait_for_their_stream_also_after_kill_9(own_broker: Broker) -> None:
    create_topic(own_broker, "later", 1)
    rule(own_broker, "set", "waits", "later/+", "later", "--key", "topic")
    own_broker.call("DELETE", "/api/topics/%2F/later")
    with Device(own_broker.port("mqtt")) as device:
        for number in range(300):
            device.client.publish("later/x", b"%d" % number, 1)
        device.until(lambda: len(device.acknowledged) == 300)
        assert {code.value for code in device.acknowledged.values()} == {0}, "the rule receives them"
    own_broker.kill()
    own_broker.start()
    assert json.loads(rule(own_broker, "list", "--json"))[0]["waiting"] == 300
    create_topic(own_broker, "later", 1)
    until(lambda: len(records(own_broker, "later", 1)) >= 300)
    assert [int(each["value"]) for each in records(own_broker, "later", 1)] == list(range(300))
    assert records(own_broker, "later", 1)[0]["key"] == "later/x"


@pytest.mark.spec("G1")
def test_rules_are_replaced_exported_and_deleted(own_broker: Broker) -> None:
    for name in ("one", "two"):
        create_topic(own_broker, name, 1)
    rule(own_broker, "set", "moves", "a/#", "one")
    rule(own_broker, "set", "moves", "b/#", "two")
    with Device(own_broker.port("mqtt"), "kept", expiry_s=60) as device:
        device.subscribe("b/#")
        device.publish("a/1", b"a")
        device.publish("b/1", b"b")
        until(lambda: len(records(own_broker, "two", 1)) == 1)
        assert records(own_broker, "one", 1) == []
        exported = own_broker.call("GET", "/api/definitions")
        assert exported["mqtt_rules"] == [
            {"name": "moves", "vhost": "/", "filter": "b/#", "topic": "two", "key": "none"}
        ]
        assert exported["queues"] == []
        assert exported["bindings"] == [], "queues of sessions and rules follow from these"
        assert "deleted" in rule(own_broker, "delete", "moves")
        assert own_broker.call("GET", "/api/mqtt/rules/%2F") == []
        device.publish("b/2", b"only to the session")
        device.wait(2)
    done = own_broker.call("POST", "/api/definitions", exported)
    assert done["imported"]["mqtt_rules"] == 1
    with Device(own_broker.port("mqtt")) as device:
        device.publish("b/3", b"again")
        until(lambda: len(records(own_broker, "two", 1)) == 2)
    own_broker.call("DELETE", "/api/topics/%2F/one")
    lost = {"mqtt_rules": [{"name": "lost", "vhost": "/", "filter": "x", "topic": "one"}]}
    assert "one" in own_broker.call("POST", "/api/definitions", lost)["skipped"][0]


@pytest.mark.spec("G1")
def test_a_rule_is_checked_and_needs_permissions(broker: Broker) -> None:
    create_topic(broker, "mine", 1)
    for arguments, reason in [
        (("bad", "a/#/b", "mine"), "'#'"),
        (("bad", "$share/g/a", "mine"), "'$'"),
        (("bad", "a", "mine", "--key", "level 0"), "level N"),
        (("bad", "a", "mine", "--key", "middle"), "level N"),
        (("bad", "a", "nowhere"), "nowhere"),
        (("x" * 201, "a", "mine"), "name of a rule"),
    ]:
        answer = rule(broker, "set", *arguments)
        assert answer.startswith("failed"), answer
        assert reason in answer
    assert rule(broker, "delete", "bad").startswith("failed")
    broker.call("PUT", "/api/users/lee", {"password": "secret", "tags": "policymaker"})
    body = {"filter": "a/#", "topic": "mine", "key": "none"}
    every = {"configure": "^mqtt", "write": "^mine$", "read": "^amq"}
    lee = broker.api("lee", "secret")
    for missing in ("configure", "write", "read"):
        broker.call("PUT", "/api/permissions/%2F/lee", {**every, missing: "^$"})
        with pytest.raises(BasaltError, match="refused"):
            lee.call("PUT", "/api/mqtt/rules/%2F/lees", body)
    broker.call("PUT", "/api/permissions/%2F/lee", every)
    broker.call("PUT", "/api/topic-permissions/%2F/lee", {"exchange": "amq.topic", "write": "", "read": "^b"})
    with pytest.raises(BasaltError, match="refused"):
        lee.call("PUT", "/api/mqtt/rules/%2F/lees", body)
    lee.call("PUT", "/api/mqtt/rules/%2F/lees", {**body, "filter": "b/#"})
    broker.call("PUT", "/api/permissions/%2F/lee", {**every, "configure": "^$"})
    with pytest.raises(BasaltError, match="refused"):
        lee.call("DELETE", "/api/mqtt/rules/%2F/lees")
