"""Effects of a client with many links, channels or consumers on other clients: scenarios of `client_latency`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

from bench.amqp_wire import Wire, methods_bytes, publish_bytes
from bench.client_latency_probe import KafkaWire
from bench.client_latency_target import Target
from pika import spec
from tests.interop.amqp10.raw import RawClient

from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire.frames import frame
from basaltmq.protocols.kafka.wire import api as k

LINKS: Final = 10_000
UNSETTLED: Final = 200_000
CHANNELS: Final = 2_000
CONSUMERS: Final = 10_000
PARTITIONS: Final = 10_000
TOPICS: Final = 10
MEMBERS: Final = 10
WINDOW: Final = 0x7FFF_FFFF
PERSISTENT: Final = 2
STEP: Final = 500


def _fill(target: Target, count: int) -> None:
    with target.wire() as wire:
        wire.call(1, spec.Queue.Declare(queue="q", durable=True), spec.Queue.DeclareOk)
        wire.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
        for at in range(0, count, STEP):
            wire.write(publish_bytes("", "q", b"x" * 100, delivery_mode=PERSISTENT) * STEP)
            wire.wait_confirms(at + STEP)


def _links(target: Target, links: int, credit: int) -> RawClient:
    """Return a client with links of one queue, each of which has received all of its credit."""
    client = RawClient(target.amqp).login()
    client.send(p.Open(container_id="links"))
    client.take(p.Open)
    client.begin(0, incoming_window=WINDOW)
    source = p.Source(address="/queues/q")
    for at in range(0, links, STEP):
        data = b""
        for handle in range(at, min(links, at + STEP)):
            attach = p.Attach(name=f"l{handle}", handle=handle, role=p.RECEIVER, source=source, target=p.Target())
            flow = p.Flow(handle=handle, delivery_count=0, link_credit=credit, next_incoming_id=0)
            flow.incoming_window = flow.outgoing_window = WINDOW
            flow.next_outgoing_id = 0
            data += frame(0, p.encode(attach)) + frame(0, p.encode(flow))
        client.sock.sendall(data)
        for _ in range(min(STEP, links - at) * credit):
            client.take(p.Transfer)
    return client


def amqp10_links(target: Target) -> Iterator[None]:
    """A connection with 10,000 links and 10,000 unsettled deliveries is cut."""
    _fill(target, LINKS)
    client = _links(target, LINKS, 1)
    yield
    client.sock.close()
    time.sleep(5)


def amqp10_end(target: Target) -> Iterator[None]:
    """A client ends a session with 5,000 links and 20 unsettled deliveries on each."""
    _fill(target, LINKS * 10)
    client = _links(target, LINKS // 2, 20)
    yield
    client.send(p.End())
    client.take(p.End)
    client.sock.close()


def amqp10_disposition(target: Target) -> Iterator[None]:
    """One disposition releases 200,000 deliveries, another one accepts them when they have come again."""
    _fill(target, UNSETTLED)
    client = _links(target, 1, UNSETTLED)
    yield
    client.send(p.Disposition(role=p.RECEIVER, first=0, last=UNSETTLED - 1, settled=True, state=p.Released()))
    flow = p.Flow(handle=0, delivery_count=UNSETTLED, link_credit=UNSETTLED, next_incoming_id=UNSETTLED)
    flow.incoming_window = flow.outgoing_window = WINDOW
    flow.next_outgoing_id = 0
    client.send(flow)
    for _ in range(UNSETTLED):
        client.take(p.Transfer)
    client.send(p.Disposition(role=p.RECEIVER, first=0, last=2 * UNSETTLED, settled=True, state=p.Accepted()))
    client.send(p.Detach(handle=0, closed=True))
    client.take(p.Detach)
    client.sock.close()


def amqp10_detach(target: Target) -> Iterator[None]:
    """A link with 200,000 unsettled deliveries is detached."""
    _fill(target, UNSETTLED)
    client = _links(target, 1, UNSETTLED)
    yield
    client.send(p.Detach(handle=0, closed=True))
    client.take(p.Detach)
    time.sleep(4)
    client.sock.close()


def _channels(target: Target) -> Wire:
    _fill(target, CHANNELS * 100)
    wire = target.wire()
    wire.write(b"".join(methods_bytes(n, [spec.Channel.Open()]) for n in range(2, CHANNELS + 1)))
    wire.wait(spec.Channel.OpenOk, CHANNELS - 1)
    for n in range(1, CHANNELS + 1):
        wire.write(methods_bytes(n, [spec.Basic.Get(queue="q")] * 100))
        wire.wait(spec.Basic.GetOk, 100)
    return wire


def channels_unacked(target: Target) -> Iterator[None]:
    """A connection with 2,000 channels and 100 unacknowledged messages on each is cut."""
    wire = _channels(target)
    yield
    wire.close()
    time.sleep(5)


def delete_consumed(target: Target) -> Iterator[None]:
    """A queue with a single active consumer and 10,000 others is deleted; then a second one loses its consumers."""
    wires = []
    for name in ("a", "b"):
        wire = target.wire()
        method = spec.Queue.Declare(queue=name, durable=True, arguments={"x-single-active-consumer": True})
        wire.call(1, method, spec.Queue.DeclareOk)
        for at in range(0, CONSUMERS, STEP):
            wire.write(
                methods_bytes(1, [spec.Basic.Consume(queue=name, consumer_tag=f"c{at + n}") for n in range(STEP)])
            )
            wire.wait(spec.Basic.ConsumeOk, STEP)
        wires.append(wire)
    with target.wire() as other:
        yield
        other.call(1, spec.Queue.Delete(queue="a"), spec.Queue.DeleteOk)
        time.sleep(2)
    for wire in wires:
        wire.close()
    time.sleep(2)


def kafka_target(target: Target) -> Iterator[None]:
    """Ten members join a KIP-848 group over 100,000 partitions, one after the other."""
    client = KafkaWire(target.kafka)
    names = [f"t{n}" for n in range(TOPICS)]
    for name in names:
        topic = {"name": name, "num_partitions": PARTITIONS, "replication_factor": 1}
        client.call(k.CREATE_TOPICS, 2, {"topics": [topic], "timeout_ms": 60_000})
    yield

    def beat(member: str, epoch: int, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"group_id": "g", "member_id": member, "member_epoch": epoch, "instance_id": None,
                "rack_id": None, "rebalance_timeout_ms": -1, "subscribed_topic_names": None,
                "subscribed_topic_regex": None, "server_assignor": None, "topic_partitions": None}  # fmt: skip
        return client.call(k.CONSUMER_GROUP_HEARTBEAT, 1, {**body, **fields})

    members = [str(uuid.uuid4()) for _ in range(MEMBERS)]
    for member in members:
        joined = beat(member, 0, rebalance_timeout_ms=60_000, subscribed_topic_names=names, topic_partitions=[])
        time.sleep(0.7)
        beat(member, joined["member_epoch"])
    client.close()


LINK_SCENARIOS: Final[dict[str, Callable[[Target], Iterator[None]]]] = {
    each.__name__: each
    for each in (
        amqp10_links, amqp10_end, amqp10_disposition, amqp10_detach, channels_unacked, delete_consumed, kafka_target,
    )
}  # fmt: skip
