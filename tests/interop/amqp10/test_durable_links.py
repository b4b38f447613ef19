"""Durable links: subscriptions that outlive their connection, link stealing, and deliveries whose outcome is known."""

from __future__ import annotations

from typing import Any

import pytest
from tests.interop.amqp10.raw import RawClient, raw_client
from tests.interop.amqp10.test_protocol import declare, depth, fill, receive
from tests.interop.server import Broker

from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import types as t


def opened(broker: Broker, container: str) -> Any:
    client = RawClient(broker.port())
    client.login()
    client.send(p.Open(container_id=container))
    client.take(p.Open)
    client.begin(0)
    return client


def subscribe(client: RawClient, address: str | None, *, name: str = "news", **fields: Any) -> p.Attach:
    source = p.Source(address=address, durable=p.UNSETTLED_STATE, expiry_policy="never", **fields.pop("source", {}))
    return client.attach_receiver(1, address, name=name, source=source if address else None, **fields)


def publish(broker: Broker, address: str, *bodies: bytes) -> None:
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_sender(0, address)
        client.take(p.Flow)
        for number, body in enumerate(bodies):
            client.transfer(0, number, body)
        while client.take(p.Disposition).last not in (None, len(bodies) - 1):
            pass


def bodies(client: RawClient, count: int) -> list[bytes]:
    return [payload.rsplit(b"\xa0", 1)[1][1:] for _, payload in receive(client, count)]


@pytest.mark.spec("G2", "A8")
def test_a_durable_subscription_gets_what_was_published_while_its_client_was_away(own_broker: Broker) -> None:
    broker = own_broker
    address = "/exchanges/amq.topic/news.de"
    client = opened(broker, "paper")
    answer = subscribe(client, address)
    assert (answer.source.durable, answer.source.expiry_policy) == (p.UNSETTLED_STATE, "never")
    client.sock.close()
    publish(broker, address, b"1", b"2")
    broker.kill()
    broker.start()
    client = opened(broker, "paper")
    # A filter that is not applied is no reason to replace the subscription.
    subscribe(client, address, source={"filter": {t.Symbol("x"): t.Described(t.Symbol("unknown"), "y")}})
    client.credit(1, 10)
    assert bodies(client, 2) == [b"1", b"2"]
    client.send(p.Disposition(role=True, first=0, last=1, settled=True, state=p.Accepted()))
    # JMS unsubscribes by attaching without source, and closing.
    client.send(p.Detach(handle=1))
    client.take(p.Detach)
    found = subscribe(client, None)
    assert found.source.address == address
    client.send(p.Detach(handle=1, closed=True))
    client.take(p.Detach)
    assert subscribe(client, None).source is None
    assert client.error(p.Detach) == "amqp:not-found"
    client.send(p.Detach(handle=1, closed=True))
    listed = [each["name"] for each in broker.call("GET", "/api/queues/%2F")]
    assert not [name for name in listed if name.startswith("amqp10.")]
    client.sock.close()


@pytest.mark.spec("G2")
def test_a_second_link_of_the_same_name_takes_the_first_over(broker: Broker) -> None:
    address = declare(broker, "d-steal")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, address, 2)
    first, second = opened(broker, "thief"), opened(broker, "thief")
    subscribe(first, address)
    first.credit(1, 1)
    receive(first, 1)
    subscribe(second, address)
    assert first.error(p.Detach) == "amqp:link:stolen"
    second.credit(1, 2)
    assert bodies(second, 2) == [b"m0", b"m1"]
    first.sock.close()
    second.sock.close()


@pytest.mark.spec("G2", "A8")
@pytest.mark.parametrize("is_killed", [False, True], ids=["detached", "killed"])
def test_a_delivery_is_not_repeated_if_the_client_knows_its_outcome(own_broker: Broker, is_killed: bool) -> None:
    broker = own_broker
    address = declare(broker, "d-once")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, address, 4)
    client = opened(broker, "worker")
    subscribe(client, address)
    client.credit(1, 3)
    tags = [transfer.delivery_tag for transfer, _ in receive(client, 3)]
    client.sock.close()
    if is_killed:
        broker.kill()
        broker.start()
    else:
        other = opened(broker, "other")
        other.attach_receiver(1, address)
        other.credit(1, 10)
        assert bodies(other, 1) == [b"m3"]  # the deliveries of the durable link are not for others
        other.sock.close()
    client = opened(broker, "worker")
    subscribe(client, address, unsettled={tags[0]: p.Accepted(), tags[1]: p.Received()})
    client.credit(1, 10)
    assert bodies(client, 3) == [b"m1", b"m2", b"m3"]
    client.send(p.Disposition(role=True, first=0, last=2, settled=True, state=p.Accepted()))
    client.is_alive()
    client.sock.close()
    assert depth(broker, "d-once") == 0
