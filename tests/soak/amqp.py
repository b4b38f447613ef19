"""AMQP clients: durable queues, a fan-out, dead letters, transactions, a stream queue, floods, pipelined declares.

Queues of each virtual host (places are `vhost|queue`):

    work        direct, with dead letters to `dead`       fan.1 fan.2   bound to the fan-out exchange `fan`
    tx.1 tx.2   written to in transactions                big           large messages
    devices     what MQTT clients publish          later   bound to the delayed exchange `delays`
    links       of the AMQP 1.0 clients; the consumer of AMQP 0-9-1 leaves it to them
    log         a stream queue                            marks         proves that acks before it were written
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pika
import pika.exceptions
from tests.interop.amqp091.raw import declare, raw_client
from tests.interop.server import Broker
from tests.soak.clients import Client, Round
from tests.soak.ledger import CANCELLED, CONFIRMED, REJECTED, SETTLED, SETTLING, TRIED, Found, Label

from basaltmq.http_client import path

DEVICES = "devices"
LATER = "later"
LINKS = "links"
QUEUES = ("work", "fan.1", "fan.2", "tx.1", "tx.2", "big", DEVICES, LATER)
"""Queues of the AMQP 0-9-1 consumer."""

DELAYS = "delays"
DELAY_MS_MAX = 4000
EARLY_MS = 100
"""Maximum clock difference of two processes on one machine."""

DUE = "due-ms"
"""Header with the time at which a delayed message is due."""

STREAM = "log"
DEAD = "dead"
MARKS = "marks"
PERSISTENT = pika.BasicProperties(delivery_mode=2)
TIMEOUT_S = 30.0
PREFETCH = 50
ACKS_PER_MARK = 20
"""An ack is durable when a later publish of the same channel is confirmed."""

QUIET_S = 10.0
"""A queue without a delivery for this time is drained."""

LARGE_BYTES = 100_000
HUGE_BYTES = 10_000_000
PIPELINED = 200


def connect(broker: Broker, vhost: str) -> Any:
    parameters = pika.URLParameters(broker.url("amqp", vhost=quote(vhost, safe="")))
    parameters.socket_timeout = TIMEOUT_S
    parameters.blocked_connection_timeout = TIMEOUT_S
    parameters.heartbeat = 60
    return pika.BlockingConnection(parameters)


@contextlib.contextmanager
def connected(broker: Broker, vhost: str) -> Iterator[Any]:
    connection = connect(broker, vhost)
    try:
        yield connection
    finally:
        with contextlib.suppress(Exception):
            connection.close()


def permit(broker: Broker, vhost: str) -> None:
    """Grant the user of all clients all permissions in a virtual host."""
    rights = {"configure": ".*", "write": ".*", "read": ".*"}
    broker.call("PUT", path("permissions", vhost, "guest"), rights)


def declare_all(channel: Any) -> None:
    for declare_one in DECLARATIONS:
        declare_one(channel)


def _queue(name: str, **arguments: str | int) -> Callable[[Any], None]:
    def declare_one(channel: Any) -> None:
        given = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        channel.queue_declare(name, durable=True, arguments=given)

    return declare_one


def _fan(name: str) -> Callable[[Any], None]:
    def declare_one(channel: Any) -> None:
        channel.exchange_declare("fan", "fanout", durable=True)
        channel.queue_declare(name, durable=True)
        channel.queue_bind(name, "fan")

    return declare_one


def _later(channel: Any) -> None:
    channel.exchange_declare(DELAYS, "x-delayed-message", durable=True, arguments={"x-delayed-type": "fanout"})
    channel.queue_declare(LATER, durable=True)
    channel.queue_bind(LATER, DELAYS)


def _devices(channel: Any) -> None:
    channel.queue_declare(DEVICES, durable=True)
    channel.queue_bind(DEVICES, "amq.topic", "soak.#")


DECLARATIONS: tuple[Callable[[Any], None], ...] = (
    _queue(DEAD),
    _queue(MARKS, max_length=1),
    _queue("work", dead_letter_exchange="", dead_letter_routing_key=DEAD),
    *(_fan(name) for name in QUEUES if name.startswith("fan.")),
    *(_queue(name) for name in ("tx.1", "tx.2", "big")),
    _devices,
    _later,
    _queue(LINKS),
    _queue(STREAM, queue_type="stream"),
)
"""Return the topology in parts, each of which may fail alone."""


class _Amqp(Client):
    expected = (OSError, pika.exceptions.AMQPError, EOFError)

    def __init__(self, turn: Round, name: str, vhost: str) -> None:
        super().__init__(turn, f"amqp-{name}-{vhost}")
        self.vhost = vhost
        self.producer = f"p-{name}-{vhost}".replace(" ", "")

    def place(self, queue: str) -> str:
        return f"{self.vhost}|{queue}"


class Publisher(_Amqp):
    """Publishes with confirms, in transactions, and in floods."""

    def session(self) -> None:
        with connected(self.broker, self.vhost) as connection:
            confirming = connection.channel()
            declare_all(confirming)
            confirming.confirm_delivery()
            transacted = connection.channel()
            transacted.tx_select()
            while self.turn.pause(self.random.choice((0.0, 0.005, 0.02))):
                chance = self.random.random()
                if chance < 0.65:
                    self._one(confirming)
                elif chance < 0.80:
                    self._delayed(confirming)
                elif chance < 0.93:
                    self._transaction(transacted)
                elif chance < 0.97:
                    self._flood(confirming, transacted)
                else:
                    self._declares()

    def _one(self, channel: Any) -> None:
        exchange, key, queues = self.random.choice(
            [("", "work", ("work",)), ("fan", "", ("fan.1", "fan.2")), ("", STREAM, (STREAM,))]
        )
        size = self.random.choice((0, 300, 6000, 50_000)) if exchange or key != STREAM else 200
        self._publish(channel, exchange, key, queues, size)

    def _delayed(self, channel: Any) -> None:
        delay_ms = self.random.randrange(DELAY_MS_MAX)
        headers = {"x-delay": delay_ms, DUE: int(time.time() * 1000) + delay_ms}
        self._publish(channel, DELAYS, "", (LATER,), self.random.choice((0, 300, 6000)), headers)

    def _publish(
        self,
        channel: Any,
        exchange: str,
        key: str,
        queues: tuple[str, ...],
        size: int,
        headers: dict[str, int] | None = None,
    ) -> None:
        places = [self.place(queue) for queue in queues]
        (label,) = self.ledger.next_label(self.producer)
        self.ledger.mark(places, (label,), TRIED)
        channel.basic_publish(exchange, key, label.body(size), pika.BasicProperties(delivery_mode=2, headers=headers))
        self.ledger.mark(places, (label,), CONFIRMED)

    def _transaction(self, channel: Any, count: int = 0, size: int = 100) -> None:
        labels = self.ledger.next_label(self.producer + "-tx", count or self.random.randrange(1, 12))
        places = [self.place("tx.1"), self.place("tx.2")]
        self.ledger.mark(places, labels, TRIED)
        is_kept = self.random.random() < 0.8
        group = [Found(place, label) for label in labels for place in places]
        if is_kept:
            self.ledger.groups.append(group)
        else:
            self.ledger.mark(places, labels, CANCELLED)
        for label in labels:
            for queue in ("tx.1", "tx.2"):
                channel.basic_publish("", queue, label.body(size), PERSISTENT)
        if is_kept:
            channel.tx_commit()
            self.ledger.mark(places, labels, CONFIRMED)
            self.ledger.groups.remove(group)
        else:
            channel.tx_rollback()

    def _flood(self, confirming: Any, transacted: Any) -> None:
        kind = self.random.randrange(3)
        if kind == 0:
            self._transaction(transacted, 500, 64)
        elif kind == 1:
            for _ in range(20):
                self._publish(confirming, "", "big", ("big",), LARGE_BYTES)
        else:
            self._publish(confirming, "", "big", ("big",), HUGE_BYTES)

    def _declares(self) -> None:
        """Pipeline many declares. Only the default virtual host has a raw client."""
        if self.vhost != "/":
            return
        with raw_client(self.broker.port("amqp")) as client:
            client.open()
            for at in range(PIPELINED):
                client.send(declare(f"pipelined-{at % 50}", exclusive=False))
            for _ in range(PIPELINED):
                client.method()


class Consumer(_Amqp):
    """Consumes every queue: acks most messages, requeues some, dead-letters some of `work`."""

    def __init__(self, turn: Round, name: str, vhost: str) -> None:
        super().__init__(turn, name, vhost)
        self._acked: list[tuple[str, Label]] = []

    def session(self) -> None:
        self._acked = []
        with connected(self.broker, self.vhost) as connection:
            channel = connection.channel()
            declare_all(channel)
            channel.confirm_delivery()
            channel.basic_qos(prefetch_count=PREFETCH)
            for queue in (*QUEUES, DEAD):
                channel.basic_consume(queue, self._taker(queue))
            while not self.turn.stopping.is_set():
                connection.process_data_events(time_limit=0.1)
                if len(self._acked) >= ACKS_PER_MARK:
                    acked, self._acked = self._acked, []
                    channel.basic_publish("", MARKS, b"mark", PERSISTENT)
                    for place, label in acked:
                        self.ledger.mark((place,), (label,), SETTLED)

    def _taker(self, queue: str) -> Any:
        def take(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            label = Label.of(body)
            place = self.place(origin_of(queue, properties))
            self.ledger.seen(place, label, self.name)
            early_ms = (properties.headers or {}).get(DUE, 0) - time.time() * 1000
            if early_ms > EARLY_MS:
                self.ledger.problem(f"{self.name}: {label} of {place} came {early_ms:.0f} ms early")
            chance = self.random.random()
            if queue == "work" and chance < 0.1:
                self.ledger.mark((place,), (label,), REJECTED)
                channel.basic_reject(method.delivery_tag, requeue=False)
            elif chance < 0.2:
                channel.basic_reject(method.delivery_tag, requeue=True)
            else:
                self.ledger.mark((place,), (label,), SETTLING)
                channel.basic_ack(method.delivery_tag)
                self._acked.append((place, label))

        return take


def origin_of(queue: str, properties: Any) -> str:
    """Return the queue to which a message was published; for a dead letter, from its headers."""
    return str((properties.headers or {}).get("x-first-death-queue", queue)) if queue == DEAD else queue


def drain(broker: Broker, vhost: str, queue: str, timeout_s: float) -> list[tuple[str, Label]]:
    """Drain a queue with one consumer. Return (place, label) in order."""
    _wait_for_delays(broker, vhost, queue)
    return [
        (f"{vhost}|{origin_of(queue, properties)}", Label.of(body))
        for properties, body in _consumed(broker, vhost, queue, {}, timeout_s)
    ]


def _wait_for_delays(broker: Broker, vhost: str, queue: str) -> None:
    """Wait until delayed messages are ready."""
    until_s = time.monotonic() + DELAY_MS_MAX / 1000 + QUIET_S
    while broker.call("GET", path("queues", vhost, queue))["messages_delayed"]:
        assert time.monotonic() < until_s, f"{vhost}|{queue}: delayed messages do not become ready"
        time.sleep(0.2)


def read_stream(broker: Broker, vhost: str, timeout_s: float) -> list[tuple[int, Label]]:
    """Read the stream queue. Return (offset, label)."""
    return [
        (properties.headers["x-stream-offset"], Label.of(body))
        for properties, body in _consumed(broker, vhost, STREAM, {"x-stream-offset": "first"}, timeout_s)
    ]


def _consumed(
    broker: Broker, vhost: str, queue: str, arguments: dict[str, str], timeout_s: float
) -> Iterator[tuple[Any, bytes]]:
    """Return properties and body of all messages. Ends early without a delivery."""
    until_s = time.monotonic() + timeout_s
    with connected(broker, vhost) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=500)
        left = channel.queue_declare(queue, durable=True, passive=True).method.message_count
        if not left:
            return
        for method, properties, body in channel.consume(queue, arguments=arguments, inactivity_timeout=QUIET_S):
            assert time.monotonic() < until_s, f"{vhost}|{queue} still has {left} messages after {timeout_s:.0f} s"
            if method is None:
                break
            yield properties, body
            channel.basic_ack(method.delivery_tag)
            left -= 1
            if not left:
                break
        channel.cancel()
