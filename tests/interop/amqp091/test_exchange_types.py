"""The exchange types of RabbitMQ's plugins: x-consistent-hash and x-delayed-message."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker
from tests.interop.amqp091.conftest import connect
from tests.interop.server import Broker

HASH = "x-consistent-hash"
DELAYED = "x-delayed-message"
WAIT_S = 60


def close_code(call: Any) -> int:
    with pytest.raises(ChannelClosedByBroker) as caught:
        call()
    code: int = caught.value.reply_code
    return code


def drain(channel: Any, queue: str) -> list[bytes]:
    """Take all ready messages."""
    bodies: list[bytes] = []
    while (found := channel.basic_get(queue, auto_ack=True))[0] is not None:
        bodies.append(found[2])
    return bodies


def shares(channel: Any, name: str, weights: dict[str, str], **exchange: Any) -> None:
    channel.exchange_declare(name, HASH, durable=True, **exchange)
    for queue, weight in weights.items():
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, name, weight)
    channel.confirm_delivery()


def test_messages_are_distributed_by_weight_and_equal_keys_stay_together(channel: Any) -> None:
    # The names are always the same, because the distribution depends on their hashes.
    name = "weights"
    queues = {f"{name}-{each}": weight for each, weight in (("a", "1"), ("b", "1"), ("c", "2"))}
    shares(channel, name, queues)
    for number in range(1200):
        channel.basic_publish(name, f"key{number % 400}", b"key%d" % (number % 400))
    found = {queue: drain(channel, queue) for queue in queues}
    assert sum(map(len, found.values())) == 1200
    at = {key: queue for queue, bodies in found.items() for key in bodies}
    assert all(at[key] == queue for queue, bodies in found.items() for key in bodies), "one queue per key"
    counts = [len(found[queue]) for queue in queues]
    assert 200 < counts[0] < 420
    assert 200 < counts[1] < 420
    assert 460 < counts[2] < 740, "weight 2 gets about half"


def test_keys_keep_their_queue_over_a_restart_and_move_only_from_a_removed_one(own_broker: Broker, name: str) -> None:
    queues = [f"{name}-{each}" for each in range(4)]

    def places(channel: Any) -> dict[bytes, str]:
        channel.confirm_delivery()
        for number in range(200):
            channel.basic_publish(name, f"k{number}", b"k%d" % number)
        return {body: queue for queue in queues for body in drain(channel, queue)}

    connection = connect(own_broker)
    shares(connection.channel(), name, dict.fromkeys(queues, "1"))
    before = places(connection.channel())
    connection.close()
    own_broker.kill()
    own_broker.start()
    connection = connect(own_broker)
    channel = connection.channel()
    assert places(channel) == before
    channel.queue_unbind(queues[0], name, "1")
    after = places(channel)
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key in before if before[key] == queues[0]}
    connection.close()


@pytest.mark.parametrize(
    ("argument", "spread"),
    [
        ({"hash-header": "customer"}, lambda each: pika.BasicProperties(headers={"customer": each})),
        ({"hash-property": "message_id"}, lambda each: pika.BasicProperties(message_id=each)),
        ({"hash-property": "correlation_id"}, lambda each: pika.BasicProperties(correlation_id=each)),
    ],
)
def test_a_header_or_property_decides(channel: Any, name: str, argument: dict[str, str], spread: Any) -> None:
    queues = [f"{name}-{each}" for each in "ab"]
    shares(channel, name, dict.fromkeys(queues, "1"), arguments=argument)
    for number in range(100):
        channel.basic_publish(name, f"key{number}", b"c%d" % (number % 10), spread(f"c{number % 10}"))
    found = [Counter(drain(channel, queue)) for queue in queues]
    assert set(found[0]) | set(found[1]) == {b"c%d" % each for each in range(10)}
    assert not set(found[0]) & set(found[1])
    assert len(found[0]) not in (0, 10)
    channel.basic_publish(name, "any", b"bare")
    channel.basic_publish(name, "other", b"bare")
    assert sorted(len(drain(channel, queue)) for queue in queues) == [0, 2], "messages without a value stay together"


def test_invalid_hash_exchanges_and_weights_are_refused(connection: Any, name: str) -> None:
    for arguments in (
        {"hash-header": "h", "hash-property": "message_id"},
        {"hash-property": "priority"},
        {"hash-header": 1},
    ):
        channel = connection.channel()
        assert close_code(lambda c=channel, a=arguments: c.exchange_declare(name, HASH, arguments=a)) == 406
    channel = connection.channel()
    shares(channel, name, {})
    channel.queue_declare(name, exclusive=True)
    for weight in ("0", "-1", "abc", "2.5", "", "1000001", "1_0", " 7", "\u0663"):
        channel = connection.channel()
        assert close_code(lambda c=channel, w=weight: c.queue_bind(name, name, w)) == 406


def delayed(channel: Any, name: str, kind: str = "direct", **queue: Any) -> None:
    channel.exchange_declare(name, DELAYED, durable=True, arguments={"x-delayed-type": kind})
    channel.queue_declare(name, durable=True, **queue)
    channel.queue_bind(name, name, "k")
    channel.confirm_delivery()


def send(channel: Any, name: str, body: bytes, delay: Any = None, **properties: Any) -> None:
    headers = {} if delay is None else {"x-delay": delay}
    channel.basic_publish(name, "k", body, pika.BasicProperties(headers=headers, **properties))


def receive(channel: Any, queue: str, count: int) -> list[tuple[float, Any, bytes]]:
    found: list[tuple[float, Any, bytes]] = []
    for method, properties, body in channel.consume(queue, auto_ack=True, inactivity_timeout=WAIT_S):
        assert method is not None, f"{len(found)} of {count} came"
        found.append((time.monotonic(), properties, body))
        if len(found) == count:
            channel.cancel()
            return found
    raise AssertionError("the consumer was cancelled")


@pytest.mark.parametrize("mode", [1, 2])
def test_delayed_messages_arrive_after_their_delay(channel: Any, name: str, mode: int) -> None:
    delayed(channel, name)
    start = time.monotonic()
    send(channel, name, b"late", 1200, delivery_mode=mode)
    send(channel, name, b"soon", 400, delivery_mode=mode)
    for body, delay in ((b"now", None), (b"past", -5), (b"text", "300")):
        send(channel, name, body, delay, delivery_mode=mode)
    found = receive(channel, name, 5)
    assert [body for _, _, body in found] == [b"now", b"past", b"text", b"soon", b"late"]
    assert found[3][0] - start >= 0.4
    assert found[4][0] - start >= 1.2
    assert found[4][1].headers == {"x-delay": -1200}, "the delay is over"


def test_delayed_messages_survive_kill_9(own_broker: Broker, name: str) -> None:
    connection = connect(own_broker)
    channel = connection.channel()
    delayed(channel, name)
    start = time.monotonic()
    for number in range(20):
        send(channel, name, b"%d" % number, 3000, delivery_mode=2)
    assert channel.queue_declare(name, passive=True).method.message_count == 0
    connection.close()
    own_broker.kill()
    own_broker.start()
    connection = connect(own_broker)
    found = receive(connection.channel(), name, 20)
    assert [int(body) for _, _, body in found] == list(range(20))
    assert found[0][0] - start >= 3
    connection.close()


def test_a_delayed_exchange_routes_by_its_type(channel: Any, name: str) -> None:
    channel.exchange_declare(name, DELAYED, arguments={"x-delayed-type": "headers"})
    for each in "ab":
        channel.queue_declare(f"{name}-{each}", exclusive=True)
        channel.queue_bind(f"{name}-{each}", name, "", {"x-match": "any", "for": each})
    channel.confirm_delivery()
    for each in "ab":
        channel.basic_publish(name, "", each.encode(), pika.BasicProperties(headers={"for": each, "x-delay": 300}))
    for each in "ab":
        assert [body for _, _, body in receive(channel, f"{name}-{each}", 1)] == [each.encode()]


def test_a_ttl_counts_from_the_end_of_the_delay(channel: Any, name: str) -> None:
    delayed(channel, name)
    send(channel, name, b"kept", 2500, expiration="2400")
    # The consumer waits, so it gets the message as soon as it is ready. Counted from the publish, it would be expired.
    assert [body for _, _, body in receive(channel, name, 1)] == [b"kept"]


def test_invalid_delayed_exchanges_are_refused(connection: Any, name: str) -> None:
    for arguments in ({}, {"x-delayed-type": "nope"}, {"x-delayed-type": DELAYED}, {"x-delayed-type": 5}):
        channel = connection.channel()
        assert close_code(lambda c=channel, a=arguments: c.exchange_declare(name, DELAYED, arguments=a)) == 406
    channel = connection.channel()
    channel.exchange_declare(name, DELAYED, arguments={"x-delayed-type": "topic"})
    other = {"x-delayed-type": "direct"}
    assert close_code(lambda: channel.exchange_declare(name, DELAYED, arguments=other)) == 406
