"""Kafka clients: an idempotent producer, a transactional one, and a consumer group that commits."""

from __future__ import annotations

import time
from typing import Any

from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.server import Broker
from tests.soak.clients import Client, Round
from tests.soak.ledger import CANCELLED, CONFIRMED, TRIED, Found, Label, Ledger

PLAIN = "k.plain"
TRANSACTED = "k.tx"
PARTITIONS = {PLAIN: 3, TRANSACTED: 2}
GROUP = "soak"
WAIT_S = 20.0


def servers(broker: Broker) -> dict[str, Any]:
    return {
        "bootstrap.servers": f"127.0.0.1:{broker.port('kafka')}",
        "socket.timeout.ms": 10_000,
        "reconnect.backoff.max.ms": 500,
        "log_level": 0,
    }


def create_topics(broker: Broker) -> None:
    client = kafka_admin.AdminClient(servers(broker))
    wanted = [kafka_admin.NewTopic(name, count, 1) for name, count in PARTITIONS.items()]
    for future in client.create_topics(wanted, operation_timeout=WAIT_S).values():
        try:
            future.result(WAIT_S)
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() != confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                raise


def place_of(topic: str, partition: int) -> str:
    return f"kafka|{topic}-{partition}"


class _Kafka(Client):
    expected = (OSError, confluent_kafka.KafkaException)

    def __init__(self, turn: Round, name: str) -> None:
        super().__init__(turn, f"kafka-{name}")


class IdempotentProducer(_Kafka):
    """Sends in order to each partition. A retry must not duplicate a record."""

    def session(self) -> None:
        settings = {"enable.idempotence": True, "linger.ms": 5, "delivery.timeout.ms": int(WAIT_S * 1000)}
        producer = confluent_kafka.Producer({**servers(self.broker), **settings})
        try:
            while self.turn.pause(0.05):
                for _ in range(self.random.randrange(1, 20)):
                    self._send(producer)
                producer.poll(0)
        finally:
            producer.flush(2.0)
            producer.purge()
            producer.flush(1.0)

    def _send(self, producer: Any) -> None:
        partition = self.random.randrange(PARTITIONS[PLAIN])
        place = place_of(PLAIN, partition)
        (label,) = self.ledger.next_label(f"k-{partition}")
        self.ledger.mark((place,), (label,), TRIED)

        def delivered(error: Any, _: Any) -> None:
            if error is None:
                self.ledger.mark((place,), (label,), CONFIRMED)

        body = label.body(self.random.choice((0, 200, 5000)))
        producer.produce(PLAIN, body, partition=partition, on_delivery=delivered)


class TransactionalProducer(_Kafka):
    """Commits most transactions and aborts some."""

    def session(self) -> None:
        settings = {"transactional.id": "soak-tx", "transaction.timeout.ms": 30_000}
        producer = confluent_kafka.Producer({**servers(self.broker), **settings})
        producer.init_transactions(WAIT_S)
        try:
            while self.turn.pause(0.1):
                self._transaction(producer)
        finally:
            producer.purge()

    def _transaction(self, producer: Any) -> None:
        is_kept = self.random.random() < 0.75
        sent: list[Found] = []
        producer.begin_transaction()
        for _ in range(self.random.randrange(1, 10)):
            partition = self.random.randrange(PARTITIONS[TRANSACTED])
            (label,) = self.ledger.next_label(f"t-{partition}")
            sent.append(Found(place_of(TRANSACTED, partition), label))
        for place, label in sent:
            self.ledger.mark((place,), (label,), TRIED if is_kept else TRIED | CANCELLED)
        if is_kept:
            self.ledger.groups.append(sent)
        for place, label in sent:
            producer.produce(TRANSACTED, label.body(50), partition=int(place[-1]))
        if is_kept:
            producer.commit_transaction(WAIT_S)
            for place, label in sent:
                self.ledger.mark((place,), (label,), CONFIRMED)
            self.ledger.groups.remove(sent)
        else:
            producer.abort_transaction(WAIT_S)


class GroupConsumer(_Kafka):
    """Reads from the committed offsets of its group, without gaps."""

    def session(self) -> None:
        settings = {
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6000,
            "on_commit": self._committed,
        }
        consumer = confluent_kafka.Consumer({**servers(self.broker), **settings})
        try:
            consumer.subscribe([PLAIN])
            last: dict[int, int] = {}
            while not self.turn.stopping.is_set():
                self._look(consumer, last)
        finally:
            consumer.close()

    def _look(self, consumer: Any, last: dict[int, int]) -> None:
        for message in consumer.consume(200, 0.2):
            if message.error() is not None:
                if message.error().code() != confluent_kafka.KafkaError._PARTITION_EOF:
                    raise confluent_kafka.KafkaException(message.error())
                continue
            partition, offset = message.partition(), message.offset()
            if partition in last and offset != last[partition] + 1:
                self.ledger.problem(f"{self.name}: {PLAIN}[{partition}] goes from {last[partition]} to {offset}")
            last[partition] = offset
            self.ledger.seen(place_of(PLAIN, partition), Label.of(message.value()), self.name)
        if last and self.random.random() < 0.3:
            # Not synchronous: librdkafka waits without a limit for a stopped coordinator.
            consumer.commit(asynchronous=True)

    def _committed(self, error: Any, places: Any) -> None:
        if error is not None:
            return
        for place in places:
            if place.error is None and place.offset >= 0:
                known = self.ledger.committed.get((place.topic, place.partition), 0)
                self.ledger.committed[place.topic, place.partition] = max(known, place.offset)


def check_commits(broker: Broker, ledger: Ledger) -> None:
    """Check that confirmed commits of a group exist."""
    if not ledger.committed:
        return
    consumer = confluent_kafka.Consumer({**servers(broker), "group.id": GROUP})
    try:
        places = [confluent_kafka.TopicPartition(topic, number) for topic, number in ledger.committed]
        for found in consumer.committed(places, timeout=WAIT_S):
            expected = ledger.committed[found.topic, found.partition]
            if found.offset < expected:
                ledger.problem(f"group {GROUP}: {found.topic}[{found.partition}] is at {found.offset}, not {expected}")
    finally:
        consumer.close()


def read_partition(broker: Broker, topic: str, partition: int, timeout_s: float) -> list[tuple[int, Label]]:
    """Return (offset, label) of all readable committed records of a partition."""
    settings = {"group.id": "reader", "isolation.level": "read_committed", "enable.partition.eof": True}
    settings |= {"enable.auto.commit": False, "fetch.error.backoff.ms": 10}
    consumer = confluent_kafka.Consumer({**servers(broker), **settings})
    offset = 0
    found: list[tuple[int, Label]] = []
    until_s = time.monotonic() + timeout_s
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
        while True:
            assert time.monotonic() < until_s, f"{topic}[{partition}]: no end after {len(found)} records"
            for message in consumer.consume(1000, 0.5):
                error = message.error()
                if error is None:
                    found.append((message.offset(), Label.of(message.value())))
                    offset = message.offset() + 1
                elif error.code() == confluent_kafka.KafkaError.INVALID_MSG:
                    # The broker reports a damaged batch and does not skip it. Skip it like an operator.
                    offset += 1
                    consumer.seek(confluent_kafka.TopicPartition(topic, partition, offset))
                    break
                elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    return found
                else:
                    raise confluent_kafka.KafkaException(error)
    finally:
        consumer.close()
