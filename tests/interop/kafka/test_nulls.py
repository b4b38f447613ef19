"""Null values and times out of range, from Kafka's clients to every reader and back."""

from __future__ import annotations

from struct import pack, pack_into

import google_crc32c
import pika
import pyarrow as pa
import pytest
from tests.interop.kafka.raw import RawClient
from tests.interop.kafka.test_clients import consumer_of, receive
from tests.interop.server import Broker
from tests.log_frames import encode_plain

from basaltmq.errors import RemoteError
from basaltmq.http_client import Login, path
from basaltmq.log.batches.kafka import records
from basaltmq.log.batches.record import TIMESTAMP_MS_MAX, Record
from basaltmq.pipeline.remote import RemoteView
from basaltmq.pipeline.store_path import store_path
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.streams.view import StreamView

HEADERS = (("null", None), ("empty", b""), ("full", b"x"))
WRITTEN = [Record(b"v", b"k", timestamp_ms=1), Record(None, b"k", HEADERS, timestamp_ms=2), Record(b"", timestamp_ms=3)]
SEEN = [(b"v", b"k", ()), (None, b"k", HEADERS), (b"", None, ())]


def rows_of(batch: pa.RecordBatch) -> list[tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]]:
    return [
        (row["value"], row["key"], tuple((each["key"], each["value"]) for each in row["headers"]))
        for row in batch.to_pylist()
    ]


def test_null_values_of_kafka_are_null_for_every_reader(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("nulls")
        assert client.produce("nulls", encode_plain(WRITTEN))["error_code"] == 0
    consumer = consumer_of(kafka, "nulls")
    consumer.subscribe(["nulls"])
    try:
        assert [message.value() for message in receive(consumer, 3)] == [b"v", None, b""]
    finally:
        consumer.close()
    with StreamView.open(store_path(str(kafka.data_dir), "/")) as view:
        found = view.read("nulls", 0, 0)
        assert [(each.value, each.key, each.headers) for each in found.records()] == SEEN
        assert rows_of(found.arrow()) == SEEN
    remote = RemoteView(Login(kafka.url("admin")))
    assert [row for batch in remote.records("nulls", 0, 0, 3, headers=True) for row in rows_of(batch)] == SEEN
    lines = kafka.call("GET", path("topics", "/", "nulls", "0", "lines"))["records"]
    assert [line["value"] for line in lines] == ["v", None, ""]
    assert lines[1]["headers"] == {"null": None, "empty": "", "full": "x"}


def test_null_values_of_other_writers_are_null_in_kafka(kafka: Broker) -> None:
    kafka.call("PUT", path("topics", "/", "lines"), {"partitions": 1})
    reported = [{"value": None, "key": "k", "headers": {"h": None}}, {"value": ""}]
    kafka.call("POST", path("topics", "/", "lines"), {"records": reported})
    with pytest.raises(RemoteError, match="needs value or value_base64"):
        kafka.call("POST", path("topics", "/", "lines"), {"records": [{"key": "k"}]})
    with RawClient(kafka.port("kafka")) as client:
        found = records(client.fetch("lines", 0)["records"])
    assert [(each.value, each.key, each.headers) for each in found] == [(None, b"k", (("h", None),)), (b"", None, ())]


def test_null_values_are_empty_messages_in_amqp(kafka: Broker) -> None:
    with pika.BlockingConnection(pika.URLParameters(kafka.url("amqp"))) as connection:
        channel = connection.channel()
        channel.queue_declare("shown", durable=True, arguments={"x-queue-type": "stream"})
        with RawClient(kafka.port("kafka")) as client:
            client.produce("shown", encode_plain(WRITTEN))
        channel.basic_qos(prefetch_count=10)
        bodies = []
        for method, properties, body in channel.consume("shown", arguments={"x-stream-offset": "first"}):
            bodies.append((body, properties.headers.get("null", "missing")))
            channel.basic_ack(method.delivery_tag)
            if len(bodies) == 3:
                break
    assert bodies == [(b"v", "missing"), (b"", None), (b"", "missing")]


@pytest.mark.parametrize("time_ms", [-2, TIMESTAMP_MS_MAX + 1, (1 << 63) - 1])
def test_a_time_out_of_range_is_an_invalid_timestamp(kafka: Broker, time_ms: int) -> None:
    topic = f"times{time_ms}"
    raw = bytearray(encode_plain([Record(b"x", timestamp_ms=1)]))
    pack_into(">qq", raw, 27, time_ms, time_ms)
    raw[17:21] = pack(">I", google_crc32c.value(bytes(raw[21:])))
    with RawClient(kafka.port("kafka")) as client:
        client.create(topic, 1, message_timestamp_after_max_ms=str(TIMESTAMP_MS_MAX))
        found = client.produce(topic, bytes(raw))
        assert (found["error_code"], found["base_offset"]) == (e.INVALID_TIMESTAMP, -1)
        assert str(time_ms) in found["error_message"]
        assert client.produce(topic, encode_plain([Record(b"x", timestamp_ms=TIMESTAMP_MS_MAX)]))["error_code"] == 0
    with pytest.raises(RemoteError, match=r"timestamp_ms .* is out of range"):
        kafka.call("POST", path("topics", "/", topic), {"records": [{"value": "x", "timestamp_ms": time_ms}]})
    remote = RemoteView(Login(kafka.url("admin")))
    (batch,) = remote.records(topic, 0, 0, 1)
    assert batch.to_pylist()[0]["timestamp"].year == 9999
