"""Answers to unusual requests, which are the same as RabbitMQ 3.10's (each was compared with it)."""

from __future__ import annotations

import struct
from typing import Any

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker
from tests.interop.amqp091.conftest import connect
from tests.interop.server import Broker

WAIT_S = 60


def close_code(call: Any) -> int:
    """The code with which the broker closed the channel."""
    with pytest.raises(ChannelClosedByBroker) as caught:
        call()
    code: int = caught.value.reply_code
    return code


@pytest.mark.parametrize("first", [True, False])
def test_a_declaration_with_the_other_exclusive_flag_finds_the_queue_locked(
    channel: Any, name: str, *, first: bool
) -> None:
    channel.queue_declare(name, exclusive=first)
    assert close_code(lambda: channel.queue_declare(name, exclusive=not first)) == 405


def test_a_passive_declaration_of_the_default_exchange_is_refused(channel: Any) -> None:
    assert close_code(lambda: channel.exchange_declare("", passive=True)) == 403


@pytest.mark.parametrize("header", ["CC", "BCC"])
def test_cc_that_is_no_array_is_refused(channel: Any, name: str, header: str) -> None:
    channel.queue_declare(name, exclusive=True)
    channel.confirm_delivery()
    properties = pika.BasicProperties(headers={header: "other"})
    assert close_code(lambda: channel.basic_publish("", name, b"", properties)) == 406


def test_line_breaks_in_names_are_dropped(connection: Any, channel: Any, name: str) -> None:
    dirty = name[:3] + "\r\n" + name[3:] + "\n"
    channel.exchange_declare(dirty + "x", "direct")
    # pika waits for a response with its own spelling of the name, so the responses are read from other calls.
    channel.queue_declare(name)
    channel.queue_bind(dirty, dirty + "x", "key")
    channel.confirm_delivery()
    channel.basic_publish(name + "x", "key", b"found")
    assert channel.basic_get(dirty, auto_ack=True)[2] == b"found"
    channel.queue_unbind(dirty, dirty + "x", "key")
    channel.queue_delete(dirty)
    channel.exchange_delete(dirty + "x")
    for gone in (
        lambda each: each.queue_declare(name, passive=True),
        lambda e: e.exchange_declare(name + "x", "direct", passive=True),
    ):
        other = connection.channel()
        assert close_code(lambda gone=gone, other=other: gone(other)) == 404


def test_a_float_is_not_the_same_argument_as_a_whole_number(
    channel: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = pika.data.encode_value

    def encode_float(pieces: list[bytes], value: Any) -> int:
        if not isinstance(value, float):
            return int(encode(pieces, value))
        pieces.append(struct.pack(">cd", b"d", value))
        return 9

    monkeypatch.setattr(pika.data, "encode_value", encode_float)
    channel.queue_declare(name, exclusive=True, arguments={"x-message-ttl": 10_000})
    channel.queue_declare(name, exclusive=True, arguments={"x-message-ttl": 10_000})
    assert close_code(lambda: channel.queue_declare(name, exclusive=True, arguments={"x-message-ttl": 10_000.0})) == 406


@pytest.mark.parametrize(
    "limit", [{"x-max-length": 2}, {"x-max-length-bytes": 20}, {"x-max-length": 2, "x-delivery-limit": 9}]
)
def test_returned_messages_count_against_the_length_limit(channel: Any, name: str, limit: dict[str, int]) -> None:
    channel.queue_declare(name, exclusive=True, arguments=limit)
    channel.confirm_delivery()
    for number in range(2):
        channel.basic_publish("", name, b"%10d" % number)
    for _ in range(2):
        assert channel.basic_get(name)[0]
    for number in range(2, 4):
        channel.basic_publish("", name, b"%10d" % number)
    channel.basic_nack(0, multiple=True, requeue=True)
    assert channel.queue_declare(name, passive=True).method.message_count == 2
    assert [int(channel.basic_get(name, auto_ack=True)[2]) for _ in range(2)] == [2, 3], "the oldest were dropped"


def test_consumers_of_a_channel_share_its_prefetch(broker: Broker, name: str) -> None:
    connection = connect(broker)
    channel = connection.channel()
    channel.confirm_delivery()
    got: list[str] = []
    channel.basic_qos(prefetch_count=10, global_qos=True)
    for queue in (name + "-a", name + "-b"):
        channel.queue_declare(queue, exclusive=True)
        for _ in range(40):
            channel.basic_publish("", queue, queue[-1].encode())
    for queue in (name + "-a", name + "-b"):
        channel.basic_consume(queue, lambda _c, _m, _p, body: got.append(body.decode()))
    take(connection, got, 10)
    for _ in range(5):
        seen = len(got)
        channel.basic_ack(0, multiple=True)
        take(connection, got, seen + 10)
    assert len(got) == 60
    assert got.count("a") >= 25
    assert got.count("b") >= 20
    connection.close()


def test_one_queue_may_use_the_whole_prefetch_while_others_are_empty(broker: Broker, name: str) -> None:
    connection = connect(broker)
    channel = connection.channel()
    channel.confirm_delivery()
    got: list[str] = []
    channel.basic_qos(prefetch_count=10, global_qos=True)
    for queue in (name + "-a", name + "-b", name + "-c"):
        channel.queue_declare(queue, exclusive=True)
        channel.basic_consume(queue, lambda _c, _m, _p, body: got.append(body.decode()))
    for _ in range(12):
        channel.basic_publish("", name + "-b", b"b")
    take(connection, got, 10)
    connection.process_data_events(0.2)
    assert len(got) == 10
    channel.basic_ack(0, multiple=True)
    take(connection, got, 12)
    channel.basic_publish("", name + "-c", b"c")
    take(connection, got, 13)
    connection.close()


def take(connection: Any, got: list[str], count: int) -> None:
    for _ in range(WAIT_S * 10):
        if len(got) >= count:
            return
        connection.process_data_events(0.1)
    raise AssertionError(f"{len(got)} of {count} messages came")
