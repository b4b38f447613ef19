"""Transactions with unmodified clients: records and offsets together, or none of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pika
import pytest
from tests.interop.kafka.client_modules import aiokafka, confluent_kafka, kafka_python
from tests.interop.kafka.raw import RawClient, fetched
from tests.interop.server import Broker

from basaltmq.log.batches.kafka import records
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e

WAIT_S = 60.0


def servers(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('kafka')}"


def producer_of(broker: Broker, transactional_id: str, **settings: Any) -> Any:
    made = confluent_kafka.Producer(
        {
            "bootstrap.servers": servers(broker),
            "transactional.id": transactional_id,
            "log_level": 0,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
    )
    made.init_transactions(WAIT_S)
    return made


def consumer_of(broker: Broker, topic: str, isolation: str = "read_committed", **settings: Any) -> Any:
    made = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers(broker),
            "group.id": settings.pop("group", f"of-{topic}"),
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
            **settings,
        }
    )
    made.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    return made


def until_end(consumer: Any) -> list[bytes]:
    """Return all records up to the end that this consumer sees."""
    found: list[bytes] = []
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        message = consumer.poll(1.0)
        if message is not None and message.error():
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, message.error()
            return found
        if message is not None:
            found.append(message.value())
    raise AssertionError("the end did not come")


def everything(broker: Broker, topic: str, isolation: str = "read_committed") -> list[bytes]:
    consumer = consumer_of(broker, topic, isolation)
    try:
        return until_end(consumer)
    finally:
        consumer.close()


def test_committed_records_are_visible_and_aborted_ones_are_not(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("outcomes")
    producer = producer_of(kafka, "outcomes")
    plain = confluent_kafka.Producer({"bootstrap.servers": servers(kafka), "log_level": 0})
    for number in range(6):
        producer.begin_transaction()
        for at in range(3):
            producer.produce("outcomes", b"%d.%d" % (number, at))
            producer.flush(WAIT_S)
        plain.produce("outcomes", b"plain %d" % number)
        assert plain.flush(WAIT_S) == 0
        if number % 2:
            producer.abort_transaction(WAIT_S)
        else:
            producer.commit_transaction(WAIT_S)
    wanted = []
    for number in range(6):
        wanted += [] if number % 2 else [b"%d.%d" % (number, at) for at in range(3)]
        wanted.append(b"plain %d" % number)
    assert everything(kafka, "outcomes") == wanted
    uncommitted = everything(kafka, "outcomes", "read_uncommitted")
    assert len(uncommitted) == 24
    assert set(wanted) < set(uncommitted)


def test_records_become_visible_at_commit_and_wake_waiting_consumers(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("held")
    producer = producer_of(kafka, "held")
    producer.begin_transaction()
    producer.produce("held", b"first")
    producer.flush(WAIT_S)
    assert everything(kafka, "held") == []
    with RawClient(kafka.port("kafka")) as client:
        found = client.fetch("held", 0, isolation_level=1)
        assert (found["high_watermark"], found["last_stable_offset"], found["records"]) == (1, 0, b"")
        assert client.fetch("held", 0)["records"] != b""
        # It would wait longer than this client's timeout.
        client.post(k.FETCH, 12, fetched("held", 0, isolation_level=1, max_wait_ms=60_000))
        producer.commit_transaction(WAIT_S)
        response = client.response(k.FETCH, 12)["topics"][0]["partitions"][0]
        assert [record.value for record in records(response["records"])] == [b"first"]


@pytest.mark.parametrize("is_commit", [True, False])
def test_consume_transform_produce_commits_records_and_offsets_together(kafka: Broker, is_commit: bool) -> None:
    name = f"{'kept' if is_commit else 'undone'}"
    with RawClient(kafka.port("kafka")) as client:
        client.create(f"in-{name}")
        client.create(f"out-{name}")
    source = confluent_kafka.Producer({"bootstrap.servers": servers(kafka), "log_level": 0})
    for number in range(5):
        source.produce(f"in-{name}", b"%d" % number)
    assert source.flush(WAIT_S) == 0
    group = f"group-{name}"
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers(kafka),
            "group.id": group,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe([f"in-{name}"])
    taken: list[Any] = []
    until = time.monotonic() + WAIT_S
    while len(taken) < 5 and time.monotonic() < until:
        taken += [each for each in consumer.consume(5 - len(taken), 0.5) if not each.error()]
    producer = producer_of(kafka, name)
    producer.begin_transaction()
    for each in taken:
        producer.produce(f"out-{name}", b"did " + each.value())
    places = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), WAIT_S)
    with RawClient(kafka.port("kafka")) as client:
        asked = {"groups": [{"group_id": group, "topics": [{"name": f"in-{name}", "partition_indexes": [0]}]}]}

        def offset(require_stable: bool) -> tuple[int, int]:
            response = client.ask(k.OFFSET_FETCH, 8, {**asked, "require_stable": require_stable})
            found = response["groups"][0]["topics"][0]["partitions"][0]
            return found["committed_offset"], found["error_code"]

        assert offset(True) == (-1, e.UNSTABLE_OFFSET_COMMIT)
        assert offset(False) == (-1, 0), "not before the transaction commits"
        if is_commit:
            producer.commit_transaction(WAIT_S)
        else:
            producer.abort_transaction(WAIT_S)
        assert offset(True) == ((5, 0) if is_commit else (-1, 0))
    consumer.close()
    wanted = [b"did %d" % number for number in range(5)]
    assert everything(kafka, f"out-{name}") == (wanted if is_commit else [])


def test_a_second_producer_of_a_transactional_id_fences_the_first(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("fenced")
    first = producer_of(kafka, "one-only")
    first.begin_transaction()
    first.produce("fenced", b"of the first")
    first.flush(WAIT_S)
    second = producer_of(kafka, "one-only")
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        first.commit_transaction(WAIT_S)
    assert refused.value.args[0].fatal()
    assert refused.value.args[0].code() == confluent_kafka.KafkaError._FENCED
    second.begin_transaction()
    second.produce("fenced", b"of the second")
    second.commit_transaction(WAIT_S)
    assert everything(kafka, "fenced") == [b"of the second"]


def test_a_transaction_is_aborted_at_its_timeout(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("slow")
    slow = producer_of(kafka, "slow", transaction_timeout_ms=1000)
    slow.begin_transaction()
    slow.produce("slow", b"late")
    slow.flush(WAIT_S)
    consumer = consumer_of(kafka, "slow")
    plain = confluent_kafka.Producer({"bootstrap.servers": servers(kafka), "log_level": 0})
    plain.produce("slow", b"behind it")
    assert plain.flush(WAIT_S) == 0
    found = None
    until = time.monotonic() + WAIT_S
    while (found is None or found.error()) and time.monotonic() < until:
        found = consumer.poll(1.0)
    assert found is not None
    assert found.value() == b"behind it", "seen when the transaction before it is over"
    consumer.close()
    with pytest.raises(confluent_kafka.KafkaException):
        slow.commit_transaction(WAIT_S)


def test_aiokafka_commits_and_aborts(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("asynchronous")

    async def run() -> list[bytes]:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=servers(kafka), transactional_id="asynchronous")
        await producer.start()
        try:
            for number in range(4):
                await producer.begin_transaction()
                await producer.send_and_wait("asynchronous", b"%d" % number)
                await (producer.abort_transaction() if number % 2 else producer.commit_transaction())
        finally:
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            "asynchronous",
            bootstrap_servers=servers(kafka),
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        )
        await consumer.start()
        try:
            return [(await asyncio.wait_for(consumer.getone(), WAIT_S)).value for _ in range(2)]
        finally:
            await consumer.stop()

    assert asyncio.run(run()) == [b"0", b"2"]
    assert everything(kafka, "asynchronous") == [b"0", b"2"]


def test_kafka_python_commits_and_aborts(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("pure")
    producer = kafka_python.KafkaProducer(bootstrap_servers=servers(kafka), transactional_id="pure")
    producer.init_transactions()
    for number in range(4):
        producer.begin_transaction()
        producer.send("pure", b"%d" % number).get(WAIT_S)
        if number % 2:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()
    assert everything(kafka, "pure") == [b"0", b"2"]
    consumer = kafka_python.KafkaConsumer(
        "pure",
        bootstrap_servers=servers(kafka),
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        consumer_timeout_ms=int(WAIT_S * 1000),
    )
    found = [next(consumer).value for _ in range(2)]
    consumer.close()
    assert found == [b"0", b"2"]


def test_amqp_consumers_get_only_committed_records_and_are_woken(kafka: Broker) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(kafka.url("amqp")))
    try:
        channel = connection.channel()
        channel.queue_declare("both-doors", durable=True, arguments={"x-queue-type": "stream"})
        channel.basic_qos(prefetch_count=10)
        found: list[bytes] = []

        def took(taken: Any, method: Any, _: Any, body: bytes) -> None:
            found.append(body)
            taken.basic_ack(method.delivery_tag)

        channel.basic_consume("both-doors", took, arguments={"x-stream-offset": "first"})
        producer = producer_of(kafka, "both-doors")
        for number in range(4):
            producer.begin_transaction()
            producer.produce("both-doors", b"%d" % number)
            producer.flush(WAIT_S)
            if number % 2:
                producer.commit_transaction(WAIT_S)
            else:
                producer.abort_transaction(WAIT_S)
        until = time.monotonic() + WAIT_S
        while len(found) < 2 and time.monotonic() < until:
            connection.process_data_events(0.5)
        assert found == [b"1", b"3"]
    finally:
        connection.close()
