"""Subscription groups, message types and access keys: set by operators, followed by the listener."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.interop.rocketmq.conftest import FLAGS
from tests.interop.rocketmq.raw import Client, bodies, handle_of, message, settings_of_consumer
from tests.interop.server import Broker, running

from basaltmq.http_client import path
from basaltmq.wire import rocketmq_wire_pb2 as wire

pytestmark = pytest.mark.spec("G3", "D1")


def test_a_topic_accepts_its_message_type_only(client: Client, rocketmq: Broker) -> None:
    rocketmq.call("PUT", path("topics", "/", "typed"), {"message_type": "FIFO"})
    (queue,) = client.route("typed").message_queues
    assert list(queue.accept_message_types) == [wire.FIFO]
    assert client.send(message("typed")).status.code == wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    fifo = message("typed", message_type=wire.FIFO, message_group="g")
    assert client.send(fifo).status.code == wire.OK


def test_higher_priorities_are_received_first(client: Client, rocketmq: Broker) -> None:
    rocketmq.call("PUT", path("topics", "/", "priorities"), {"message_type": "PRIORITY", "partitions": 3})
    for priority in (0, 2, 1, 9):
        client.send(message("priorities", b"%d" % priority, message_type=wire.PRIORITY, priority=priority))
    assert bodies(client.receive("g", "priorities")[1]) == [b"2", b"9", b"1", b"0"]


def test_a_message_is_dead_lettered_after_the_attempts_of_its_group(client: Client, rocketmq: Broker) -> None:
    rocketmq.call("PUT", path("subscription-groups", "/", "twice"), {"max_attempts": 2})
    client.route("poison")
    client.send(message("poison", b"poison"))
    for attempt in (1, 2):
        _, (found,) = client.receive("twice", "poison", polling_ms=10_000)
        assert found.system_properties.delivery_attempt == attempt
        client.change("twice", "poison", handle_of(found), 100)
    assert client.receive("twice", "poison", polling_ms=1_000)[0] == wire.MESSAGE_NOT_FOUND
    until = time.monotonic() + 20
    while client.route("%DLQ%twice").status.code != wire.OK:
        assert time.monotonic() < until, "the dead-letter topic does not appear"
        time.sleep(0.05)
    assert bodies(client.receive("inspector", "%DLQ%twice", polling_ms=10_000)[1]) == [b"poison"]


def test_an_ordered_group_gets_the_records_of_a_message_group_together(client: Client, rocketmq: Broker) -> None:
    rocketmq.call("PUT", path("subscription-groups", "/", "ordered"), {"ordered": True})
    with client.telemetry() as telemetry:
        answer = telemetry.send(settings_of_consumer("ordered", wire.PUSH_CONSUMER))
        assert answer.settings.subscription.fifo
    client.route("together")
    for number in range(4):
        client.send(message("together", b"%d" % number, message_type=wire.FIFO, message_group="g"))
    _, found = client.receive("ordered", "together", count=3)
    assert bodies(found) == [b"0", b"1", b"2"]
    assert client.receive("ordered", "together")[0] == wire.MESSAGE_NOT_FOUND
    client.ack("ordered", "together", handle_of(found[0]))
    client.change("ordered", "together", handle_of(found[1]), 100)
    _, again = client.receive("ordered", "together", polling_ms=10_000)
    assert bodies(again) == [b"1", b"2", b"3"]
    assert client.ack("ordered", "together", handle_of(found[2])).status.code == wire.INVALID_RECEIPT_HANDLE


def test_subscription_groups_are_listed_changed_and_deleted(rocketmq: Broker) -> None:
    rocketmq.call("PUT", path("subscription-groups", "/", "listed"), {"max_attempts": 3})
    rocketmq.call("PUT", path("subscription-groups", "/", "listed"), {"max_attempts": 4})
    assert rocketmq.call("GET", path("subscription-groups", "/", "listed"))["max_attempts"] == 4
    names = [each["name"] for each in rocketmq.call("GET", path("subscription-groups", "/"))]
    assert "listed" in names
    rocketmq.call("DELETE", path("subscription-groups", "/", "listed"))
    assert "listed" not in [each["name"] for each in rocketmq.call("GET", path("subscription-groups", "/"))]


@pytest.mark.spec("G3", "P14")
def test_access_keys_give_the_permissions_of_their_user(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS, "--rocketmq-access=users") as broker:
        broker.call("PUT", path("users", "alice"), {"password": "first", "tags": []})
        everything = {"configure": ".*", "write": "^in", "read": ".*"}
        broker.call("PUT", path("permissions", "/", "alice"), everything)
        given = broker.call("GET", path("users", "alice", "access-key"))
        port = broker.port("rocketmq")
        with Client(port) as anonymous, Client(port, key="alice", secret="wrong") as wrong:  # noqa: S106
            assert anonymous.route("in").status.code == wire.UNAUTHORIZED
            assert wrong.route("in").status.code == wire.UNAUTHORIZED
        with Client(port, key=given["access_key"], secret=given["secret"]) as alice:
            assert alice.route("in").status.code == wire.OK
            assert alice.send(message("in")).status.code == wire.OK
            assert bodies(alice.receive("g", "in")[1]) == [b"hello"]
            assert alice.route("out").message_queues[0].permission == wire.READ
            assert alice.send(message("out")).status.code == wire.FORBIDDEN
            broker.call("PUT", path("users", "alice"), {"password": "second", "tags": []})
            assert alice.route("in").status.code == wire.UNAUTHORIZED
