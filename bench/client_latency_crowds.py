"""Effects of many clients, many objects or very large messages on other clients: scenarios of `client_latency`."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import quote

from bench.amqp_wire import Wire, methods_bytes, publish_bytes
from bench.client_latency_probe import KafkaWire
from bench.client_latency_target import SETUP_S, Target
from pika import spec

from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.mqtt.wire import packets as p
from basaltmq.protocols.mqtt.wire.encoder import encode
from basaltmq.protocols.mqtt.wire.properties import Properties

RETAINED: Final = 100_000
DEVICES: Final = 10_000
CONNECTIONS: Final = 5_000
QUEUES: Final = 10_000
MESSAGES: Final = 100_000
MEMBERS: Final = 100
METADATA: Final = bytes(1_000_000)
PERSISTENT: Final = 2
LARGE_BYTES: Final = 128 << 20
STEP: Final = 500


class MqttWire:
    """One MQTT connection that sends packets and counts what it receives."""

    def __init__(self, port: int, client_id: str, **connect: Any) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=SETUP_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._socket.sendall(encode(p.Connect(version=p.V5, client_id=client_id, **connect), p.V5))

    def connected(self) -> MqttWire:
        self.wait(p.CONNACK)
        return self

    def send(self, *packets: p.Packet) -> None:
        self._socket.sendall(b"".join(encode(each, p.V5) for each in packets))

    def wait(self, kind: int, count: int = 1) -> None:
        """Read until `count` packets of a kind have come."""
        while count:
            count -= self._kind() == kind

    def cut(self) -> None:
        """Close the connection without DISCONNECT."""
        self._socket.close()

    def _kind(self) -> int:
        while True:
            size, at, shift = 0, 1, 0
            while at < len(self._buffer):
                byte = self._buffer[at]
                size |= (byte & 0x7F) << shift
                shift, at = shift + 7, at + 1
                if byte < 0x80:
                    if len(self._buffer) >= at + size:
                        kind = self._buffer[0] >> 4
                        self._buffer = self._buffer[at + size :]
                        return kind
                    break
            got = self._socket.recv(1 << 16)
            assert got, "the broker closed the connection"
            self._buffer += got


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65_536)), hard))


def _queues(wire: Wire, count: int) -> None:
    for at in range(0, count, STEP):
        names = [f"q{n:06}" for n in range(at, min(count, at + STEP))]
        wire.write(methods_bytes(1, [spec.Queue.Declare(queue=name, durable=True) for name in names]))
        wire.wait(spec.Queue.DeclareOk, len(names))


def _crowd(target: Target, count: int, **connect: Any) -> list[MqttWire]:
    """Connect clients, in windows."""
    _raise_file_limit()
    crowd: list[MqttWire] = []
    for at in range(0, count, STEP):
        some = [MqttWire(target.mqtt, f"d{n}", **connect) for n in range(at, min(count, at + STEP))]
        crowd += [each.connected() for each in some]
    return crowd


def mqtt_retained(target: Target) -> Iterator[None]:
    """SUBSCRIBE to `#` and to `+/+/x` over 100,000 retained messages."""
    wire = MqttWire(target.mqtt, "publisher", clean_start=True).connected()
    for at in range(0, RETAINED, STEP):
        wire.send(*[p.Publish(topic=f"site/{n % 100}/{n}", payload=b"x" * 100, qos=1, retain=True,
                              packet_id=n % STEP + 1) for n in range(at, at + STEP)])  # fmt: skip
        wire.wait(p.PUBACK, STEP)
    reader = MqttWire(target.mqtt, "reader", clean_start=True).connected()
    other = MqttWire(target.mqtt, "other", clean_start=True).connected()
    yield
    other.send(p.Subscribe(packet_id=1, subscriptions=(p.Subscription("+/+/x", 1),)))
    reader.send(p.Subscribe(packet_id=1, subscriptions=(p.Subscription("#", 0),)))
    reader.wait(p.PUBLISH, RETAINED)


def mqtt_wills(target: Target) -> Iterator[None]:
    """10,000 clients with a retained will lose their connections at once."""
    will = p.Will(topic="gone", payload=b"x" * 100, qos=1, retain=True)
    crowd = _crowd(target, DEVICES, clean_start=True, will=will)
    yield
    for each in crowd:
        each.cut()
    _wait_gone(target)


def mqtt_sessions(target: Target) -> Iterator[None]:
    """10,000 subscribed clients, whose sessions end with the connection, lose their connections at once."""
    crowd = _crowd(target, DEVICES, clean_start=True)
    for n, each in enumerate(crowd):
        each.send(p.Subscribe(packet_id=1, subscriptions=(p.Subscription(f"d/{n}/#", 1),)))
        each.wait(p.SUBACK)
    yield
    for each in crowd:
        each.cut()
    _wait_gone(target)


def mqtt_expiries(target: Target) -> Iterator[None]:
    """5,000 durable sessions with a delayed will expire at the same time."""
    will = p.Will(topic="gone", payload=b"x" * 100, properties=Properties(will_delay_s=1))
    crowd = _crowd(target, CONNECTIONS, clean_start=True, will=will, properties=Properties(session_expiry_s=2))
    for n, each in enumerate(crowd):
        each.send(p.Subscribe(packet_id=1, subscriptions=(p.Subscription(f"d/{n}/#", 1),)))
        each.wait(p.SUBACK)
    yield
    for each in crowd:
        each.cut()
    _wait_gone(target)
    time.sleep(6)


def mqtt_connects(target: Target) -> Iterator[None]:
    """5,000 clients connect and subscribe at once."""
    _raise_file_limit()
    yield
    crowd = [MqttWire(target.mqtt, f"d{n}", clean_start=True) for n in range(CONNECTIONS)]
    for n, each in enumerate(crowd):
        each.send(p.Subscribe(packet_id=1, subscriptions=(p.Subscription(f"d/{n}/#", 1),)))
    for each in crowd:
        each.wait(p.SUBACK)
    for each in crowd:
        each.cut()
    _wait_gone(target)


def mqtt_fan_out(target: Target) -> Iterator[None]:
    """200 publishes to 2,000 subscribers each."""
    crowd = _crowd(target, 2000, clean_start=True)
    for each in crowd:
        each.send(p.Subscribe(packet_id=1, subscriptions=(p.Subscription("news", 0),)))
        each.wait(p.SUBACK)
    sender = MqttWire(target.mqtt, "sender", clean_start=True).connected()
    yield
    sender.send(*[p.Publish(topic="news", payload=b"x" * 100) for _ in range(200)])
    for each in crowd:
        each.wait(p.PUBLISH, 200)
    for each in crowd:
        each.cut()
    _wait_gone(target)


def _wait_gone(target: Target) -> None:
    """Wait until only the connections of the probe are left."""
    until = time.monotonic() + 60
    while target.api().get("/api/overview")["object_totals"]["connections"] > 20 and time.monotonic() < until:
        time.sleep(0.2)


def disconnects(target: Target) -> Iterator[None]:
    """5,000 AMQP connections with a consumer, an exclusive queue and unacknowledged messages are cut at once."""
    _raise_file_limit()
    wires = []
    for _ in range(CONNECTIONS):
        wire = target.wire()
        wire.call(1, spec.Queue.Declare(queue="", exclusive=True), spec.Queue.DeclareOk)
        wire.call(1, spec.Basic.Consume(queue=""), spec.Basic.ConsumeOk)
        wires.append(wire)
    with target.wire() as wire:
        wire.call(1, spec.Queue.Declare(queue="q", durable=True), spec.Queue.DeclareOk)
        wire.write(publish_bytes("", "q", b"x" * 256, delivery_mode=PERSISTENT) * CONNECTIONS)
        wire.call(1, spec.Queue.Declare(queue="q", durable=True), spec.Queue.DeclareOk)
    for wire in wires:
        wire.call(1, spec.Basic.Get(queue="q"), spec.Basic.GetOk)
    yield
    for wire in wires:
        wire.close()
    _wait_gone(target)
    time.sleep(2)


def close_all(target: Target) -> Iterator[None]:
    """The operator closes 5,000 connections of one user."""
    _raise_file_limit()
    wires = [target.wire() for _ in range(CONNECTIONS)]
    api = target.api()
    api.put("/api/users/crowd", {"password": "crowd", "tags": []})
    yield
    for each in api.get("/api/connections"):
        if each["vhost"] == "/" and each.get("protocol", "").startswith("AMQP"):
            api.delete(f"/api/connections/{quote(each['name'], safe='')}")
    for wire in wires:
        wire.close()


def connects(target: Target) -> Iterator[None]:
    """500 AMQP logins, one after the other."""
    yield
    for wire in [target.wire() for _ in range(500)]:
        wire.close()


def delete_full_vhost(target: Target) -> Iterator[None]:
    """Delete a virtual host with 10,000 queues and 100,000 messages."""
    api = target.api()
    api.put("/api/vhosts/doomed")
    with target.wire("doomed") as wire:
        _queues(wire, QUEUES)
        wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
        for at in range(0, MESSAGES, STEP):
            wire.write(b"".join(publish_bytes("", f"q{n % QUEUES:06}", b"x" * 256, delivery_mode=PERSISTENT)
                                for n in range(at, at + STEP)))  # fmt: skip
            wire.wait_confirms(at + STEP)
    yield
    api.delete("/api/vhosts/doomed")
    time.sleep(3)


def consumers_1000(target: Target) -> Iterator[None]:
    """1,000 connections consume one queue with prefetch 1; 20,000 messages pass; then all are cut."""
    _raise_file_limit()
    with target.wire() as wire:
        wire.call(1, spec.Queue.Declare(queue="q", durable=True), spec.Queue.DeclareOk)
    wires = [target.wire() for _ in range(1000)]
    for wire in wires:
        wire.call(1, spec.Basic.Qos(0, 20), spec.Basic.QosOk)
        wire.call(1, spec.Basic.Consume(queue="q"), spec.Basic.ConsumeOk)
    yield
    with target.wire() as other:
        other.write(publish_bytes("", "q", b"x" * 256, delivery_mode=PERSISTENT) * 20_000)
        for wire in wires:
            wire.wait_deliveries(20)
            wire.send(1, spec.Basic.Ack(0, multiple=True))
        other.write(publish_bytes("", "q", b"x" * 256, delivery_mode=PERSISTENT) * 20_000)
        for wire in wires:
            wire.wait_deliveries(40)
    for wire in wires:
        wire.close()
    time.sleep(2)


def large_body(target: Target) -> Iterator[None]:
    """Three bodies of 128 MiB in and out. Needs BASALT_FLAGS=--limits-message-bytes-max=128MiB."""
    with target.wire() as wire:
        wire.call(1, spec.Queue.Declare(queue="q", durable=True), spec.Queue.DeclareOk)
        wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
        data = publish_bytes("", "q", b"x" * LARGE_BYTES, delivery_mode=PERSISTENT)
        yield
        for n in range(3):
            wire.write(data)
            wire.wait_confirms(n + 1)
        wire.call(1, spec.Basic.Consume(queue="q", no_ack=True), spec.Basic.ConsumeOk)
        wire.wait_deliveries(3)
        wire.call(1, spec.Queue.Declare(queue="q", durable=True), spec.Queue.DeclareOk)


def kafka_joins(target: Target) -> Iterator[None]:
    """100 members join a classic group with 1 MB of metadata each, and its leader assigns 1 MB to each.

    The leader's request must stay below `kafka.request_bytes_max` if all members are in one generation.
    """
    clients = [KafkaWire(target.kafka) for _ in range(MEMBERS)]
    joins = [k.encode_request(k.JOIN_GROUP, 2, 1, f"c{n}", {
        "group_id": "g", "session_timeout_ms": 30_000, "rebalance_timeout_ms": 30_000, "member_id": "",
        "protocol_type": "consumer", "protocols": [{"name": "range", "metadata": METADATA}]})
        for n in range(MEMBERS)]  # fmt: skip
    yield
    for client, join in zip(clients, joins, strict=True):
        client.begin(join)
    answers = [k.decode_response(k.JOIN_GROUP, 2, client.answer())[1] for client in clients]
    leader = next((each for each in answers if each["members"]), None)
    if leader is None:
        return
    for client, each in zip(clients, answers, strict=True):
        assigned = (
            [{"member_id": m["member_id"], "assignment": METADATA} for m in leader["members"]] if each is leader else []
        )
        client.begin(
            k.encode_request(
                k.SYNC_GROUP,
                1,
                2,
                "c",
                {
                    "group_id": "g",
                    "generation_id": each["generation_id"],
                    "member_id": each["member_id"],
                    "assignments": assigned,
                },
            )
        )
    for client in clients:
        client.answer()
    for client in clients:
        client.close()


CROWD_SCENARIOS: Final[dict[str, Callable[[Target], Iterator[None]]]] = {
    each.__name__: each
    for each in (
        mqtt_retained, mqtt_wills, mqtt_sessions, mqtt_expiries, mqtt_connects, mqtt_fan_out, disconnects, close_all,
        connects, delete_full_vhost, consumers_1000, large_body, kafka_joins,
    )
}  # fmt: skip
