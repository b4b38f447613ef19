"""Delays, and changes of messages by their receivers."""

from __future__ import annotations

import time
from typing import Any

import pytest
from proton import Delivery, Message, symbol
from tests.interop.amqp10.raw import RawClient, raw_client
from tests.interop.amqp10.test_filters import receiver, send
from tests.interop.amqp10.test_protocol import declare, depth, fill, receive
from tests.interop.amqp10.test_proton import connect, texts
from tests.interop.server import Broker

from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t


@pytest.mark.spec("G2")
def test_a_message_waits_for_its_delay_or_its_delivery_time(own_broker: Broker) -> None:
    broker = own_broker
    declare(broker, "m-delay")
    client = connect(broker)
    at_ms = int(time.time() * 1000)
    in_an_hour = at_ms + 3_600_000
    send(
        client,
        "/queues/m-delay",
        Message(body=b"hour", inferred=True, annotations={symbol("x-opt-delivery-time"): in_an_hour}),
        Message(body=b"later", inferred=True, annotations={symbol("x-opt-delivery-delay"): 1500}),
        Message(body=b"now", inferred=True),
        Message(body=b"past", inferred=True, annotations={symbol("x-opt-delivery-time"): at_ms - 5000}),
    )
    wanted = receiver(client, "/queues/m-delay", credit=2)
    assert texts(wanted, 2) == ["now", "past"]
    client.close()
    # The delays survive a crash.
    broker.kill()
    broker.start()
    client = connect(broker)
    assert texts(receiver(client, "/queues/m-delay", credit=5), 1) == ["later"]
    assert time.time() * 1000 >= at_ms + 1500
    client.close()
    counts = broker.call("GET", "/api/queues/%2F/m-delay")
    assert counts["messages_ready"] == 0


def annotated(payload: bytes) -> dict[Any, Any]:
    return s.split(payload).message_annotations or {}


def settle(client: RawClient, delivery_id: int, state: p.Composite) -> None:
    client.send(p.Disposition(role=True, first=delivery_id, settled=True, state=state))


@pytest.mark.spec("G2")
def test_annotations_of_modified_are_merged_and_stored(own_broker: Broker) -> None:
    broker = own_broker
    address = declare(broker, "m-modified")
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_sender(0, address)
        client.take(p.Flow)
        own = s.section(s.MESSAGE_ANNOTATIONS, t.encode({t.Symbol("x-opt-a"): "1", t.Symbol("b"): 2}))
        client.transfer(0, 0, payload=own + s.section(s.PROPERTIES, t.encode(["id"])) + s.data_head(1) + b"x")
        client.take(p.Disposition)
        client.attach_receiver(1, address)
        client.credit(1, 10)
        changed = {t.Symbol("x-opt-a"): "2", t.Symbol("c"): [1, "z"]}
        receive(client, 1)
        settle(client, 0, p.Modified(delivery_failed=True, message_annotations=changed))
        client.take(p.Transfer)
        client.is_alive()
    broker.kill()
    broker.start()
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_receiver(1, address)
        client.credit(1, 10)
        payload = receive(client, 1)[0][1]
        found = annotated(payload)
        assert (found["x-opt-a"], found["b"], found["c"]) == ("2", 2, [1, "z"])
        split = s.split(payload)
        assert split.header is not None
        assert split.header[4] == 1
        assert payload[split.bare_at :] == s.section(s.PROPERTIES, t.encode(["id"])) + s.data_head(1) + b"x"
        # Not failed: the attempts stay, the annotations change.
        settle(client, 0, p.Modified(message_annotations={t.Symbol("x-opt-a"): "3"}))
        payload = receive(client, 1)[0][1]
        assert annotated(payload)["x-opt-a"] == "3"
        assert (s.split(payload).header or [])[4] == 1


@pytest.mark.spec("G2")
def test_a_failed_delivery_counts_towards_the_delivery_limit(broker: Broker) -> None:
    declare(broker, "m-dead")
    about = {"x-delivery-limit": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "m-dead"}
    broker.call("PUT", "/api/queues/%2F/m-limit", {"durable": True, "arguments": about})
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, "/queues/m-limit", 1)
        client.attach_receiver(1, "/queues/m-limit")
        client.credit(1, 10)
        for delivery_id in range(2):
            receive(client, 1)
            settle(
                client, delivery_id, p.Modified(delivery_failed=True, message_annotations={t.Symbol("x-opt-why"): "w"})
            )
        client.attach_receiver(2, "/queues/m-dead")
        client.credit(2, 10, next_incoming_id=2)
        assert annotated(receive(client, 1)[0][1])["x-opt-why"] == "w"
    assert depth(broker, "m-limit") == 0


@pytest.mark.spec("G2")
def test_a_message_of_another_protocol_can_be_modified(broker: Broker) -> None:
    declare(broker, "m-other")
    body = {"properties": {"headers": {"k": 1}, "message_id": "i"}, "routing_key": "m-other", "payload": "x",
            "payload_encoding": "string"}  # fmt: skip
    broker.call("POST", "/api/exchanges/%2F/amq.default/publish", body)
    client = connect(broker)
    wanted = receiver(client, "/queues/m-other", credit=1)
    delivery = wanted.receive(timeout=30)
    assert delivery.id == "i"
    disposition = wanted.fetcher.unsettled[0].local
    disposition.failed, disposition.annotations = True, {symbol("x-opt-by"): "me"}
    wanted.settle(Delivery.MODIFIED)
    again = wanted.receive(timeout=30)
    assert (again.annotations["x-opt-by"], again.properties["k"], again.id, again.delivery_count) == ("me", 1, "i", 1)
    client.close()
