"""Kafka's own clients against a real broker: librdkafka, kafka-python, aiokafka."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pika
import pytest
from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.client_modules import aiokafka, confluent_kafka, kafka_python
from tests.interop.server import Broker

WAIT_S = 60.0


def servers(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('kafka')}"


def send(broker: Broker, topic: str, values: list[bytes], **settings: Any) -> None:
    failed: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": servers(broker), **settings})
    for value in values:
        producer.produce(topic, value, key=value, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(WAIT_S) == 0
    assert not failed


def receive(consumer: Any, count: int) -> list[Any]:
    found: list[Any] = []
    until = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < until:
        for message in consumer.consume(500, 0.5):
            assert message.error() is None, message.error()
            found.append(message)
    return found


def consumer_of(broker: Broker, group: str, **settings: Any) -> Any:
    return confluent_kafka.Consumer(
        {"bootstrap.servers": servers(broker), "group.id": group, "auto.offset.reset": "earliest", **settings}
    )


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_librdkafka_round_trips_records_with_every_compression(kafka: Broker, codec: str) -> None:
    values = [b"%s-%d" % (codec.encode(), number) for number in range(500)]
    send(kafka, f"codec-{codec}", values, **{"compression.type": codec})
    consumer = consumer_of(kafka, f"codec-{codec}")
    consumer.subscribe([f"codec-{codec}"])
    try:
        assert [message.value() for message in receive(consumer, 500)] == values
        consumer.commit(asynchronous=False)
    finally:
        consumer.close()
    again = consumer_of(kafka, f"codec-{codec}")
    try:
        place = confluent_kafka.TopicPartition(f"codec-{codec}", 0)
        assert again.committed([place], timeout=WAIT_S)[0].offset == 500
    finally:
        again.close()


def test_members_of_a_group_share_and_take_over_partitions(kafka: Broker) -> None:
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers(kafka)})
    admin.create_topics([kafka_admin.NewTopic("shared", 4, 1)])["shared"].result(WAIT_S)
    first, second = consumer_of(kafka, "sharers"), consumer_of(kafka, "sharers")
    try:
        first.subscribe(["shared"])
        second.subscribe(["shared"])
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            first.poll(0.1)
            second.poll(0.1)
            if len(first.assignment()) == len(second.assignment()) == 2:
                break
        shares = [{place.partition for place in each.assignment()} for each in (first, second)]
        assert shares[0] | shares[1] == {0, 1, 2, 3}
        assert not shares[0] & shares[1]
        described = admin.describe_consumer_groups(["sharers"])["sharers"].result(WAIT_S)
        assert len(described.members) == 2
        second.close()
        while time.monotonic() < until and len(first.assignment()) < 4:
            first.poll(0.1)
        assert len(first.assignment()) == 4
    finally:
        first.close()


def test_a_static_member_returns_to_its_partitions_without_a_rebalance(kafka: Broker) -> None:
    send(kafka, "static", [b"one"])
    settings = {"group.instance.id": "the-one", "session.timeout.ms": 30_000}
    member = consumer_of(kafka, "statics", **settings)
    member.subscribe(["static"])
    assert len(receive(member, 1)) == 1
    member.commit(asynchronous=False)
    member.close()
    send(kafka, "static", [b"two"])
    back = consumer_of(kafka, "statics", **settings)
    back.subscribe(["static"])
    try:
        assert [message.value() for message in receive(back, 1)] == [b"two"]
    finally:
        back.close()


def test_topics_are_created_extended_described_altered_and_deleted(kafka: Broker) -> None:
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers(kafka)})
    wanted = kafka_admin.NewTopic("made", 2, 1, config={"retention.ms": "86400000", "cleanup.policy": "delete"})
    admin.create_topics([wanted])["made"].result(WAIT_S)
    with pytest.raises(confluent_kafka.KafkaException, match="TOPIC_ALREADY_EXISTS"):
        admin.create_topics([wanted])["made"].result(WAIT_S)
    with pytest.raises(confluent_kafka.KafkaException, match="INVALID_CONFIG"):
        admin.create_topics([kafka_admin.NewTopic("odd", 1, 1, config={"no.such": "1"})])["odd"].result(WAIT_S)
    admin.create_partitions([kafka_admin.NewPartitions("made", 5)])["made"].result(WAIT_S)
    assert len(admin.list_topics(timeout=WAIT_S).topics["made"].partitions) == 5
    resource = kafka_admin.ConfigResource(kafka_admin.ConfigResource.Type.TOPIC, "made")
    (described,) = admin.describe_configs([resource]).values()
    assert described.result(WAIT_S)["retention.ms"].value == "86400000"
    admin.delete_topics(["made"])["made"].result(WAIT_S)
    assert "made" not in admin.list_topics(timeout=WAIT_S).topics


def test_offsets_are_found_by_timestamp(kafka: Broker) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": servers(kafka)})
    for number in range(10):
        producer.produce("timed", b"%d" % number, timestamp=1_700_000_000_000 + 1000 * number)
        producer.flush(WAIT_S)
    consumer = consumer_of(kafka, "timed")
    try:
        at = [confluent_kafka.TopicPartition("timed", 0, 1_700_000_004_500)]
        assert consumer.offsets_for_times(at, timeout=WAIT_S)[0].offset == 5
        after = [confluent_kafka.TopicPartition("timed", 0, 1_800_000_000_000)]
        assert consumer.offsets_for_times(after, timeout=WAIT_S)[0].offset == confluent_kafka.OFFSET_END
        assert consumer.get_watermark_offsets(confluent_kafka.TopicPartition("timed", 0), timeout=WAIT_S) == (0, 10)
    finally:
        consumer.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kafka_python_produces_and_consumes_in_a_group(kafka: Broker) -> None:
    producer = kafka_python.KafkaProducer(bootstrap_servers=servers(kafka), acks="all")
    for number in range(200):
        producer.send("python", b"%d" % number)
    producer.flush(WAIT_S)
    producer.close()
    consumer = kafka_python.KafkaConsumer(
        "python", bootstrap_servers=servers(kafka), group_id="python", auto_offset_reset="earliest"
    )
    found: list[bytes] = []
    until = time.monotonic() + WAIT_S
    while len(found) < 200 and time.monotonic() < until:
        for batch in consumer.poll(timeout_ms=500).values():
            found += [record.value for record in batch]
    consumer.commit()
    consumer.close()
    assert found == [b"%d" % number for number in range(200)]


async def through_aiokafka(broker: Broker) -> list[bytes]:
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=servers(broker), enable_idempotence=True)
    await producer.start()
    try:
        for number in range(200):
            await producer.send("aio", b"%d" % number)
        await producer.flush()
    finally:
        await producer.stop()
    consumer = aiokafka.AIOKafkaConsumer(
        "aio", bootstrap_servers=servers(broker), group_id="aio", auto_offset_reset="earliest"
    )
    await consumer.start()
    found: list[bytes] = []
    try:
        async with asyncio.timeout(WAIT_S):
            while len(found) < 200:
                found.append((await consumer.getone()).value)
        await consumer.commit()
    finally:
        await consumer.stop()
    return found


def test_aiokafka_produces_idempotently_and_consumes_in_a_group(kafka: Broker) -> None:
    assert asyncio.run(through_aiokafka(kafka)) == [b"%d" % number for number in range(200)]


@pytest.mark.spec("B1")
def test_amqp_streams_and_kafka_topics_are_the_same_objects(kafka: Broker) -> None:
    send(kafka, "both", [b"from kafka"])
    connection = pika.BlockingConnection(pika.URLParameters(kafka.url("amqp")))
    try:
        channel = connection.channel()
        channel.queue_declare("both", durable=True, arguments={"x-queue-type": "stream"})
        channel.confirm_delivery()
        channel.basic_publish("", "both", b"from amqp")
        channel.basic_qos(prefetch_count=10)
        found: list[bytes] = []
        for method, _, body in channel.consume("both", arguments={"x-stream-offset": "first"}, inactivity_timeout=30):
            assert method is not None, f"only {found} came"
            found.append(body)
            channel.basic_ack(method.delivery_tag)
            if len(found) == 2:
                break
        assert found == [b"from kafka", b"from amqp"]
        channel.cancel()
    finally:
        connection.close()
    consumer = consumer_of(kafka, "both")
    consumer.subscribe(["both"])
    try:
        assert [message.value() for message in receive(consumer, 2)] == [b"from kafka", b"from amqp"]
    finally:
        consumer.close()
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers(kafka)})
    with pytest.raises(confluent_kafka.KafkaException, match="POLICY_VIOLATION"):
        admin.delete_topics(["both"])["both"].result(WAIT_S)
