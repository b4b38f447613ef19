"""Messages that arrive later or elsewhere: delays, recalls, message groups, dead letters, transactions."""

from __future__ import annotations

import time

import pytest
from tests.interop.rocketmq.raw import (
    Client,
    bodies,
    handle_of,
    message,
    named,
    settings_of_producer,
)
from tests.interop.server import Broker

from basaltmq.wire import rocketmq_wire_pb2 as wire

pytestmark = pytest.mark.spec("G3", "C8")

SOON_MS = 700


def delayed(topic: str, body: bytes, after_ms: int) -> wire.Message:
    made = message(topic, body, message_type=wire.DELAY)
    made.system_properties.delivery_timestamp.FromMilliseconds(time.time_ns() // 1_000_000 + after_ms)
    return made


def half(topic: str, body: bytes) -> wire.Message:
    return message(topic, body, message_type=wire.TRANSACTION)


def end(client: Client, topic: str, transaction_id: str, resolution: int) -> int:
    request = wire.EndTransactionRequest(
        topic=named(topic),
        message_id="m",
        transaction_id=transaction_id,
        resolution=resolution,  # type: ignore[arg-type]
    )
    code: int = client.call("EndTransaction", request).status.code
    return code


def test_a_delayed_message_arrives_when_it_is_due(client: Client) -> None:
    client.route("delays")
    due = [delayed("delays", b"%d" % after_ms, after_ms) for after_ms in (2 * SOON_MS, SOON_MS, -5_000)]
    assert client.send(*due).status.code == wire.OK
    found: list[bytes] = []
    while len(found) < 3:
        _, some = client.receive("g", "delays", polling_ms=10_000)
        now_ms = time.time_ns() // 1_000_000
        for each in some:
            assert now_ms >= each.system_properties.delivery_timestamp.ToMilliseconds()
            found.append(each.body)
    assert found == [b"-5000", b"%d" % SOON_MS, b"%d" % (2 * SOON_MS)]


def test_a_recalled_message_does_not_arrive(client: Client) -> None:
    client.route("recalls")
    sent = client.send(delayed("recalls", b"recalled", SOON_MS), delayed("recalls", b"kept", SOON_MS))
    request = wire.RecallMessageRequest(topic=named("recalls"), recall_handle=sent.entries[0].recall_handle)
    recalled = client.call("RecallMessage", request)
    assert (recalled.status.code, recalled.message_id) == (wire.OK, sent.entries[0].message_id)
    assert client.call("RecallMessage", request).status.code == wire.MESSAGE_NOT_FOUND
    assert bodies(client.receive("g", "recalls", polling_ms=10_000)[1]) == [b"kept"]
    too_late = wire.RecallMessageRequest(topic=named("recalls"), recall_handle=sent.entries[1].recall_handle)
    assert client.call("RecallMessage", too_late).status.code == wire.MESSAGE_NOT_FOUND
    invented = wire.RecallMessageRequest(topic=named("recalls"), recall_handle="nonsense")
    assert client.call("RecallMessage", invented).status.code == wire.BAD_REQUEST


def test_messages_of_a_group_arrive_one_after_the_other(client: Client) -> None:
    client.route("fifo")
    for number in range(3):
        for group in ("a", "b"):
            client.send(
                message("fifo", b"%s%d" % (group.encode(), number), message_type=wire.FIFO, message_group=group)
            )
    _, first = client.receive("g", "fifo")
    assert bodies(first) == [b"a0", b"b0"]
    assert client.receive("g", "fifo")[0] == wire.MESSAGE_NOT_FOUND
    client.change("g", "fifo", handle_of(first[0]), 100)
    client.ack("g", "fifo", handle_of(first[1]))
    _, again = client.receive("g", "fifo", polling_ms=10_000)
    _, more = client.receive("g", "fifo", polling_ms=1_000)
    assert sorted(bodies(again) + bodies(more)) == [b"a0", b"b1"]
    done: list[bytes] = []
    held = again + more
    while held:
        done += bodies(held)
        client.ack("g", "fifo", *map(handle_of, held))
        _, held = client.receive("g", "fifo")
    assert [each for each in done if each[:1] == b"a"] == [b"a0", b"a1", b"a2"]
    assert [each for each in done if each[:1] == b"b"] == [b"b1", b"b2"]


def test_a_message_that_is_forwarded_is_a_dead_letter(client: Client) -> None:
    client.route("forwarded")
    given = message("forwarded", b"poison", tag="t", keys=["k"])
    client.send(given)
    _, (found,) = client.receive("g-dead", "forwarded")
    request = wire.ForwardMessageToDeadLetterQueueRequest(
        group=named("g-dead"), topic=named("forwarded"), receipt_handle=handle_of(found)
    )
    assert client.call("ForwardMessageToDeadLetterQueue", request).status.code == wire.OK
    assert client.call("ForwardMessageToDeadLetterQueue", request).status.code == wire.INVALID_RECEIPT_HANDLE
    until = time.monotonic() + 20
    while client.route("%DLQ%g-dead").status.code != wire.OK:
        assert time.monotonic() < until, "the dead-letter topic does not appear"
        time.sleep(0.05)
    _, (dead,) = client.receive("inspector", "%DLQ%g-dead", polling_ms=10_000)
    system = dead.system_properties
    assert (dead.body, system.tag, list(system.keys)) == (b"poison", "t", ["k"])
    assert system.dead_letter_queue.topic == "forwarded"
    assert system.dead_letter_queue.message_id == given.system_properties.message_id
    assert client.receive("g-dead", "forwarded")[0] == wire.MESSAGE_NOT_FOUND
    assert client.send(message("%DLQ%g-dead")).status.code == wire.ILLEGAL_TOPIC


def test_a_committed_transaction_arrives_and_a_rolled_back_one_does_not(client: Client) -> None:
    client.route("transactions")
    sent = client.send(half("transactions", b"no"), half("transactions", b"yes"), half("transactions", b"undecided"))
    ids = [each.transaction_id for each in sent.entries]
    assert client.receive("g", "transactions", polling_ms=300)[0] == wire.MESSAGE_NOT_FOUND
    assert end(client, "transactions", ids[0], wire.ROLLBACK) == wire.OK
    assert end(client, "transactions", ids[1], wire.COMMIT) == wire.OK
    assert bodies(client.receive("g", "transactions", polling_ms=10_000)[1]) == [b"yes"]
    assert client.receive("g", "transactions", polling_ms=300)[0] == wire.MESSAGE_NOT_FOUND


def test_a_transaction_is_decided_once(client: Client) -> None:
    client.route("once")
    (entry,) = client.send(half("once", b"once")).entries
    assert end(client, "elsewhere", entry.transaction_id, wire.COMMIT) == wire.INVALID_TRANSACTION_ID
    assert end(client, "once", "nonsense", wire.COMMIT) == wire.INVALID_TRANSACTION_ID
    assert end(client, "once", entry.transaction_id, 0) == wire.BAD_REQUEST
    assert end(client, "once", entry.transaction_id, wire.COMMIT) == wire.OK
    assert end(client, "once", entry.transaction_id, wire.COMMIT) == wire.OK
    assert end(client, "once", entry.transaction_id, wire.ROLLBACK) == wire.INVALID_TRANSACTION_ID
    assert bodies(client.receive("g", "once", polling_ms=10_000)[1]) == [b"once"]
    assert client.receive("g", "once", polling_ms=300)[0] == wire.MESSAGE_NOT_FOUND


def test_a_producer_is_asked_for_a_transaction_that_nobody_decides(client: Client) -> None:
    client.route("orphans")
    with client.telemetry() as telemetry:
        assert telemetry.send(settings_of_producer("orphans")).status.code == wire.OK
        given = half("orphans", b"orphan")
        given.system_properties.orphaned_transaction_recovery_duration.FromMilliseconds(200)
        (entry,) = client.send(given).entries
        command = telemetry.received.get(timeout=20).recover_orphaned_transaction_command
        assert command.transaction_id == entry.transaction_id
        assert command.message.body == b"orphan"
        assert command.message.topic.name == "orphans"
        assert command.message.system_properties.message_id == entry.message_id
        assert end(client, "orphans", command.transaction_id, wire.COMMIT) == wire.OK
    assert bodies(client.receive("g", "orphans", polling_ms=10_000)[1]) == [b"orphan"]


def test_another_producer_decides_for_one_that_is_gone(client: Client, rocketmq: Broker) -> None:
    client.route("gone")
    with Client(rocketmq.port("rocketmq")) as gone, gone.telemetry() as telemetry:
        telemetry.send(settings_of_producer("gone"))
        given = half("gone", b"left behind")
        given.system_properties.orphaned_transaction_recovery_duration.FromMilliseconds(1_000)
        assert gone.send(given).status.code == wire.OK
    with client.telemetry() as telemetry:
        telemetry.send(settings_of_producer("other", "gone"))
        command = telemetry.received.get(timeout=50).recover_orphaned_transaction_command
        assert command.message.body == b"left behind"
        assert end(client, "gone", command.transaction_id, wire.ROLLBACK) == wire.OK
    assert client.receive("g", "gone", polling_ms=300)[0] == wire.MESSAGE_NOT_FOUND
