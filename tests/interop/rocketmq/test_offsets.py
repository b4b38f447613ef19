"""Pull consumers of RocketMQ, and offsets of groups."""

from __future__ import annotations

import threading

import pytest
from tests.interop.rocketmq.raw import Client, bodies, message, named
from tests.interop.server import Broker

from basaltmq.wire import rocketmq_wire_pb2 as wire

pytestmark = pytest.mark.spec("G3", "B7")


def queue(topic: str, number: int = 0) -> wire.MessageQueue:
    return wire.MessageQueue(topic=named(topic), id=number)


def pulled(client: Client, topic: str, offset: int, *, count: int = 32, polling_ms: int = 0, tags: str = "*") -> object:
    """Return the code, the bodies and the next offset of a pull call."""
    request = wire.PullMessageRequest(
        group=named("g"),
        message_queue=queue(topic),
        offset=offset,
        batch_size=count,
        filter_expression=wire.FilterExpression(type=wire.TAG, expression=tags),
    )
    request.long_polling_timeout.FromMilliseconds(polling_ms)
    status, *messages, last = client.stream("PullMessage", request)
    return status.status.code, [each.message.body for each in messages], last.next_offset


def test_messages_are_pulled_by_offset(client: Client) -> None:
    client.route("pulled")
    for number in range(5):
        client.send(message("pulled", b"%d" % number, tag="odd" if number % 2 else "even"))
    assert pulled(client, "pulled", 0, count=2) == (wire.OK, [b"0", b"1"], 2)
    assert pulled(client, "pulled", 2) == (wire.OK, [b"2", b"3", b"4"], 5)
    assert pulled(client, "pulled", 0, tags="odd", count=1) == (wire.OK, [b"1"], 3)
    assert pulled(client, "pulled", 5) == (wire.MESSAGE_NOT_FOUND, [], 5)


def test_a_pull_call_waits_for_a_message(client: Client, rocketmq: Broker) -> None:
    client.route("awaited")
    found: list[object] = []

    def wait() -> None:
        with Client(rocketmq.port("rocketmq")) as consumer:
            found.append(pulled(consumer, "awaited", 0, polling_ms=20_000))

    waiting = threading.Thread(target=wait)
    waiting.start()
    client.send(message("awaited", b"here"))
    waiting.join(25)
    assert found == [(wire.OK, [b"here"], 1)]


def test_offsets_are_updated_and_read(client: Client) -> None:
    client.route("offsets")
    for number in range(3):
        client.send(message("offsets", b"%d" % number))
    get = wire.GetOffsetRequest(group=named("g"), message_queue=queue("offsets"))
    assert client.call("GetOffset", get).status.code == wire.OFFSET_NOT_FOUND
    update = wire.UpdateOffsetRequest(group=named("g"), message_queue=queue("offsets"), offset=2)
    assert client.call("UpdateOffset", update).status.code == wire.OK
    assert client.call("GetOffset", get).offset == 2
    assert bodies(client.receive("g", "offsets")[1]) == [b"2"]
    update.offset = 1
    assert client.call("UpdateOffset", update).status.code == wire.OK
    assert bodies(client.receive("g", "offsets")[1]) == [b"1", b"2"]
    update.offset = -1
    assert client.call("UpdateOffset", update).status.code == wire.ILLEGAL_OFFSET


def test_offsets_are_found_by_position_and_time(client: Client) -> None:
    client.route("positions")
    for number in range(3):
        client.send(message("positions", b"%d" % number))
    _, found = client.receive("g", "positions")
    second = found[1].system_properties.store_timestamp

    def asked(policy: int, **given: object) -> int:
        request = wire.QueryOffsetRequest(message_queue=queue("positions"), query_offset_policy=policy, **given)  # type: ignore[arg-type]
        offset: int = client.call("QueryOffset", request).offset
        return offset

    assert (asked(wire.BEGINNING), asked(wire.END)) == (0, 3)
    assert asked(wire.TIMESTAMP, timestamp=second) <= 1
    second.seconds += 3_600
    assert asked(wire.TIMESTAMP, timestamp=second) == 3
    missing = wire.QueryOffsetRequest(message_queue=queue("positions", 7), query_offset_policy=wire.END)
    assert client.call("QueryOffset", missing).status.code == wire.BAD_REQUEST
