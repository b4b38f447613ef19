"""Rules of AMQP 1.0, and what happens to clients that break them: an error for only the object that it concerns."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tests.interop.amqp10.raw import RawClient, raw_client
from tests.interop.server import Broker

from basaltmq.protocols.amqp10.wire import frames as f
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t


def declare(broker: Broker, name: str) -> str:
    broker.call("PUT", f"/api/queues/%2F/{name}", {"durable": True})
    return f"/queues/{name}"


def depth(broker: Broker, name: str) -> int:
    found: int = broker.call("GET", f"/api/queues/%2F/{name}")["messages"]
    return found


def fill(client: RawClient, address: str, count: int, *, first: int = 0) -> None:
    client.attach_sender(99, address)
    client.take(p.Flow)
    for number in range(first, first + count):
        client.transfer(99, number, b"m%d" % number)
    confirmed = 0
    while confirmed < count:
        found = client.take(p.Disposition)
        assert found.role == p.RECEIVER
        assert found.settled
        assert isinstance(found.state, p.Accepted)
        confirmed += (found.last if found.last is not None else found.first) - found.first + 1


def receive(client: RawClient, count: int) -> list[tuple[p.Transfer, bytes]]:
    return [client.take_with_payload(p.Transfer) for _ in range(count)]


@pytest.mark.spec("G2")
def test_credit_bounds_deliveries_and_a_drain_gives_the_rest_back(broker: Broker) -> None:
    address = declare(broker, "r-credit")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, address, 5)
        client.attach_receiver(1, address)
        client.credit(1, 2)
        assert [each.delivery_id for each, _ in receive(client, 2)] == [0, 1]
        client.credit(1, 0, delivery_count=2, echo=True)
        flow = client.take(p.Flow)
        assert (flow.delivery_count, flow.link_credit, flow.available) == (2, 0, 3)
        client.credit(1, 10, delivery_count=2, drain=True)
        receive(client, 3)
        flow = client.take(p.Flow)
        assert (flow.delivery_count, flow.link_credit, flow.drain) == (12, 0, True)


@pytest.mark.spec("G2")
def test_the_session_window_bounds_frames_of_large_messages(broker: Broker) -> None:
    address = declare(broker, "r-window")
    with raw_client(broker.port()) as client:
        client.login()
        client.send(p.Open(container_id="raw", max_frame_size=512))
        client.take(p.Open)
        client.begin(0, incoming_window=1000)
        client.attach_sender(0, address)
        client.take(p.Flow)
        body = bytes(range(250)) * 8
        for number in range(2):
            client.transfer(0, number, body)
        client.begin(1, incoming_window=2)
        client.send(p.Attach(name="in", handle=0, role=True, source=p.Source(address=address), target=p.Target()), 1)
        client.take(p.Attach)
        client.credit(0, 5, channel=1, incoming_window=2)
        found = receive(client, 2)
        payload = b"".join(each for _, each in found)
        seen = 2
        while len(found) < 10:
            client.credit(0, 5, channel=1, incoming_window=1, next_incoming_id=seen)
            transfer, part = client.take_with_payload(p.Transfer)
            payload += part
            seen += 1
            if not transfer.more:
                break
            found.append((transfer, part))
        assert payload.endswith(s.data_head(len(body)) + body)
        client.send(p.Flow(incoming_window=0, outgoing_window=0, echo=True, next_incoming_id=seen), 1)
        client.take(p.Flow)


@pytest.mark.spec("G2")
def test_receiver_settle_mode_second_has_two_steps_on_both_sides(broker: Broker) -> None:
    address = declare(broker, "r-second")
    with raw_client(broker.port()) as client:
        client.open()
        answer = client.attach_sender(0, address, rcv_settle_mode=p.SECOND)
        assert answer.rcv_settle_mode == p.SECOND
        client.transfer(0, 0)
        outcome = client.take(p.Disposition)
        assert (outcome.role, outcome.settled, outcome.state) == (p.RECEIVER, False, p.Accepted())
        client.send(p.Disposition(role=p.SENDER, first=0, settled=True))
        client.attach_receiver(1, address, rcv_settle_mode=p.SECOND)
        client.credit(1, 1)
        receive(client, 1)
        client.send(p.Disposition(role=p.RECEIVER, first=0, settled=False, state=p.Accepted()))
        settled = client.take(p.Disposition)
        assert (settled.role, settled.first, settled.settled, settled.state) == (p.SENDER, 0, True, p.Accepted())
    assert depth(broker, "r-second") == 0


@pytest.mark.spec("G2")
def test_a_disposition_settles_a_range(broker: Broker) -> None:
    address = declare(broker, "r-range")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, address, 10)
        client.attach_receiver(1, address)
        client.credit(1, 10)
        receive(client, 10)
        client.send(p.Disposition(role=p.RECEIVER, first=2, last=7, settled=True, state=p.Accepted()))
        client.send(p.Detach(handle=1, closed=True))
        client.take(p.Detach)
        client.attach_receiver(2, address)
        client.credit(2, 10, drain=True)
        assert [payload[-2:] for _, payload in receive(client, 4)] == [b"m0", b"m1", b"m8", b"m9"]


@pytest.mark.spec("G2")
def test_an_aborted_delivery_is_not_published(broker: Broker) -> None:
    address = declare(broker, "r-aborted")
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_sender(0, address)
        client.transfer(0, 0, b"partial", more=True)
        client.transfer(0, 0, aborted=True)
        client.transfer(0, 1, payload=s.data_head(4) + b"wh", more=True)
        client.transfer(0, 1, payload=b"ol", more=False)
        client.take(p.Disposition)
    assert depth(broker, "r-aborted") == 1


@pytest.mark.spec("G2")
@pytest.mark.parametrize(
    ("address", "condition"),
    [
        ("/queues/nobody", "amqp:not-found"),
        ("/exchanges/nobody/key", "amqp:not-found"),
        ("/queues/%zz", "amqp:invalid-field"),
        ("nobody", "amqp:not-found"),
    ],
)
def test_a_refused_link_leaves_the_session(broker: Broker, address: str, condition: str) -> None:
    with raw_client(broker.port()) as client:
        client.open()
        answer = client.attach_sender(3, address)
        assert answer.target is None
        assert client.error(p.Detach) == condition
        client.send(p.Detach(handle=3, closed=True))
        client.is_alive(3)


@pytest.mark.spec("G2")
def test_link_faults_end_only_the_link(broker: Broker) -> None:
    address = declare(broker, "r-faults")
    with raw_client(broker.port()) as client:
        client.open()
        of_root = s.section(s.PROPERTIES, t.encode([None, b"root"])) + s.data_head(0)
        cases: list[tuple[str, dict[str, Any]]] = [
            ("amqp:decode-error", {"payload": b"no message"}),
            ("amqp:decode-error", {"message_format": 5}),
            ("amqp:invalid-field", {"delivery_tag": b"x" * 33}),
            ("amqp:unauthorized-access", {"payload": of_root}),
        ]
        for handle, (condition, fields) in enumerate(cases):
            client.attach_sender(handle, address)
            client.take(p.Flow)
            client.transfer(handle, handle, **fields)
            assert client.error(p.Detach) == condition
            client.transfer(handle, handle, b"ignored")
            client.send(p.Detach(handle=handle, closed=True))
        client.attach_sender(9, "/exchanges/amq.fanout", rcv_settle_mode=p.SECOND)
        client.take(p.Flow)
        for number in range(1001):
            client.transfer(9, number)  # their outcomes are never settled, so there is no new credit
        assert client.error(p.Detach) == "amqp:link:transfer-limit-exceeded"
    assert depth(broker, "r-faults") == 0


@pytest.mark.spec("G2")
def test_session_faults_end_only_the_session(broker: Broker) -> None:
    with raw_client(broker.port()) as client:
        client.open()
        for channel, (condition, performative) in enumerate(
            [
                ("amqp:session:unattached-handle", p.Transfer(handle=9, delivery_id=0, delivery_tag=b"t")),
                ("amqp:session:unattached-handle", p.Detach(handle=9)),
                ("amqp:session:unattached-handle", p.Flow(handle=9, incoming_window=1, link_credit=1)),
            ],
            1,
        ):
            client.begin(channel)
            client.send(performative, channel)
            assert client.error(p.End) == condition
            client.send(performative, channel)  # ignored, as it may be on its way
            client.send(p.End(), channel)
            client.begin(channel)
        client.attach_sender(1, "/exchanges/amq.fanout")
        client.send(p.Attach(name="again", handle=1, role=False, target=p.Target(address="/exchanges/amq.fanout")))
        assert client.error(p.End) == "amqp:session:handle-in-use"
        client.send(p.Begin(incoming_window=1, outgoing_window=1), 7)
        client.take(p.Begin)


def _after_open(raw: bytes) -> Any:
    return lambda client: client.sock.sendall(raw)


CONNECTION_ERRORS: dict[str, tuple[str, Any]] = {
    "garbage": ("amqp:connection:framing-error", _after_open(b"GET / HTTP/1.1\r\n\r\n")),
    "large frame": ("amqp:connection:framing-error", _after_open(struct.pack(">IBBH", 1 << 30, 2, 0, 0))),
    "unknown performative": ("amqp:decode-error", _after_open(f.frame(0, b"\0\x53\x77\x45"))),
    "no list": ("amqp:decode-error", _after_open(f.frame(0, b"\0\x53\x12\xa1\x01x"))),
    "deep nesting": ("amqp:decode-error", _after_open(f.frame(0, b"\0" * 5000))),
    "unknown channel": ("amqp:illegal-state", lambda client: client.send(p.End(), 55)),
    "second open": ("amqp:illegal-state", lambda client: client.send(p.Open(container_id="again"))),
    "second begin": (
        "amqp:illegal-state",
        lambda client: client.send(p.Begin(incoming_window=1, outgoing_window=1)),
    ),
    "missing field": ("amqp:invalid-field", _after_open(f.frame(0, b"\0\x53\x11\x45"))),
    "handle too high": (
        "amqp:not-allowed",
        lambda client: client.send(p.Attach(name="x", handle=1 << 20, role=False, target=p.Target())),
    ),
    "disposition backwards": (
        "amqp:invalid-field",
        lambda client: client.send(p.Disposition(role=True, first=5, last=2)),
    ),
}


@pytest.mark.spec("G2")
@pytest.mark.parametrize("case", CONNECTION_ERRORS)
def test_connection_faults_close_the_connection(broker: Broker, case: str) -> None:
    condition, act = CONNECTION_ERRORS[case]
    with raw_client(broker.port()) as client:
        client.open()
        act(client)
        assert client.error(p.Close) == condition
        client.send(p.Close())
        assert client.next()[1] is None


@pytest.mark.spec("G2")
def test_nothing_is_accepted_before_the_login(broker: Broker) -> None:
    for raw in (
        f.SASL_HEADER + f.frame(0, p.encode(p.Open(container_id="x"))),
        f.SASL_HEADER + f.frame(0, b"\0" * 100, f.SASL),
        f.SASL_HEADER + f.frame(0, p.encode(p.SaslInit(mechanism="CRAM-MD5")), f.SASL),
        f.SASL_HEADER + f.frame(0, p.encode(p.SaslInit(mechanism="PLAIN", initial_response=b"guest")), f.SASL),
        f.SASL_HEADER + f.SASL_HEADER,
        f.AMQP_HEADER + b"\0\0\0\1",
    ):
        with raw_client(broker.port()) as client:
            client.sock.sendall(raw)
            while True:
                _, performative, _ = client.next()
                if performative is None:
                    break
                assert isinstance(performative, p.SaslMechanisms | p.SaslOutcome | p.Close)
                if isinstance(performative, p.SaslOutcome):
                    assert performative.code == 1


@pytest.mark.spec("G2")
@pytest.mark.parametrize(
    "fields", [{"idle_time_out": 100}, {"max_frame_size": 100}, {"hostname": "vhost:nowhere"}], ids=str
)
def test_an_open_that_cannot_be_served_is_answered_with_close(broker: Broker, fields: dict[str, Any]) -> None:
    with raw_client(broker.port()) as client:
        client.login()
        client.send(p.Open(container_id="raw", **fields))
        client.take(p.Open)
        assert client.error(p.Close) in ("amqp:invalid-field", "amqp:not-found")


@pytest.mark.spec("G2")
def test_an_idle_client_gets_empty_frames(broker: Broker) -> None:
    with raw_client(broker.port()) as client:
        client.open(idle_time_out=2000)
        client.reader.wants_header = False
        assert client.sock.recv(8) == f.EMPTY_FRAME


@pytest.mark.spec("G2")
def test_a_deleted_queue_ends_its_links(broker: Broker) -> None:
    address = declare(broker, "r-deleted")
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_receiver(1, address)
        broker.call("DELETE", "/api/queues/%2F/r-deleted")
        assert client.error(p.Detach) == "amqp:resource-deleted"
        client.send(p.Detach(handle=1, closed=True))
        client.is_alive()
