"""Exactly once, in order, though the broker is killed again and again: consume, transform, produce in transactions."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.kafka.raw import RawClient
from tests.interop.kafka.test_crash import flags, free_port
from tests.interop.server import Broker, running

KILLS = int(os.environ.get("BASALT_KILLS", "0"))
WAIT_S = 100.0
STEP_S = 20.0
"""What a client waits for one answer before it begins another life."""

RECORDS = 400
EACH_MAX = 25
PARTITIONS = 2


class Worker:
    """Takes records from one topic and puts them, in transactions, into another; begins anew when it must."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self._servers = f"127.0.0.1:{port}"
        self._chance = chance
        self.done = 0
        self.ends: list[Any] = []
        """Why lives ended."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._live()
        except BaseException as error:
            self.error = error

    def _live(self) -> None:
        """One life of a client: until an error that it cannot go on from."""
        settings = {"bootstrap.servers": self._servers, "log_level": 0, "reconnect.backoff.max.ms": 200}
        producer = confluent_kafka.Producer({**settings, "transactional.id": "worker", "linger.ms": 1})
        consumer = confluent_kafka.Consumer(
            {
                **settings,
                "group.id": "worker",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        try:
            producer.init_transactions(STEP_S)
            self._go_back(consumer)
            while not self._stop.is_set():
                taken = [each for each in consumer.consume(self._chance.randint(1, EACH_MAX), 0.2) if not each.error()]
                if taken:
                    self._transact(producer, consumer, taken)
        except confluent_kafka.KafkaException as error:
            # A transaction that may have been open is aborted by the next life, which fences this one.
            self.ends.append(error.args[0])
        finally:
            consumer.close()

    def _transact(self, producer: Any, consumer: Any, taken: list[Any]) -> None:
        producer.begin_transaction()
        for each in taken:
            producer.produce("out", each.value(), partition=int(each.value()) % PARTITIONS)
        behind = confluent_kafka.TopicPartition("in", 0, taken[-1].offset() + 1)
        producer.send_offsets_to_transaction([behind], consumer.consumer_group_metadata(), STEP_S)
        if self._chance.random() < 0.2:
            producer.abort_transaction(STEP_S)
            self._go_back(consumer)
        else:
            producer.commit_transaction(STEP_S)
            self.done += len(taken)

    def _go_back(self, consumer: Any) -> None:
        """To where the last transaction that committed ended."""
        (place,) = consumer.committed([confluent_kafka.TopicPartition("in", 0)], STEP_S)
        consumer.assign([confluent_kafka.TopicPartition("in", 0, max(0, place.offset))])


def committed_in(port: int, topic: str, partition: int) -> list[bytes]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
    found: list[bytes] = []
    until = time.monotonic() + WAIT_S
    try:
        while time.monotonic() < until:
            message = consumer.poll(1.0)
            if message is not None and message.error():
                if message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    return found
            elif message is not None:
                found.append(message.value())
    finally:
        consumer.close()
    raise AssertionError("the end did not come")


def fill(port: int, broker: Broker) -> None:
    with RawClient(port) as client:
        client.create("in")
        client.create("out", PARTITIONS)
    source = confluent_kafka.Producer({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
    for number in range(RECORDS):
        source.produce("in", b"%d" % number)
    assert source.flush(WAIT_S) == 0, broker.log()


@pytest.mark.skipif(KILLS == 0, reason="a client may wait a minute after each kill: set BASALT_KILLS")
@pytest.mark.timeout(400 + 60 * KILLS)
@pytest.mark.promise("P1", "P2")
def test_each_record_is_seen_once_and_in_order_whatever_is_killed(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    port = free_port()
    with running(tmp_path / "data", *flags(port)) as broker:
        fill(port, broker)
        with Worker(port, random.Random(seed + 1)) as worker:
            for _ in range(KILLS):
                goal = worker.done + 1
                until = time.monotonic() + WAIT_S
                while worker.done < min(goal, RECORDS) and time.monotonic() < until:
                    time.sleep(0.01)
                # Anywhere in a transaction, a sync or an answer.
                time.sleep(chance.random() * 0.3)
                broker.kill()
                broker.start()
            wanted = [
                [b"%d" % number for number in range(RECORDS) if number % PARTITIONS == partition]
                for partition in range(PARTITIONS)
            ]
            until = time.monotonic() + WAIT_S
            found = [committed_in(port, "out", partition) for partition in range(PARTITIONS)]
            while sum(map(len, found)) < RECORDS and time.monotonic() < until:
                time.sleep(0.2)
                found = [committed_in(port, "out", partition) for partition in range(PARTITIONS)]
        assert found == wanted, (worker.ends, broker.log())
        assert [committed_in(port, "out", partition) for partition in range(PARTITIONS)] == wanted
