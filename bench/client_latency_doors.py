"""What clients of RocketMQ and AMQP 1.0 do to the others, and selectors: more scenarios of `client_latency`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import grpc
from bench.amqp_wire import publish_bytes
from bench.client_latency_target import SETUP_S, Target
from pika import spec
from tests.interop.amqp10.raw import RawClient
from tests.interop.rocketmq.raw import Client, handle_of, message, named, settings_of_consumer

from basaltmq.protocols.amqp10.wire import frames as f
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.wire import rocketmq_wire_pb2 as wire

CONSUMERS: Final = 8
RECORDS: Final = 40_000
BATCH: Final = 32
CROWD: Final = 2_000
STREAMS: Final = 50
"""Telemetry streams per HTTP/2 connection."""

GROUPS: Final = 500
BACKLOG: Final = 100_000
SELECTORS: Final = 5
FLOOD: Final = 100_000
LARGE_BYTES: Final = 10_000_000
FRAME_BYTES: Final = 120_000
WINDOW: Final = 0x7FFF_FFFF
STEP: Final = 500


def _in_threads(*works: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SETUP_S)


def _send(client: Client, topic: str, count: int, size: int) -> None:
    body = b"x" * size
    for at in range(0, count, BATCH):
        answer = client.send(*(message(topic, body) for _ in range(min(BATCH, count - at))))
        assert answer.status.code == wire.OK, answer


def rocketmq_send(target: Target) -> Iterator[None]:
    """Eight producers send 40,000 messages of 1 KB in batches of 32."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(target.rocketmq)) for _ in range(CONSUMERS)]
        clients[0].route("t")
        yield
        _in_threads(*(lambda c=each: _send(c, "t", RECORDS // CONSUMERS, 1000) for each in clients))


def rocketmq_receive(target: Target) -> Iterator[None]:
    """Eight consumers receive and acknowledge 40,000 messages in batches of 32."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(target.rocketmq)) for _ in range(CONSUMERS)]
        clients[0].route("t")
        _send(clients[0], "t", RECORDS, 1000)

        def drain(client: Client) -> None:
            while True:
                code, found = client.receive("g", "t", count=BATCH)
                if code != wire.OK:
                    return
                client.ack("g", "t", *map(handle_of, found))

        yield
        _in_threads(*(lambda c=each: drain(c) for each in clients))


def rocketmq_unacked(target: Target) -> Iterator[None]:
    """The leases of 40,000 messages expire at once, and the messages are received again."""
    with Client(target.rocketmq) as client:
        client.route("t")
        _send(client, "t", RECORDS, 100)
        began = time.monotonic()
        for _ in range(RECORDS // BATCH):
            left_ms = max(10_000, int((60 - (time.monotonic() - began)) * 1000))
            client.receive("g", "t", count=BATCH, invisible_ms=left_ms)
        time.sleep(max(0.0, 58.0 - (time.monotonic() - began)))
        yield
        time.sleep(4)
        for _ in range(RECORDS // BATCH):
            client.receive("g", "t", count=BATCH)


def rocketmq_telemetry(target: Target) -> Iterator[None]:
    """2,000 clients open a telemetry stream at once, send their settings, and lose their connections."""
    channels = [
        grpc.insecure_channel(f"127.0.0.1:{target.rocketmq}", options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(CROWD // STREAMS)
    ]
    for each in channels:
        grpc.channel_ready_future(each).result(SETUP_S)
    ended = threading.Event()

    def talk(number: int) -> Iterator[wire.TelemetryCommand]:
        yield settings_of_consumer(f"g{number}")
        ended.wait(SETUP_S)

    yield
    calls = []
    for number in range(CROWD):
        call: Any = channels[number % len(channels)].stream_stream(
            "/apache.rocketmq.v2.MessagingService/Telemetry",
            request_serializer=wire.TelemetryCommand.SerializeToString,
            response_deserializer=wire.TelemetryCommand.FromString,
        )
        identity = [("x-mq-client-id", f"c{number}"), ("x-mq-date-time", "20260101T000000Z")]
        calls.append(call(talk(number), metadata=identity))
    for each in calls:
        next(each)
    ended.set()
    for each in channels:
        each.close()
    time.sleep(2)


def rocketmq_waits(target: Target) -> Iterator[None]:
    """500 groups wait for messages of one topic, and 200 messages come."""
    channels = [
        grpc.insecure_channel(f"127.0.0.1:{target.rocketmq}", options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(GROUPS // STREAMS)
    ]
    with Client(target.rocketmq) as client:
        client.route("t")
        calls = []
        for number in range(GROUPS):
            request = wire.ReceiveMessageRequest(
                group=named(f"g{number}"),
                message_queue=wire.MessageQueue(topic=named("t")),
                filter_expression=wire.FilterExpression(type=wire.TAG, expression="*"),
                batch_size=BATCH,
            )
            request.long_polling_timeout.FromSeconds(25)
            request.invisible_duration.FromSeconds(30)
            method: Any = channels[number % len(channels)].unary_stream(
                "/apache.rocketmq.v2.MessagingService/ReceiveMessage",
                request_serializer=wire.ReceiveMessageRequest.SerializeToString,
                response_deserializer=wire.ReceiveMessageResponse.FromString,
            )
            identity = [("x-mq-client-id", f"c{number}"), ("x-mq-date-time", "20260101T000000Z")]
            calls.append(method(request, metadata=identity, timeout=SETUP_S))
        time.sleep(2)
        yield
        _send(client, "t", 200, 1000)
        for each in calls:
            list(each)
    for channel in channels:
        channel.close()


def _amqp10(target: Target) -> RawClient:
    client = RawClient(target.amqp).login()
    client.send(p.Open(container_id="flood"))
    client.take(p.Open)
    client.begin(0, incoming_window=WINDOW)
    return client


def _declare(target: Target, name: str) -> None:
    with target.wire() as amqp:
        amqp.call(1, spec.Queue.Declare(queue=name, durable=True), spec.Queue.DeclareOk)


def amqp10_flood(target: Target) -> Iterator[None]:
    """100,000 transfers of 256 B, settled, are sent as fast as the broker reads them."""
    _declare(target, "q")
    client = _amqp10(target)
    client.attach_sender(0, "/queues/q")
    payload = s.data_head(256) + b"x" * 256
    many = [
        f.frame(0, p.encode(p.Transfer(handle=0, delivery_id=n, delivery_tag=b"%d" % n, settled=True)) + payload)
        for n in range(FLOOD)
    ]
    yield
    credit = client.take(p.Flow).link_credit or 0
    sent = 0
    while sent < FLOOD:
        now = min(max(1, credit - sent), FLOOD - sent)
        client.sock.sendall(b"".join(many[sent : sent + now]))
        sent += now
        if sent < FLOOD:
            flow = client.take(p.Flow)
            credit = (flow.delivery_count or 0) + (flow.link_credit or 0)
    client.sock.close()


def amqp10_large(target: Target) -> Iterator[None]:
    """Twenty transfers of 10 MB, in frames of 120 KB."""
    _declare(target, "q")
    client = _amqp10(target)
    client.attach_sender(0, "/queues/q")
    payload = s.data_head(LARGE_BYTES) + b"x" * LARGE_BYTES
    yield
    for number in range(20):
        for at in range(0, len(payload), FRAME_BYTES):
            more = at + FRAME_BYTES < len(payload)
            given: dict[str, Any] = {} if at else {"delivery_id": number, "delivery_tag": b"%d" % number}
            transfer = p.Transfer(handle=0, more=more, **given)
            client.sock.sendall(f.frame(0, p.encode(transfer) + payload[at : at + FRAME_BYTES]))
        client.take(p.Disposition)
    client.sock.close()


def selectors(target: Target) -> Iterator[None]:
    """Five consumers with selectors search a queue of 100,000 messages for one at its end."""
    with target.wire() as amqp:
        amqp.call(1, spec.Queue.Declare(queue="q", durable=True), spec.Queue.DeclareOk)
        amqp.call(1, spec.Confirm.Select(), spec.Confirm.SelectOk)
        data = publish_bytes("", "q", b"x" * 100, delivery_mode=2, headers={"color": "red", "number": 7})
        for at in range(0, BACKLOG, STEP):
            amqp.write(data * STEP)
            amqp.wait_confirms(at + STEP)
        client = _amqp10(target)
        yield
        for number in range(SELECTORS):
            text = f"color LIKE '%b_l%' OR number IN ({number + 100}, 9) AND color IS NOT NULL"
            selector = t.Described(t.Symbol("apache.org:selector-filter:string"), text)
            source = p.Source(address="/queues/q", filter={t.Symbol("s"): selector})
            client.attach_receiver(number, None, source=source)
            client.credit(number, 100)
        with target.wire() as other:
            blue = publish_bytes("", "q", b"x", delivery_mode=2, headers={"color": "black", "number": 9})
            other.write(blue * 10)
        client.sock.settimeout(SETUP_S)
        # Selectors read the queue up to a message that matches.
        client.take(p.Transfer)
        client.sock.close()


DOOR_SCENARIOS: Final[dict[str, Callable[[Target], Iterator[None]]]] = {
    each.__name__: each
    for each in (
        rocketmq_send, rocketmq_receive, rocketmq_unacked, rocketmq_telemetry, rocketmq_waits, amqp10_flood,
        amqp10_large, selectors,
    )
}  # fmt: skip
