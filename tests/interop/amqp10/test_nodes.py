"""Dynamic nodes and their lifetime policies, link stealing, and containers that want to be the only ones."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.interop.amqp10.raw import WAIT_S, RawClient, raw_client
from tests.interop.amqp10.test_durable_links import opened
from tests.interop.amqp10.test_protocol import declare, fill, receive
from tests.interop.server import Broker

from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t

ON_CLOSE, ON_NO_LINKS, ON_NO_MESSAGES, ON_NO_LINKS_OR_MESSAGES = range(0x2B, 0x2F)


def create(client: RawClient, policy: object) -> str:
    """Create a dynamic queue with the link of handle 1."""
    properties = {t.Symbol("lifetime-policy"): policy}
    target = p.Target(dynamic=True, dynamic_node_properties=properties)
    answer = client.attach_sender(1, None, target=target)
    return str(answer.target.address)


def detach(client: RawClient, handle: int) -> None:
    client.send(p.Detach(handle=handle, closed=True))
    client.take(p.Detach)


def exists(broker: Broker, address: str) -> bool:
    name = address.removeprefix("/queues/")
    return name in [each["name"] for each in broker.call("GET", "/api/queues/%2F")]


def wait_until_gone(broker: Broker, address: str) -> None:
    until = time.monotonic() + WAIT_S
    while exists(broker, address):
        assert time.monotonic() < until, address
        time.sleep(0.05)


def policy_of(number: int) -> t.Described:
    return t.Described(t.Ulong(number), [])


@pytest.mark.spec("G2")
def test_a_node_that_is_deleted_on_close_ends_with_its_first_link(broker: Broker) -> None:
    with raw_client(broker.port()) as client:
        client.open()
        address = create(client, t.Described(t.Symbol("amqp:delete-on-close:list"), []))
        client.attach_receiver(2, address)
        client.send(p.Detach(handle=1, closed=True))
        assert client.error(p.Detach) == "amqp:resource-deleted"
        client.take(p.Detach)
        assert not exists(broker, address)


@pytest.mark.spec("G2")
def test_a_node_that_is_deleted_on_no_links_ends_with_its_last_link(broker: Broker) -> None:
    with raw_client(broker.port()) as client, raw_client(broker.port()) as other:
        client.open()
        other.open()
        address = create(client, policy_of(ON_NO_LINKS))
        client.take(p.Flow)
        client.transfer(1, 0, b"x")
        client.take(p.Disposition)
        other.attach_receiver(2, address)
        client.sock.close()
        other.credit(2, 1)
        receive(other, 1)
        assert exists(broker, address)
        detach(other, 2)
        assert not exists(broker, address)


@pytest.mark.spec("G2")
@pytest.mark.parametrize("policy", [ON_NO_MESSAGES, ON_NO_LINKS_OR_MESSAGES])
def test_a_node_with_messages_outlives_its_links(broker: Broker, policy: int) -> None:
    with raw_client(broker.port()) as client:
        client.open()
        address = create(client, policy_of(policy))
        client.take(p.Flow)
        client.transfer(1, 0, b"x")
        client.take(p.Disposition)
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_receiver(2, address)
        client.credit(2, 1)
        receive(client, 1)
        assert exists(broker, address)
        client.send(p.Disposition(role=True, first=0, settled=True, state=p.Accepted()))
        if policy == ON_NO_LINKS_OR_MESSAGES:
            client.is_alive()
            detach(client, 2)
        wait_until_gone(broker, address)


@pytest.mark.spec("G2")
def test_a_node_without_messages_ends_with_its_link(broker: Broker) -> None:
    with raw_client(broker.port()) as client:
        client.open()
        for policy in (ON_NO_MESSAGES, ON_NO_LINKS_OR_MESSAGES):
            address = create(client, policy_of(policy))
            detach(client, 1)
            assert not exists(broker, address)
        target = p.Target(dynamic=True, dynamic_node_properties={t.Symbol("lifetime-policy"): policy_of(0x99)})
        client.attach_sender(1, None, target=target)
        assert client.error(p.Detach) == "amqp:invalid-field"


@pytest.mark.spec("G2")
@pytest.mark.parametrize("where", ["connection", "session"])
def test_a_container_that_attaches_a_link_again_takes_it_over(broker: Broker, where: str) -> None:
    address = declare(broker, f"n-steal-{where}")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, address, 2)
    first = opened(broker, f"thief-{where}")
    second = opened(broker, f"thief-{where}") if where == "connection" else first
    stranger = opened(broker, f"stranger-{where}")
    first.attach_receiver(1, address, name="link")
    first.credit(1, 1)
    receive(first, 1)
    first.attach_sender(2, address, name="link")  # the other direction is another link
    first.take(p.Flow)
    stranger.attach_receiver(1, address, name="link")
    second.send(p.Attach(name="link", handle=5, role=True, source=p.Source(address=address), target=p.Target()))
    assert first.error(p.Detach) == "amqp:link:stolen"
    second.take(p.Attach)
    second.credit(5, 5, next_incoming_id=0 if second is not first else 1)
    assert [payload[-2:] for _, payload in receive(second, 2)] == [b"m0", b"m1"]
    first.transfer(2, 7, b"still attached")
    first.take(p.Disposition)
    stranger.is_alive()
    for each in (first, second, stranger):
        each.sock.close()


@pytest.mark.spec("G2")
def test_a_container_can_be_the_only_connection(broker: Broker) -> None:
    wanted = ["sole-connection-for-container"]
    first = opened(broker, "only")
    refused = RawClient(broker.port()).login()
    refused.send(p.Open(container_id="only", desired_capabilities=wanted))
    answer = refused.take(p.Open)
    assert (answer.properties or {})["amqp:connection-establishment-failed"] is True
    error: Any = refused.take(p.Close).error
    assert (error.condition, error.info) == ("amqp:invalid-field", {"invalid-field": "container-id"})
    first.send(p.Close())
    first.take(p.Close)
    again = RawClient(broker.port()).login()
    again.send(p.Open(container_id="only", desired_capabilities=wanted))
    assert "amqp:connection-establishment-failed" not in (again.take(p.Open).properties or {})
    again.begin(0)
    for each in (first, refused, again):
        each.sock.close()


@pytest.mark.spec("G2")
def test_errors_fit_into_the_smallest_frame(broker: Broker) -> None:
    with raw_client(broker.port()) as client:
        client.login()
        client.send(p.Open(container_id="raw", max_frame_size=512))
        client.take(p.Open)
        client.begin(0)
        client.reader.bytes_max = 512
        long = "é" * 300
        client.send(p.Attach(name="x", handle=1, role=True, source=p.Source(address=long), target=p.Target()))
        assert client.error(p.Detach) == "amqp:not-found"


@pytest.mark.spec("G2")
def test_messages_cannot_be_acquired_in_a_transaction(broker: Broker) -> None:
    address = declare(broker, "n-acquire")
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_receiver(1, address)
        client.credit(1, 1, properties={t.Symbol("txn-id"): b"1"})
        assert client.error(p.Detach) == "amqp:not-implemented"
        client.send(p.Detach(handle=1, closed=True))
        client.is_alive()


@pytest.mark.spec("G2")
def test_a_large_message_passes_through_small_frames_and_windows(broker: Broker) -> None:
    address = declare(broker, "n-window")
    body = bytes(range(256)) * 32_768
    with raw_client(broker.port()) as client:
        client.login()
        client.send(p.Open(container_id="raw", max_frame_size=512))
        client.take(p.Open)
        client.begin(0, incoming_window=0)
        client.attach_sender(0, address)
        client.take(p.Flow)
        whole = s.data_head(len(body)) + body
        for at in range(0, len(whole), 65_536):
            client.transfer(0, 0, payload=whole[at : at + 65_536], more=at + 65_536 < len(whole))
        client.take(p.Disposition)
        client.attach_receiver(1, address)
        client.credit(1, 1, incoming_window=64)
        parts, seen = [], 0
        while True:
            transfer, part = client.take_with_payload(p.Transfer)
            parts.append(part)
            seen += 1
            if not transfer.more:
                break
            if seen % 64 == 0:
                client.send(p.Flow(next_incoming_id=seen, incoming_window=64, outgoing_window=0))
        assert b"".join(parts).endswith(body)
