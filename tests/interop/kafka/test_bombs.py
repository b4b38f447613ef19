"""A small compressed batch that is large when decompressed: memory stays bounded, and the topic stays readable."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pika
import pytest
from tests.interop.kafka.raw import RawClient
from tests.interop.server import Broker
from tests.log_frames import encode_plain
from tests.unit.log.test_kafka import compressed

from basaltmq.errors import RemoteError
from basaltmq.http_client import path
from basaltmq.log.batches import codecs
from basaltmq.log.batches.record import Record

BOMB_BYTES = 120 << 20
GROWTH_BYTES_MAX = 150 << 20
"""Growth over an idle broker: one record of the largest size as JSON, and memory that the allocator keeps."""


def resident_peak_bytes(broker: Broker) -> int:
    assert broker.process is not None
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) << 10


def processor_s(broker: Broker) -> float:
    """Return the processor time of the broker, which other programs hardly change."""
    assert broker.process is not None
    fields = Path(f"/proc/{broker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.promise("P8")
def test_compression_bombs_exhaust_no_memory_and_block_no_topic(own_broker: Broker) -> None:
    broker = own_broker
    broker.call("PUT", path("queues", "/", "bombed"), {"arguments": {"x-queue-type": "stream"}})
    bomb = compressed(codecs.GZIP, encode_plain([Record(bytes(BOMB_BYTES), timestamp_ms=1)]))
    assert len(bomb) < 200_000
    plain = encode_plain([Record(b"after", timestamp_ms=2)])
    with RawClient(broker.port("kafka")) as client:
        for each in (encode_plain([Record(b"before", timestamp_ms=1)]), bomb, plain):
            assert client.produce("bombed", each)["error_code"] == 0
        before = resident_peak_bytes(broker)

        lines = path("topics", "/", "bombed", "0", "lines")
        assert broker.call("GET", lines, limit=10)["next_offset"] == 1
        with pytest.raises(RemoteError, match=r"topic 'bombed', partition 0.*offset 1 .*max\.message\.bytes") as caught:
            broker.call("GET", lines, offset=1, limit=1)
        assert caught.value.code == "damaged_frame"
        assert [each["value"] for each in broker.call("GET", lines, offset=2)["records"]] == ["after"]

        connection = pika.BlockingConnection(pika.URLParameters(broker.url("amqp")))
        channel = connection.channel()
        channel.basic_qos(prefetch_count=10)
        got: list[bytes] = []

        def take(_channel: object, method: object, _properties: object, body: bytes) -> None:
            got.append(body)

        channel.basic_consume("bombed", take, arguments={"x-stream-offset": "first"})
        until = time.monotonic() + 30
        while len(got) < 2 and time.monotonic() < until:
            connection.process_data_events(0.1)
        assert got == [b"before", b"after"], "the batch is passed over"
        connection.close()

        fetched = client.fetch("bombed", 1)
        assert fetched["error_code"] == 0
        assert bomb[61:] in bytes(fetched["records"]), "Kafka clients get the bytes that were produced"
    assert resident_peak_bytes(broker) - before < GROWTH_BYTES_MAX


def test_a_batch_of_many_records_is_delivered_one_by_one(own_broker: Broker) -> None:
    """With a prefetch of 1, the batch is decoded once, not once per message."""
    broker = own_broker
    broker.call("PUT", path("queues", "/", "many"), {"arguments": {"x-queue-type": "stream"}})
    records = [Record(b"%d" % number, timestamp_ms=1) for number in range(20_000)]
    with RawClient(broker.port("kafka")) as client:
        client.produce("many", compressed(codecs.GZIP, encode_plain(records)))
    connection = pika.BlockingConnection(pika.URLParameters(broker.url("amqp")))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=1)
    began_s = processor_s(broker)
    delivered = channel.consume("many", arguments={"x-stream-offset": "first"}, inactivity_timeout=30)
    for number, (method, _, body) in zip(range(500), delivered, strict=False):
        assert body == b"%d" % number
        channel.basic_ack(method.delivery_tag)
    assert processor_s(broker) - began_s < 15, "500 times the batch take 25 s"
    connection.close()
