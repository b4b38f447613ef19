"""Qpid Proton's Python client: senders, receivers, outcomes, and messages of and for other protocols."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pika
import pytest
from proton import ConnectionException, Delivery, Described, Message, symbol
from proton.reactor import AtMostOnce, DynamicNodeProperties, Filter
from proton.utils import BlockingConnection, LinkDetached, SendException
from tests.interop.mqtt.device import V5, Device
from tests.interop.server import Broker

WAIT_S = 30.0


@pytest.fixture
def channel(broker: Broker) -> Iterator[Any]:
    connection = pika.BlockingConnection(pika.URLParameters(broker.url()))
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    connection.close()


@pytest.fixture
def client(broker: Broker) -> Iterator[BlockingConnection]:
    connection = connect(broker)
    yield connection
    connection.close()


def connect(broker: Broker, **options: Any) -> BlockingConnection:
    login = {"user": "guest", "password": "guest", "allowed_mechs": "PLAIN", "timeout": WAIT_S, **options}
    return BlockingConnection(f"127.0.0.1:{broker.port('amqp')}", **login)


def texts(receiver: Any, count: int) -> list[str]:
    found = []
    for _ in range(count):
        # The body is a view into the message, which must live as long.
        message = receiver.receive(timeout=WAIT_S)
        found.append(bytes(message.body).decode())
        receiver.accept()
    return found


@pytest.mark.spec("G2")
def test_messages_go_to_a_queue_and_back_in_order(client: BlockingConnection, channel: Any) -> None:
    channel.queue_declare("p-order", durable=True)
    sender = client.create_sender("/queues/p-order")
    for number in range(50):
        delivery = sender.send(Message(body=b"m%d" % number, inferred=True, durable=True))
        assert delivery.remote_state == Delivery.ACCEPTED
    receiver = client.create_receiver("p-order", credit=10)
    assert texts(receiver, 50) == [f"m{number}" for number in range(50)]
    receiver.close()
    assert channel.queue_declare("p-order", passive=True).method.message_count == 0


@pytest.mark.spec("G2")
def test_outcomes_release_reject_and_modify(client: BlockingConnection, channel: Any) -> None:
    channel.queue_declare("p-dead", durable=True)
    channel.queue_declare(
        "p-outcomes", durable=True, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "p-dead"}
    )
    client.create_sender("/queues/p-outcomes").send(Message(body=b"a", inferred=True, subject="kept"))
    receiver = client.create_receiver("/queues/p-outcomes", credit=1)
    first = receiver.receive(timeout=WAIT_S)
    assert (first.first_acquirer, first.delivery_count) == (True, 0)
    receiver.release(delivered=False)
    again = receiver.receive(timeout=WAIT_S)
    assert again.first_acquirer is False
    receiver.release(delivered=True)
    assert receiver.receive(timeout=WAIT_S).delivery_count >= 1
    receiver.reject()
    dead = client.create_receiver("/queues/p-dead", credit=1).receive(timeout=WAIT_S)
    assert (bytes(dead.body), dead.subject) == (b"a", "kept")
    assert dead.annotations["x-death"][0]["queue"] == "p-outcomes"


@pytest.mark.spec("G2")
def test_a_publisher_learns_what_happened(client: BlockingConnection, channel: Any) -> None:
    channel.queue_declare("p-full", durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    full = client.create_sender("/queues/p-full")
    full.send(Message(body=b"1", inferred=True))
    with pytest.raises(SendException) as rejected:
        full.send(Message(body=b"2", inferred=True))
    assert rejected.value.state == Delivery.REJECTED
    with pytest.raises(SendException) as released:
        client.create_sender("/exchanges/amq.direct/nobody").send(Message(body=b"3", inferred=True))
    assert released.value.state == Delivery.RELEASED
    with pytest.raises(LinkDetached, match="amqp:not-found"):
        client.create_sender("/queues/p-missing")
    with pytest.raises(LinkDetached, match="amqp:invalid-field"):
        client.create_receiver("/queues/a/b")


@pytest.mark.spec("G2")
def test_an_anonymous_sender_names_the_address_in_each_message(client: BlockingConnection, channel: Any) -> None:
    channel.queue_declare("p a/b", durable=True)
    channel.queue_declare("p-topic", durable=True)
    channel.queue_bind("p-topic", "amq.topic", "x.#")
    sender = client.create_sender(None)
    sender.send(Message(address="/queues/p%20a%2Fb", body=b"1", inferred=True))
    sender.send(Message(address="/exchanges/amq.topic/x.y", body=b"2", inferred=True))
    sender.send(Message(address="amq.topic/x.z", body=b"3", inferred=True))
    with pytest.raises(SendException) as refused:
        sender.send(Message(address="/queues/p-missing", body=b"4", inferred=True))
    assert refused.value.state == Delivery.REJECTED
    assert texts(client.create_receiver("/queues/p%20a%2Fb"), 1) == ["1"]
    assert texts(client.create_receiver("p-topic"), 2) == ["2", "3"]


@pytest.mark.spec("G2")
def test_the_subject_routes_in_an_exchange_and_an_exchange_is_a_source(client: BlockingConnection) -> None:
    receiver = client.create_receiver("/exchanges/amq.direct/red", credit=5)
    sender = client.create_sender("amq.direct")
    sender.send(Message(subject="red", body=b"1", inferred=True))
    with pytest.raises(SendException):
        sender.send(Message(subject="blue", body=b"2", inferred=True))
    assert texts(receiver, 1) == ["1"]


@pytest.mark.spec("G2")
def test_a_dynamic_node_lives_as_long_as_its_link(broker: Broker, client: BlockingConnection) -> None:
    receiver = client.create_receiver(None, dynamic=True, options=DynamicNodeProperties({}))
    address = receiver.link.remote_source.address
    client.create_sender(address).send(Message(body=b"reply", inferred=True))
    assert texts(receiver, 1) == ["reply"]
    receiver.close()
    with pytest.raises(LinkDetached, match="amqp:not-found"):
        client.create_sender(address, name="late")


@pytest.mark.spec("G2")
def test_a_large_message_takes_many_frames(client: BlockingConnection, channel: Any) -> None:
    channel.queue_declare("p-large", durable=True)
    body = bytes(range(256)) * 8192
    client.create_sender("p-large").send(Message(body=body, inferred=True, durable=True))
    message = client.create_receiver("p-large", credit=1).receive(timeout=WAIT_S)
    assert bytes(message.body) == body


@pytest.mark.spec("G2")
def test_settled_deliveries_are_gone_at_once(client: BlockingConnection, channel: Any) -> None:
    channel.queue_declare("p-settled", durable=True)
    sender = client.create_sender("p-settled", options=AtMostOnce())
    for number in range(5):
        sender.send(Message(body=b"%d" % number, inferred=True))
    receiver = client.create_receiver("p-settled", credit=5, options=AtMostOnce())
    messages = [receiver.receive(timeout=WAIT_S) for _ in range(5)]
    assert [bytes(each.body) for each in messages] == [b"0", b"1", b"2", b"3", b"4"]
    receiver.close()
    assert channel.queue_declare("p-settled", passive=True).method.message_count == 0


@pytest.mark.spec("G2")
def test_unsettled_deliveries_return_when_the_link_ends(broker: Broker, channel: Any) -> None:
    channel.queue_declare("p-return", durable=True)
    for number in range(4):
        channel.basic_publish("", "p-return", b"%d" % number)
    other = connect(broker)
    receiver = other.create_receiver("p-return", credit=4)
    for _ in range(4):
        receiver.receive(timeout=WAIT_S)
    receiver.accept()  # the first one
    other.close()
    again = connect(broker)
    assert texts(again.create_receiver("p-return", credit=4), 3) == ["1", "2", "3"]
    again.close()


@pytest.mark.spec("G2")
def test_amqp_091_and_10_read_each_other(client: BlockingConnection, channel: Any) -> None:
    channel.queue_declare("p-doors", durable=True)
    client.create_sender("p-doors").send(
        Message(
            body=b"from 1.0",
            inferred=True,
            id="id-1",
            content_type="text/plain",
            properties={"n": 5},
            annotations={symbol("x-basic-type"): "kind"},
        )
    )
    _, properties, body = channel.basic_get("p-doors", auto_ack=True)
    assert (body, properties.message_id, properties.content_type) == (b"from 1.0", "id-1", "text/plain")
    assert (properties.type, properties.headers) == ("kind", {"n": 5})
    sent = pika.BasicProperties(headers={"k": "v"}, correlation_id="c", app_id="app", delivery_mode=2)
    channel.basic_publish("", "p-doors", b"from 0-9-1", sent)
    found = client.create_receiver("p-doors", credit=1).receive(timeout=WAIT_S)
    assert (bytes(found.body), found.properties, found.correlation_id) == (b"from 0-9-1", {"k": "v"}, "c")
    assert (found.group_id, found.annotations["x-routing-key"]) == ("app", "p-doors")


@pytest.mark.spec("G2")
def test_mqtt_and_10_read_each_other(broker: Broker, client: BlockingConnection) -> None:
    receiver = client.create_receiver("/exchanges/amq.topic/plant.*", credit=5)
    with Device(broker.port("mqtt"), version=V5) as device:
        device.subscribe("valve/1", qos=1)
        device.publish("plant/7", b"21", qos=1)
        found = receiver.receive(timeout=WAIT_S)
        assert (bytes(found.body), found.annotations["x-routing-key"]) == (b"21", "plant.7")
        receiver.accept()
        client.create_sender("/exchanges/amq.topic/valve.1").send(Message(body=b"open", inferred=True))
        assert [each.payload for each in device.wait(1)] == [b"open"]


@pytest.mark.spec("G2")
def test_a_stream_is_read_from_an_offset(client: BlockingConnection, channel: Any) -> None:
    channel.queue_declare("p-stream", durable=True, arguments={"x-queue-type": "stream"})
    sender = client.create_sender("p-stream")
    for number in range(10):
        sender.send(Message(body=b"%d" % number, inferred=True))

    def read(spec: Any, count: int) -> list[tuple[str, int]]:
        options = Filter({symbol("rabbitmq:stream-offset-spec"): described("rabbitmq:stream-offset-spec", spec)})
        receiver = client.create_receiver("p-stream", credit=count, options=options)
        found = []
        for _ in range(count):
            message = receiver.receive(timeout=WAIT_S)
            found.append((bytes(message.body).decode(), message.annotations["x-stream-offset"]))
            receiver.accept()
        receiver.close()
        return found

    assert read("first", 10) == [(str(number), number) for number in range(10)]
    assert read(7, 3) == [("7", 7), ("8", 8), ("9", 9)]
    assert read("last", 1)[0][1] <= 9


def described(descriptor: str, value: Any) -> Any:
    return Described(symbol(descriptor), value)


@pytest.mark.spec("G2")
def test_logins_and_virtual_hosts(broker: Broker) -> None:
    with pytest.raises(ConnectionException):
        connect(broker, user="nobody")
    anonymous = connect(broker, user=None, password=None, allowed_mechs="ANONYMOUS")
    anonymous.close()
    broker.call("PUT", "/api/vhosts/ten", {})
    other = connect(broker, virtual_host="vhost:ten")
    with pytest.raises(LinkDetached, match="vhost 'ten'"):
        other.create_sender("/queues/p-order")
    listed = [each for each in broker.call("GET", "/api/connections") if each["protocol"] == "AMQP 1.0"]
    assert "ten" in [each["vhost"] for each in listed]
    other.close()
    with pytest.raises(ConnectionException, match="amqp:not-found"):
        connect(broker, virtual_host="vhost:missing")
