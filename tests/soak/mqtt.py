"""MQTT clients: a publisher at QoS 1, and a subscriber with a persistent session.

A publish reaches the queue of the session and, through `amq.topic`, the AMQP queue `devices` of the default virtual
host and the queue of a rule, which copies it to a stream. PUBACK of a publish means that it is durable in all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.interop.mqtt.device import Device
from tests.interop.server import Broker
from tests.soak import amqp
from tests.soak.clients import Client
from tests.soak.kafka import read_partition
from tests.soak.ledger import CONFIRMED, SETTLING, TRIED, Label

from basaltmq.http_client import path
from basaltmq.protocols.mqtt.sessions.session import QUEUE_PREFIX

TOPIC = "soak/telemetry"
SUBSCRIBER = "soak-subscriber"
PLACE = f"mqtt|{QUEUE_PREFIX}{SUBSCRIBER}"
RULE = "soak"
STREAM = "telemetry"
STREAM_PARTITIONS = 2
STREAM_PLACE = f"rule|{STREAM}"
PLACES = (PLACE, f"/|{amqp.DEVICES}", STREAM_PLACE)
EXPIRY_S = 1_000_000
WAIT_S = 20.0
QUIET_S = 5.0
"""A session without a delivery for this time is drained."""

REFUSED = 128
"""Reason codes from this one on are errors."""


def create_rule(broker: Broker) -> None:
    broker.call("PUT", path("topics", "/", STREAM), {"partitions": STREAM_PARTITIONS})
    broker.call("PUT", path("mqtt", "rules", "/", RULE), {"filter": TOPIC, "topic": STREAM, "key": "none"})


def create_session(broker: Broker) -> None:
    device = subscriber(broker)
    device.subscribe(TOPIC)
    device.disconnect()


def subscriber(broker: Broker, received: Callable[[bytes], None] | None = None) -> Device:
    """Connect the subscriber to its session. `received` is called before paho acknowledges a message."""
    device = Device(broker.port("mqtt"), SUBSCRIBER, clean=False, expiry_s=EXPIRY_S, connect=False)
    note: Any = device.client.on_message

    def on_message(client: Any, data: Any, message: Any) -> None:
        if received is not None:
            received(bytes(message.payload))
        note(client, data, message)

    device.client.on_message = on_message
    return device.connect()


class _Mqtt(Client):
    # A device raises AssertionError when a wait times out.
    expected = (OSError, AssertionError, TypeError)


class Publisher(_Mqtt):
    """Publishes one message at a time."""

    def session(self) -> None:
        device = Device(self.broker.port("mqtt"), "soak-publisher")
        try:
            while self.turn.pause(self.random.choice((0.0, 0.01, 0.05))):
                (label,) = self.ledger.next_label("m")
                self.ledger.mark(PLACES, (label,), TRIED)
                code = self._publish(device, label.body(self.random.choice((0, 300, 50_000))))
                if code < REFUSED:
                    self.ledger.mark(PLACES, (label,), CONFIRMED)
        finally:
            device.drop()

    def _publish(self, device: Device, body: bytes) -> int:
        """The reason code of the acknowledgement."""
        sent = device.client.publish(TOPIC, body, 1)
        device.until(lambda: sent.mid in device.acknowledged or device.disconnect_code is not None, WAIT_S)
        if sent.mid not in device.acknowledged:
            raise ConnectionError(f"disconnected: {device.disconnect_code}")
        return int(device.acknowledged[sent.mid].value)


class Subscriber(_Mqtt):
    """Receives the messages of its session. The ledger records a message before paho acknowledges it."""

    def session(self) -> None:
        device = subscriber(self.broker, self._received)
        try:
            if device.connack is not None and not device.session_present:
                self.ledger.problem(f"{self.name}: the session is gone")
            while self.turn.pause(0.05) and device.disconnect_code is None:
                pass
        finally:
            device.drop()

    def _received(self, payload: bytes) -> None:
        label = Label.of(payload)
        self.ledger.seen(PLACE, label, self.name)
        self.ledger.mark((PLACE,), [label], SETTLING)


def read_stream(broker: Broker, timeout_s: float) -> list[Label]:
    """Wait until the rule has appended all messages. Return the records."""
    until_s = time.monotonic() + timeout_s
    while broker.call("GET", path("mqtt", "rules", "/", RULE))["waiting"]:
        assert time.monotonic() < until_s, f"rule {RULE} still has messages after {timeout_s:.0f} s"
        time.sleep(0.1)
    return [
        label for number in range(STREAM_PARTITIONS) for _, label in read_partition(broker, STREAM, number, timeout_s)
    ]


def drain(broker: Broker, timeout_s: float) -> list[Label]:
    """Drain the session. Return its messages."""
    until_s = time.monotonic() + timeout_s
    device = subscriber(broker)
    try:
        count, quiet_s = 0, time.monotonic() + QUIET_S
        while time.monotonic() < quiet_s:
            assert time.monotonic() < until_s, f"{PLACE} is not empty after {timeout_s:.0f} s"
            time.sleep(0.1)
            if len(device.messages) > count:
                count, quiet_s = len(device.messages), time.monotonic() + QUIET_S
        return [Label.of(payload) for payload in device.payloads()]
    finally:
        device.disconnect()
