"""Common features of RabbitMQ, used with pika against a real server process."""

from __future__ import annotations

import threading
from typing import Any

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, UnroutableError
from tests.interop.amqp091.conftest import connect
from tests.interop.server import Broker

PERSISTENT = pika.BasicProperties(delivery_mode=2)
WAIT_S = 60


def take(channel: Any, queue: str, count: int, **consume: Any) -> list[tuple[Any, Any, bytes]]:
    """Consume exactly `count` messages, unacknowledged unless auto_ack."""
    found: list[tuple[Any, Any, bytes]] = []
    if count == 0:
        return found
    for method, properties, body in channel.consume(queue, inactivity_timeout=WAIT_S, **consume):
        assert method is not None, f"{len(found)} of {count} messages came"
        found.append((method, properties, body))
        if len(found) == count:
            return found
    raise AssertionError("the consumer was cancelled")


def refused(call: Any) -> int:
    """Return the code with which the channel was closed."""
    with pytest.raises(ChannelClosedByBroker) as caught:
        call()
    code: int = caught.value.reply_code
    return code


def test_messages_arrive_in_order_with_their_properties(channel: Any, name: str) -> None:
    channel.queue_declare(name, durable=True)
    channel.confirm_delivery()
    properties = pika.BasicProperties(
        content_type="text/plain",
        content_encoding="utf-8",
        headers={"n": 5, "big": 1 << 40, "t": True, "text": "ü", "none": None, "in": {"a": [1, "b"]}, "neg": -7},
        delivery_mode=2,
        priority=3,
        correlation_id="c",
        reply_to="r",
        expiration="60000",
        message_id="m",
        timestamp=1_700_000_000,
        type="t",
        user_id="guest",
        app_id="a",
    )
    for index in range(50):
        channel.basic_publish("", name, b"%d" % index, properties)
    found = take(channel, name, 50)
    assert [body for _, _, body in found] == [b"%d" % index for index in range(50)]
    got = found[0][1]
    for field in ("content_type", "headers", "delivery_mode", "priority", "correlation_id", "reply_to", "expiration"):
        assert getattr(got, field) == getattr(properties, field)
    for field in ("message_id", "timestamp", "type", "user_id", "app_id", "content_encoding"):
        assert getattr(got, field) == getattr(properties, field)
    assert [method.delivery_tag for method, _, _ in found] == list(range(1, 51))
    assert not found[0][0].redelivered


@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, 300_000, 5_000_000])
def test_bodies_of_every_size_round_trip(channel: Any, name: str, size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    channel.queue_declare(name, exclusive=True)
    channel.basic_publish("", name, body[:size])
    ((_, _, got),) = take(channel, name, 1, auto_ack=True)
    assert got == body[:size]


def test_a_message_over_the_limit_closes_only_the_channel(connection: Any, name: str) -> None:
    channel = connection.channel()
    channel.queue_declare(name, exclusive=True)

    def publish() -> None:
        channel.basic_publish("", name, b"x" * (17 << 20))
        channel.queue_declare(name, passive=True)

    assert refused(publish) == 406
    assert connection.channel().queue_declare(name, passive=True).method.message_count == 0


@pytest.mark.parametrize(
    ("kind", "binding", "key", "reaches"),
    [
        ("direct", "a", "a", True),
        ("direct", "a", "b", False),
        ("fanout", "", "whatever", True),
        ("topic", "a.*.c", "a.b.c", True),
        ("topic", "a.#", "a", True),
        ("topic", "a.*", "a.b.c", False),
    ],
)
def test_every_exchange_type_routes(channel: Any, name: str, kind: str, binding: str, key: str, reaches: bool) -> None:
    channel.exchange_declare(name, kind, auto_delete=True)
    channel.queue_declare(name, exclusive=True)
    channel.queue_bind(name, name, binding)
    channel.basic_publish(name, key, b"x")
    assert channel.queue_declare(name, passive=True).method.message_count == int(reaches)
    channel.queue_unbind(name, name, binding)


def test_headers_exchanges_and_exchange_to_exchange_bindings(channel: Any, name: str) -> None:
    channel.exchange_declare(name, "headers")
    channel.exchange_declare(name + "-next", "fanout")
    channel.queue_declare(name, exclusive=True)
    channel.exchange_bind(name + "-next", name, "", {"x-match": "all", "a": 1, "b": "two"})
    channel.queue_bind(name, name + "-next")
    channel.basic_publish(name, "", b"no", pika.BasicProperties(headers={"a": 1}))
    channel.basic_publish(name, "", b"yes", pika.BasicProperties(headers={"a": 1, "b": "two", "c": 3}))
    ((_, _, body),) = take(channel, name, 1, auto_ack=True)
    assert body == b"yes"
    channel.cancel()
    channel.exchange_unbind(name + "-next", name, "", {"x-match": "all", "a": 1, "b": "two"})
    channel.exchange_delete(name)
    channel.exchange_delete(name + "-next")
    channel.exchange_delete("no such exchange")


@pytest.mark.spec("E6")
def test_a_mandatory_message_without_a_route_is_returned_before_its_confirm(channel: Any, name: str) -> None:
    channel.confirm_delivery()
    with pytest.raises(UnroutableError) as caught:
        channel.basic_publish("", name, b"lost", mandatory=True)
    (returned,) = caught.value.messages
    assert (returned.method.reply_code, returned.method.routing_key, returned.body) == (312, name, b"lost")
    channel.basic_publish("", name, b"dropped")


@pytest.mark.spec("E8")
def test_prefetch_of_a_consumer_limits_unacknowledged_messages(connection: Any, name: str) -> None:
    channel = connection.channel()
    channel.queue_declare(name, exclusive=True)
    for index in range(10):
        channel.basic_publish("", name, b"%d" % index)
    channel.basic_qos(prefetch_count=3)
    got: list[tuple[int, bytes]] = []
    channel.basic_consume(name, lambda _c, method, _p, body: got.append((method.delivery_tag, body)))
    state = connection.channel()

    def ready() -> int:
        count: int = state.queue_declare(name, passive=True).method.message_count
        return count

    while len(got) < 3:
        connection.process_data_events(time_limit=WAIT_S)
    assert ready() == 7
    assert len(got) == 3
    channel.basic_ack(2, multiple=True)
    while len(got) < 5:
        connection.process_data_events(time_limit=WAIT_S)
    assert ready() == 5
    assert [body for _, body in got] == [b"%d" % index for index in range(5)]


@pytest.mark.spec("E8")
def test_a_prefetch_for_the_channel_is_shared_by_its_consumers(connection: Any, name: str) -> None:
    channel = connection.channel()
    channel.basic_qos(prefetch_count=4, global_qos=True)
    got: list[int] = []
    for queue in (name, name + "-2"):
        channel.queue_declare(queue, exclusive=True)
        for _ in range(5):
            channel.basic_publish("", queue, b"x")
        channel.basic_consume(queue, lambda _c, method, _p, _b: got.append(method.delivery_tag))
        channel.basic_consume(queue, lambda _c, method, _p, _b: got.append(method.delivery_tag))
    state = connection.channel()
    while len(got) < 4:
        connection.process_data_events(time_limit=WAIT_S)
    state.queue_declare(name, passive=True)
    assert len(got) == 4
    seen = 0
    while seen < 10:
        channel.basic_ack(got[seen])
        seen += 1
        if seen < 10:
            while len(got) < min(10, seen + 4):
                connection.process_data_events(time_limit=WAIT_S)
        assert len(got) <= seen + 4
    assert sorted(got) == list(range(1, 11))


def test_rejected_messages_return_to_their_position_as_redelivered(channel: Any, name: str) -> None:
    channel.queue_declare(name, exclusive=True)
    for body in (b"a", b"b", b"c"):
        channel.basic_publish("", name, body)
    tags = [channel.basic_get(name)[0].delivery_tag for _ in range(3)]
    channel.basic_reject(tags[1], requeue=True)
    channel.basic_nack(tags[0], requeue=True)
    channel.basic_ack(tags[2])
    found = take(channel, name, 2)
    assert [(method.redelivered, body) for method, _, body in found] == [(True, b"a"), (True, b"b")]


def test_recover_and_channel_close_requeue_unsettled_messages(connection: Any, name: str) -> None:
    channel = connection.channel()
    channel.queue_declare(name, exclusive=True)
    for body in (b"a", b"b"):
        channel.basic_publish("", name, body)
    assert channel.basic_get(name)[2] == b"a"
    channel.basic_recover(requeue=True)
    method, _, body = channel.basic_get(name)
    assert (method.redelivered, body) == (True, b"a")
    assert method.message_count == 1
    channel.close()
    other = connection.channel()
    assert [other.basic_get(name, auto_ack=True)[2] for _ in range(2)] == [b"a", b"b"]
    assert other.basic_get(name) == (None, None, None)


@pytest.mark.spec("E7")
def test_dead_letters_carry_their_history(channel: Any, name: str) -> None:
    channel.queue_declare(name + "-dead", exclusive=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name + "-dead"}
    channel.queue_declare(name, exclusive=True, arguments=arguments)
    channel.basic_publish("", name, b"poison", pika.BasicProperties(headers={"mine": 1}))
    method, _, _ = channel.basic_get(name)
    channel.basic_nack(method.delivery_tag, requeue=False)
    ((_, properties, body),) = take(channel, name + "-dead", 1, auto_ack=True)
    assert body == b"poison"
    (death,) = properties.headers["x-death"]
    assert (death["queue"], death["reason"], death["count"], death["routing-keys"]) == (name, "rejected", 1, [name])
    assert properties.headers["mine"] == 1


@pytest.mark.spec("E8")
def test_a_consumer_is_notified_when_its_queue_is_deleted(connection: Any, name: str) -> None:
    channel = connection.channel()
    channel.queue_declare(name)
    reported: list[Any] = []
    channel.add_on_cancel_callback(reported.append)
    channel.basic_consume(name, lambda *_: None, consumer_tag="mine")
    connection.channel().queue_delete(name)
    while not reported:
        connection.process_data_events(time_limit=WAIT_S)
    assert reported[0].method.consumer_tag == "mine"


def test_codes_clients_branch_on(broker: Broker, connection: Any, name: str) -> None:
    other = connect(broker)
    try:
        owner = other.channel()
        owner.queue_declare(name, exclusive=True)
        fresh = connection.channel
        assert refused(lambda: fresh().queue_declare(name + "?", passive=True)) == 404
        assert refused(lambda: fresh().exchange_declare("?" + name, passive=True)) == 404
        assert refused(lambda: fresh().basic_consume("no such " + name, lambda *_: None)) == 404
        assert refused(lambda: fresh().queue_bind(name + "?", "amq.direct", "k")) == 404
        assert refused(lambda: fresh().queue_declare(name, passive=True)) == 405
        assert refused(lambda: fresh().queue_declare("amq.mine")) == 403
        assert refused(lambda: fresh().exchange_declare("amq.mine", "direct")) == 403
        assert refused(lambda: fresh().exchange_delete("amq.direct")) == 403
        assert refused(lambda: fresh().exchange_declare("amq.direct", "fanout", durable=True)) == 406
        assert refused(lambda: owner.queue_declare(name, durable=True, exclusive=True)) == 406
        channel = fresh()
        channel.basic_ack(99)
        assert refused(lambda: channel.queue_declare("", exclusive=True)) == 406
        channel = fresh()
        channel.basic_publish("no such exchange", "k", b"x")
        assert refused(lambda: channel.queue_declare("", exclusive=True)) == 404
        # A publish to an exclusive queue of another connection is allowed, and the connection is still open.
        assert connection.is_open
    finally:
        other.close()


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        (pika.BasicProperties(user_id="somebody"), "user_id"),
        (pika.BasicProperties(expiration="soon"), "expiration"),
        (pika.BasicProperties(expiration="-1"), "expiration"),
    ],
)
def test_invalid_properties_close_the_channel(connection: Any, name: str, properties: Any, said: str) -> None:
    channel = connection.channel()
    channel.basic_publish("", name, b"x", properties)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare("", exclusive=True)
    assert caught.value.reply_code == 406
    assert said in caught.value.reply_text


def test_a_duplicate_consumer_tag_closes_the_connection(connection: Any, name: str) -> None:
    channel = connection.channel()
    channel.queue_declare(name, exclusive=True)
    channel.basic_consume(name, lambda *_: None, consumer_tag="same")
    frame = pika.spec.Basic.Consume(queue=name, consumer_tag="same")
    channel._impl._send_method(frame)
    with pytest.raises(ConnectionClosedByBroker) as caught:
        connection.process_data_events(time_limit=WAIT_S)
    assert caught.value.reply_code == 530


@pytest.mark.spec("E8")
def test_an_exclusive_consumer_is_alone(connection: Any, name: str) -> None:
    channel = connection.channel()
    channel.queue_declare(name, exclusive=True)
    channel.basic_consume(name, lambda *_: None, exclusive=True)
    assert refused(lambda: connection.channel().basic_consume(name, lambda *_: None)) == 403


def test_queue_names_are_generated_and_the_last_one_is_the_default(channel: Any) -> None:
    queue = channel.queue_declare("", exclusive=True).method.queue
    assert queue.startswith("amq.gen-")
    channel.basic_publish("", queue, b"x")
    assert channel.basic_get("")[2] == b"x"
    assert channel.queue_declare(queue, exclusive=True).method.queue == queue
    channel.basic_publish("", queue, b"y")
    assert channel.queue_purge(queue).method.message_count == 1
    assert channel.queue_delete(queue).method.message_count == 0
    assert channel.queue_delete(queue).method.message_count == 0


def test_direct_reply_to(broker: Broker, connection: Any, name: str) -> None:
    server = connect(broker)
    try:
        service = server.channel()
        service.queue_declare(name)
        asking = connection.channel()
        answers: list[tuple[str, bytes]] = []
        asking.basic_consume(
            "amq.rabbitmq.reply-to",
            lambda _c, _m, props, body: answers.append((props.correlation_id, body)),
            auto_ack=True,
        )
        asking.basic_publish(
            "", name, b"question", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to", correlation_id="7")
        )
        ((_, properties, body),) = take(service, name, 1, auto_ack=True)
        assert body == b"question"
        assert properties.reply_to.startswith("amq.rabbitmq.reply-to.")
        assert service.queue_declare(properties.reply_to, passive=True).method.queue == properties.reply_to
        service.confirm_delivery()
        service.basic_publish(
            "",
            properties.reply_to,
            b"answer",
            pika.BasicProperties(correlation_id=properties.correlation_id),
            mandatory=True,
        )
        while not answers:
            connection.process_data_events(time_limit=WAIT_S)
        assert answers == [("7", b"answer")]
        asking.close()
        with pytest.raises(UnroutableError):
            service.basic_publish("", properties.reply_to, b"late", mandatory=True)
        service.queue_delete(name)
    finally:
        server.close()


def test_publishing_for_direct_replies_without_a_consumer_is_refused(connection: Any, name: str) -> None:
    channel = connection.channel()
    channel.basic_publish("", name, b"x", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"))
    assert refused(lambda: channel.queue_declare("", exclusive=True)) == 406
    channel = connection.channel()
    assert refused(lambda: channel.basic_consume("amq.rabbitmq.reply-to", lambda *_: None)) == 406


@pytest.mark.promise("P2")
def test_transactions_commit_and_roll_back(connection: Any, name: str) -> None:
    channel, watcher = connection.channel(), connection.channel()
    channel.queue_declare(name, durable=True)

    def count() -> int:
        found: int = watcher.queue_declare(name, passive=True).method.message_count
        return found

    channel.tx_select()
    for index in range(5):
        channel.basic_publish("", name, b"%d" % index, PERSISTENT)
    assert count() == 0
    channel.tx_commit()
    assert count() == 5
    channel.basic_publish("", name, b"undone", PERSISTENT)
    tags = [channel.basic_get(name)[0].delivery_tag for _ in range(3)]
    channel.basic_ack(tags[-1], multiple=True)
    channel.tx_rollback()
    assert count() == 2
    channel.basic_ack(tags[0])
    channel.tx_commit()
    channel.close()
    # The first was acknowledged in a commit. The two others were not, so they are ready again.
    assert [watcher.basic_get(name, auto_ack=True)[2] for _ in range(4)] == [b"1", b"2", b"3", b"4"]
    watcher.queue_delete(name)


def test_confirm_and_transaction_modes_are_exclusive(connection: Any) -> None:
    channel = connection.channel()
    channel.tx_select()
    assert refused(channel.confirm_delivery) == 406
    channel = connection.channel()
    channel.confirm_delivery()
    assert refused(channel.tx_select) == 406
    assert refused(connection.channel().tx_commit) == 406


def test_invalid_logins_are_refused(broker: Broker) -> None:
    with pytest.raises(pika.exceptions.ProbableAuthenticationError, match="ACCESS_REFUSED"):
        connect(broker, credentials=pika.PlainCredentials("guest", "wrong"))
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="530"):
        connect(broker, virtual_host="no such vhost")


def test_a_secret_can_be_renewed(broker: Broker) -> None:
    connection = connect(broker)
    connection.update_secret("guest", "a fresh token")
    assert connection.is_open
    with pytest.raises(ConnectionClosedByBroker) as caught:
        connection.update_secret("wrong", "a stale token")
    assert caught.value.reply_code == 403


def test_limits_are_negotiated(broker: Broker) -> None:
    connection = connect(broker, frame_max=4096, channel_max=3, heartbeat=30)
    assert (connection._impl.params.frame_max, connection._impl.params.channel_max) == (4096, 3)
    channel = connection.channel()
    channel.queue_declare("", exclusive=True)
    channel.basic_publish("", channel.queue_declare("small", exclusive=True).method.queue, b"x" * 20_000)
    assert len(channel.basic_get("small")[2]) == 20_000
    connection.close()


@pytest.mark.spec("E8")
def test_messages_are_distributed_round_robin_and_by_consumer_priority(connection: Any, name: str) -> None:
    publisher = connection.channel()
    publisher.queue_declare(name, exclusive=True)
    got: dict[str, int] = {"low": 0, "a": 0, "b": 0}

    def count(tag: str) -> Any:
        def on_message(channel: Any, method: Any, _properties: Any, _body: bytes) -> None:
            got[tag] += 1
            channel.basic_ack(method.delivery_tag)

        return on_message

    for tag, priority in (("low", 0), ("a", 5), ("b", 5)):
        channel = connection.channel()
        channel.basic_qos(prefetch_count=100)
        channel.basic_consume(name, count(tag), arguments={"x-priority": priority})
    for _ in range(40):
        publisher.basic_publish("", name, b"x")
    while sum(got.values()) < 40:
        connection.process_data_events(time_limit=WAIT_S)
    assert got == {"low": 0, "a": 20, "b": 20}


@pytest.mark.promise("P8")
def test_a_client_that_does_not_read_gets_a_bounded_amount_of_messages(
    broker: Broker, connection: Any, name: str
) -> None:
    """Its consumer is paused. Other clients are served, and it gets everything once it reads."""
    channel = connection.channel()
    channel.queue_declare(name, durable=True)
    body = b"x" * 100_000
    for _ in range(300):
        channel.basic_publish("", name, body, PERSISTENT)
    assert channel.queue_declare(name, passive=True).method.message_count == 300
    slow = connect(broker)
    try:
        reading = slow.channel()
        got: list[int] = []
        reading.basic_consume(name, lambda _c, _m, _p, each: got.append(len(each)), auto_ack=True)
        ready = threading.Event()
        left = -1
        for _ in range(200):
            count = channel.queue_declare(name, passive=True).method.message_count
            if count == left:
                break
            left = count
            ready.wait(0.05)
        # 1 MiB waits in the server, some more in the sockets between; the rest stays in the queue.
        assert left > 150, f"{300 - left} messages were taken for a client that does not read"
        while len(got) < 300:
            slow.process_data_events(time_limit=WAIT_S)
        assert set(got) == {100_000}
    finally:
        slow.close()
        channel.queue_delete(name)
