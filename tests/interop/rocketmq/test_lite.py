"""LITE messages: lite topics, the subscriptions of clients to them, and their order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop.rocketmq.conftest import FLAGS
from tests.interop.rocketmq.raw import Client, bodies, handle_of, message, named, settings_of_consumer
from tests.interop.server import Broker, running

from basaltmq.http_client import path
from basaltmq.wire import rocketmq_wire_pb2 as wire


def send(client: Client, topic: str, lite: str, body: bytes) -> wire.SendMessageResponse:
    made: wire.SendMessageResponse = client.send(message(topic, body, message_type=wire.LITE, lite_topic=lite))
    return made


def sync(
    client: Client,
    topic: str,
    *lites: str,
    group: str = "g",
    action: wire.LiteSubscriptionAction = wire.PARTIAL_ADD,
    option: wire.OffsetOption | None = None,
) -> int:
    request = wire.SyncLiteSubscriptionRequest(
        action=action, topic=named(topic), group=named(group), lite_topic_set=lites, offset_option=option
    )
    return int(client.call("SyncLiteSubscription", request).status.code)


def ack(client: Client, topic: str, *found: wire.Message, group: str = "g") -> int:
    entries = [
        wire.AckMessageEntry(
            message_id="m", receipt_handle=handle_of(each), lite_topic=each.system_properties.lite_topic
        )
        for each in found
    ]
    request = wire.AckMessageRequest(group=named(group), topic=named(topic), entries=entries)
    return int(client.call("AckMessage", request).status.code)


@pytest.fixture
def consumer(rocketmq: Broker) -> Iterator[Client]:
    with Client(rocketmq.port("rocketmq")) as made, made.telemetry() as telemetry:
        answer = telemetry.send(settings_of_consumer("g", wire.LITE_SIMPLE_CONSUMER))
        assert answer.settings.subscription.lite_subscription_quota > 0
        assert answer.settings.subscription.max_lite_topic_size == 64
        yield made


def test_a_client_receives_the_lite_topics_that_it_subscribes(client: Client, consumer: Client) -> None:
    client.route("chat")
    for lite in ("red", "blue", "green"):
        assert send(client, "chat", lite, lite.encode()).status.code == wire.OK
    assert consumer.receive("g", "chat")[0] == wire.MESSAGE_NOT_FOUND
    assert sync(consumer, "chat", "red", "blue") == wire.OK
    _, found = consumer.receive("g", "chat")
    assert sorted(bodies(found)) == [b"blue", b"red"]
    assert {each.system_properties.lite_topic for each in found} == {"red", "blue"}
    assert {each.topic.name for each in found} == {"chat"}
    assert {each.system_properties.message_type for each in found} == {wire.LITE}
    assert ack(consumer, "chat", *found) == wire.OK
    assert sync(consumer, "chat", "green", action=wire.COMPLETE_ADD) == wire.OK
    send(client, "chat", "red", b"not subscribed any more")
    _, (green,) = consumer.receive("g", "chat")
    assert green.body == b"green"


def test_a_lite_topic_is_received_in_order_by_one_consumer_at_a_time(client: Client, consumer: Client) -> None:
    client.route("ordered")
    for number in range(3):
        send(client, "ordered", "one", b"%d" % number)
    sync(consumer, "ordered", "one")
    _, (first,) = consumer.receive("g", "ordered")
    assert consumer.receive("g", "ordered")[0] == wire.MESSAGE_NOT_FOUND
    request = wire.ChangeInvisibleDurationRequest(
        group=named("g"), topic=named("ordered"), receipt_handle=handle_of(first), lite_topic="one"
    )
    request.invisible_duration.FromMilliseconds(200)
    assert consumer.call("ChangeInvisibleDuration", request).status.code == wire.OK
    for number in range(3):
        _, (found,) = consumer.receive("g", "ordered", polling_ms=10_000)
        assert found.body == b"%d" % number
        assert ack(consumer, "ordered", found) == wire.OK


def test_a_waiting_call_is_woken_by_a_new_lite_message(client: Client, consumer: Client) -> None:
    client.route("woken")
    sync(consumer, "woken", "later", "other")
    assert consumer.receive("g", "woken")[0] == wire.MESSAGE_NOT_FOUND
    send(client, "woken", "later", b"now")
    assert bodies(consumer.receive("g", "woken", polling_ms=15_000)[1]) == [b"now"]


def test_an_offset_option_moves_the_beginning(client: Client, consumer: Client) -> None:
    client.route("begin")
    for number in range(5):
        send(client, "begin", "tail", b"%d" % number)
        send(client, "begin", "end", b"%d" % number)
    assert sync(consumer, "begin", "tail", option=wire.OffsetOption(tail_n=2)) == wire.OK
    assert sync(consumer, "begin", "end", option=wire.OffsetOption(policy=wire.OffsetOption.MAX)) == wire.OK
    _, (found,) = consumer.receive("g", "begin")
    assert (found.body, found.system_properties.lite_topic) == (b"3", "tail")


def test_quotas_and_names_are_checked(client: Client, consumer: Client, rocketmq: Broker) -> None:
    rocketmq.call("PUT", path("topics", "/", "plain"), {"message_type": "NORMAL"})
    assert sync(consumer, "plain", "x") == wire.ILLEGAL_LITE_TOPIC
    assert send(client, "plain", "x", b"x").status.code == wire.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    client.route("quota")
    for bad in ("", " ", "a b", "$", "x" * 65):
        assert sync(consumer, "quota", bad) == wire.ILLEGAL_LITE_TOPIC
        assert send(client, "quota", bad, b"x").status.code == wire.ILLEGAL_LITE_TOPIC
    many = [f"n{number}" for number in range(1_001)]
    assert sync(consumer, "quota", *many) == wire.LITE_SUBSCRIPTION_QUOTA_EXCEEDED
    assert client.route("%LITE%quota$x").status.code == wire.ILLEGAL_TOPIC


def test_the_same_attempt_id_receives_the_same_lite_messages(client: Client, consumer: Client) -> None:
    client.route("attempt")
    for lite in ("a", "b"):
        send(client, "attempt", lite, lite.encode())
    sync(consumer, "attempt", "a", "b")
    _, first = consumer.receive("g", "attempt", attempt="one")
    _, again = consumer.receive("g", "attempt", attempt="one")
    assert sorted(bodies(again)) == sorted(bodies(first)) == [b"a", b"b"]


def test_deleting_a_topic_deletes_its_lite_topics(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker, Client(broker.port("rocketmq")) as client:

        def names() -> list[str]:
            return [each["name"] for each in broker.call("GET", path("topics", "/"))["topics"]]

        client.route("parent")
        client.route("kept")
        for number in range(20):
            assert send(client, "parent", f"n{number}", b"old").status.code == wire.OK
        assert send(client, "kept", "n0", b"kept").status.code == wire.OK
        assert len(names()) == 23
        broker.call("DELETE", path("topics", "/", "parent"))
        until = time.monotonic() + 60
        while set(names()) != {"kept", "%LITE%kept$n0"}:
            assert time.monotonic() < until, names()
            time.sleep(0.05)
        client.route("parent")
        with client.telemetry() as telemetry:
            telemetry.send(settings_of_consumer("g", wire.LITE_SIMPLE_CONSUMER))
            assert sync(client, "parent", "n0") == wire.OK
            assert client.receive("g", "parent")[0] == wire.MESSAGE_NOT_FOUND
