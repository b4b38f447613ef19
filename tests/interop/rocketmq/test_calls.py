"""Calls of the RocketMQ protocol and their status codes."""

from __future__ import annotations

import threading
import time

import pytest
from tests.interop.rocketmq.raw import (
    Client,
    bodies,
    handle_of,
    message,
    named,
    settings_of_consumer,
    settings_of_producer,
)
from tests.interop.server import Broker

from basaltmq.wire import rocketmq_wire_pb2 as wire

pytestmark = pytest.mark.spec("G3")


def sent(client: Client, topic: str, *texts: bytes) -> None:
    client.route(topic)
    for text in texts:
        response = client.send(message(topic, text))
        assert response.status.code == wire.OK, response


def test_a_route_creates_the_topic_and_echoes_the_endpoints(client: Client) -> None:
    found = client.route("routes")
    assert found.status.code == wire.OK
    (queue,) = found.message_queues
    assert (queue.id, queue.permission, queue.broker.id) == (0, wire.READ_WRITE, 0)
    assert queue.broker.endpoints == client.endpoints()
    assert set(queue.accept_message_types) >= {wire.NORMAL, wire.FIFO, wire.DELAY, wire.TRANSACTION}


def test_a_route_without_endpoints_or_with_an_illegal_topic_is_refused(client: Client) -> None:
    found = client.call("QueryRoute", wire.QueryRouteRequest(topic=named("t")))
    assert found.status.code == wire.ILLEGAL_ACCESS_POINT
    assert client.route("no spaces").status.code == wire.ILLEGAL_TOPIC
    assert client.route("%RETRY%g").status.code == wire.ILLEGAL_TOPIC
    assert client.route("%DLQ%unknown").status.code == wire.TOPIC_NOT_FOUND


def test_a_call_without_a_client_id_is_refused(rocketmq: Broker) -> None:
    with Client(rocketmq.port("rocketmq"), client_id="") as nameless:
        assert nameless.route("t").status.code == wire.CLIENT_ID_REQUIRED


def test_messages_are_received_with_their_properties_and_settled(client: Client) -> None:
    client.route("orders")
    given = message("orders", b"body", tag="red", keys=["k1", "k2"], born_host="here", trace_context="trace")
    given.user_properties["colour"] = "blue"
    response = client.send(given)
    (entry,) = response.entries
    assert (response.status.code, entry.status.code, entry.offset) == (wire.OK, wire.OK, 0)
    assert entry.message_id == given.system_properties.message_id

    code, (found,) = client.receive("billing", "orders")
    system = found.system_properties
    assert code == wire.OK
    assert (found.body, dict(found.user_properties), found.topic.name) == (b"body", {"colour": "blue"}, "orders")
    assert (system.tag, list(system.keys), system.message_id) == ("red", ["k1", "k2"], entry.message_id)
    assert (system.born_host, system.trace_context) == ("here", "trace")
    assert (system.delivery_attempt, system.queue_offset, system.message_type) == (1, 0, wire.NORMAL)
    assert system.body_digest.checksum == "841A2D689AD86BD1611447453C22C6FC"

    assert client.ack("billing", "orders", handle_of(found)).status.code == wire.OK
    assert client.receive("billing", "orders")[0] == wire.MESSAGE_NOT_FOUND
    assert bodies(client.receive("another-group", "orders")[1]) == [b"body"]


def test_a_message_is_delivered_again_after_its_invisible_duration(client: Client) -> None:
    sent(client, "again", b"one")
    _, (first,) = client.receive("g", "again", invisible_ms=4_000)
    assert client.receive("g", "again")[0] == wire.MESSAGE_NOT_FOUND
    code, (second,) = client.receive("g", "again", polling_ms=20_000)
    assert (code, second.system_properties.delivery_attempt) == (wire.OK, 2)
    assert client.ack("g", "again", handle_of(first)).status.code == wire.INVALID_RECEIPT_HANDLE
    assert client.ack("g", "again", handle_of(second)).status.code == wire.OK


def test_an_expired_handle_is_refused_before_the_message_is_delivered_again(client: Client) -> None:
    sent(client, "expired", b"one")
    _, (found,) = client.receive("g", "expired", invisible_ms=100)
    time.sleep(0.3)
    assert client.ack("g", "expired", handle_of(found)).status.code == wire.INVALID_RECEIPT_HANDLE


def test_handles_of_another_group_or_topic_and_invented_ones_are_refused(client: Client) -> None:
    sent(client, "fenced", b"one")
    sent(client, "elsewhere", b"one")
    _, (found,) = client.receive("g", "fenced")
    handle = handle_of(found)
    assert client.ack("stranger", "fenced", handle).status.code == wire.INVALID_RECEIPT_HANDLE
    assert client.ack("g", "elsewhere", handle).status.code == wire.INVALID_RECEIPT_HANDLE
    for bad in ("", "x", "A" * len(handle), handle[:-4] + "AAAA", "\u00e9" * len(handle)):
        assert client.ack("g", "fenced", bad).status.code == wire.INVALID_RECEIPT_HANDLE
    mixed = client.ack("g", "fenced", handle, "x")
    assert mixed.status.code == wire.MULTIPLE_RESULTS
    assert [each.status.code for each in mixed.entries] == [wire.OK, wire.INVALID_RECEIPT_HANDLE]


def test_changing_the_invisible_duration_gives_a_new_handle(client: Client) -> None:
    sent(client, "changed", b"one")
    _, (found,) = client.receive("g", "changed")
    changed = client.change("g", "changed", handle_of(found), 100)
    assert changed.status.code == wire.OK
    assert changed.receipt_handle != handle_of(found)
    assert client.ack("g", "changed", handle_of(found)).status.code == wire.INVALID_RECEIPT_HANDLE
    _, (again,) = client.receive("g", "changed", polling_ms=10_000)
    assert again.system_properties.delivery_attempt == 2
    assert client.change("g", "changed", handle_of(again), 60_000).status.code == wire.OK


def test_the_same_attempt_id_receives_the_same_messages(client: Client) -> None:
    sent(client, "attempts", b"one", b"two")
    _, first = client.receive("g", "attempts", count=1, attempt="a1")
    _, again = client.receive("g", "attempts", count=1, attempt="a1")
    _, other = client.receive("g", "attempts", count=1, attempt="a2")
    assert [bodies(each) for each in (first, again, other)] == [[b"one"], [b"one"], [b"two"]]
    assert handle_of(first[0]) == handle_of(again[0])
    assert again[0].system_properties.delivery_attempt == 1
    assert client.ack("g", "attempts", handle_of(first[0])).status.code == wire.OK


def test_a_waiting_call_is_woken_by_a_message(client: Client, rocketmq: Broker) -> None:
    client.route("woken")
    found: list[list[bytes]] = []

    def wait() -> None:
        with Client(rocketmq.port("rocketmq")) as consumer:
            found.append(bodies(consumer.receive("g", "woken", polling_ms=20_000)[1]))

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for each in waiting:
        each.start()
    for number in range(3):
        sent(client, "woken", b"%d" % number)
    for each in waiting:
        each.join(25)
    assert sorted(each for some in found for each in some) == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"count": 0}, wire.BAD_REQUEST),
        ({"invisible_ms": 99}, wire.ILLEGAL_INVISIBLE_TIME),
        ({"invisible_ms": 12 * 3_600_000 + 1}, wire.ILLEGAL_INVISIBLE_TIME),
        ({"tags": "||"}, wire.ILLEGAL_FILTER_EXPRESSION),
        ({"sql": "a >"}, wire.ILLEGAL_FILTER_EXPRESSION),
        ({"sql": "5"}, wire.ILLEGAL_FILTER_EXPRESSION),
        ({"tags": "x" * 10_000}, wire.ILLEGAL_FILTER_EXPRESSION),
    ],
)
def test_receive_calls_that_break_a_rule(client: Client, given: dict[str, object], code: int) -> None:
    client.route("receive-rules")
    assert client.receive("g", "receive-rules", **given) == (code, [])  # type: ignore[arg-type]


def test_receive_from_a_missing_topic_or_an_illegal_group(client: Client) -> None:
    assert client.receive("g", "missing")[0] == wire.TOPIC_NOT_FOUND
    client.route("illegal-group")
    assert client.receive("no spaces", "illegal-group")[0] == wire.ILLEGAL_CONSUMER_GROUP


def test_tags_are_filtered_on_the_server(client: Client) -> None:
    client.route("tagged")
    for number, tag in enumerate(["a", "b", "c", "a"]):
        client.send(message("tagged", b"%d" % number, tag=tag))
    client.send(message("tagged", b"none"))
    assert bodies(client.receive("g1", "tagged", tags="a||c")[1]) == [b"0", b"2", b"3"]
    assert bodies(client.receive("g2", "tagged", tags=" b ")[1]) == [b"1"]
    assert len(client.receive("g3", "tagged", tags="*")[1]) == 5
    assert client.receive("g1", "tagged", tags="*")[0] == wire.MESSAGE_NOT_FOUND


def test_sql_conditions_are_evaluated_on_the_server(client: Client) -> None:
    client.route("sql")
    for number, colour in enumerate(["red", "blue", "red", "green"]):
        given = message("sql", b"%d" % number, tag=colour)
        given.user_properties.update({"number": str(number), "colour": colour})
        client.send(given)
    assert bodies(client.receive("s1", "sql", sql="number > 1 AND colour IN ('red', 'green')")[1]) == [b"2", b"3"]
    assert bodies(client.receive("s2", "sql", sql="TAGS = 'blue' OR number BETWEEN 3 AND 9")[1]) == [b"1", b"3"]
    assert bodies(client.receive("s3", "sql", sql="missing IS NULL AND NOT colour LIKE 'r%'")[1]) == [b"1", b"3"]
    assert bodies(client.receive("s4", "sql", sql="number = '2'")[1]) == [b"2"]
    assert client.receive("s5", "sql", sql="missing = 1")[0] == wire.MESSAGE_NOT_FOUND


def test_settings_are_echoed_with_the_values_of_the_broker(client: Client) -> None:
    with client.telemetry() as telemetry:
        answer = telemetry.send(settings_of_producer("t"))
        assert answer.status.code == wire.OK
        assert answer.settings.publishing.max_body_size == 4 << 20
        assert answer.settings.backoff_policy.WhichOneof("strategy") == "exponential_backoff"
    with client.telemetry() as telemetry:
        answer = telemetry.send(settings_of_consumer("echo-group", wire.PUSH_CONSUMER))
        assert answer.status.code == wire.OK
        subscription, policy = answer.settings.subscription, answer.settings.backoff_policy
        assert (subscription.receive_batch_size, subscription.long_polling_timeout.seconds) == (32, 20)
        assert (policy.max_attempts, policy.customized_backoff.next[0].seconds) == (17, 1)
        assert not any(each.nanos for each in policy.customized_backoff.next)
        refused = telemetry.send(settings_of_consumer("illegal group"))
        assert refused.status.code == wire.ILLEGAL_CONSUMER_GROUP


def test_a_heartbeat_before_settings_is_refused(client: Client) -> None:
    request = wire.HeartbeatRequest(client_type=wire.SIMPLE_CONSUMER, group=named("beats"))
    assert client.call("Heartbeat", request).status.code == wire.UNRECOGNIZED_CLIENT_TYPE
    with client.telemetry() as telemetry:
        telemetry.send(settings_of_consumer("beats"))
        assert client.call("Heartbeat", request).status.code == wire.OK


def test_every_queue_is_assigned_to_every_consumer(client: Client) -> None:
    client.route("assigned")
    request = wire.QueryAssignmentRequest(topic=named("assigned"), group=named("g"), endpoints=client.endpoints())
    found = client.call("QueryAssignment", request)
    assert found.status.code == wire.OK
    assert [each.message_queue.id for each in found.assignments] == [0]


def test_the_end_of_a_client_releases_what_the_broker_renews_for_it(client: Client, rocketmq: Broker) -> None:
    sent(client, "released", b"one")
    with Client(rocketmq.port("rocketmq")) as push:
        assert bodies(push.receive("g", "released", invisible_ms=None)[1]) == [b"one"]
        assert client.receive("g", "released")[0] == wire.MESSAGE_NOT_FOUND
        ended = push.call("NotifyClientTermination", wire.NotifyClientTerminationRequest(group=named("g")))
        assert ended.status.code == wire.OK
    _, (found,) = client.receive("g", "released", polling_ms=10_000)
    assert found.system_properties.delivery_attempt == 2


def test_several_messages_in_one_request(client: Client) -> None:
    client.route("batch")
    response = client.send(*(message("batch", b"%d" % number) for number in range(5)))
    assert [each.offset for each in response.entries] == list(range(5))
    assert len(bodies(client.receive("g", "batch")[1])) == 5
    mixed = client.send(message("batch"), message("another"))
    assert mixed.status.code == wire.MESSAGE_CORRUPTED
    assert client.send().status.code == wire.MESSAGE_CORRUPTED
