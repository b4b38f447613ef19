"""Exactly once and in order, although the broker is killed repeatedly.

One idempotent producer, the same object through all kills, fills a topic. A worker copies that topic into another one,
in transactions that include its offsets. It survives kills or restarts under the same transactional id, and sometimes
aborts. At the end a new consumer reads the committed records: every record once, in order, in both topics.

The clients of librdkafka have `metadata.recovery.strategy=none`. By default they forget the only broker of a cluster
when it stops, and treat it as another one when it is back. `send_offsets_to_transaction` then waits without a limit for
the forgotten broker (librdkafka issues 5511 and 5456), also with Apache Kafka.
"""

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
from tests.interop.kafka.test_crash import flags
from tests.interop.ports import free_port
from tests.interop.server import running
from tests.unit.streams.view_rig import values

import basaltmq
from basaltmq.pipeline.store_path import store_path
from basaltmq.streams.view import StreamView

KILLS = int(os.environ.get("BASALT_KILLS", "3"))
WAIT_S = 90.0
STEP_S = 20.0
"""How long a client waits for a response before it restarts."""

EACH_MAX = 25
AHEAD_MAX = 300
"""Maximum records that the source is ahead of the copy, so that the test ends soon."""

PARTITIONS = 2
ABORTS = 0.2
LIVES = 0.03


def settings_of(port: int) -> dict[str, Any]:
    return {
        "bootstrap.servers": f"127.0.0.1:{port}",
        "metadata.recovery.strategy": "none",
        "reconnect.backoff.max.ms": 100,
        "log_level": 0,
    }


class Background:
    """Work in a thread during a block. The end of the block raises its error."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._guarded)
        self._error: BaseException | None = None

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopped.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _guarded(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error

    def run(self) -> None:
        raise NotImplementedError


class Source(Background):
    """Writes numbered records to a topic, never far ahead of the worker. One idempotent producer, no transactions."""

    def __init__(self, port: int, worker: Worker) -> None:
        super().__init__()
        self._producer = confluent_kafka.Producer(
            {**settings_of(port), "enable.idempotence": True, "acks": "all", "linger.ms": 1}
        )
        self._worker = worker
        self.sent = self.acknowledged = 0
        self.failed: list[Any] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            if self.sent - self._worker.reached < AHEAD_MAX:
                self._producer.produce("in", b"%d" % self.sent, partition=0, on_delivery=self._reported)
                self.sent += 1
                self._producer.poll(0)
            else:
                self._producer.poll(0.01)
        assert self._producer.flush(WAIT_S) == 0

    def _reported(self, error: Any, _: Any) -> None:
        self.acknowledged += error is None
        self.failed.extend([error] if error else [])


class Worker(Background):
    """Copies records from one topic to another in transactions. It restarts when necessary."""

    def __init__(self, port: int, chance: random.Random) -> None:
        super().__init__()
        self._port = port
        self._chance = chance
        self.reached = 0
        """The offset up to which its transactions were confirmed as committed."""
        self.commits = self.aborts = 0
        self.ends: list[str] = []
        """Why its runs ended."""

    def run(self) -> None:
        while not self.stopped.is_set():
            self._live()

    def _live(self) -> None:
        """One run: until an error that requires a restart, or until a random end within a transaction."""
        producer = confluent_kafka.Producer({**settings_of(self._port), "transactional.id": "worker", "linger.ms": 1})
        consumer = confluent_kafka.Consumer(
            {
                **settings_of(self._port),
                "group.id": "worker",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 20,
            }
        )
        try:
            producer.init_transactions(STEP_S)
            self._go_back(consumer)
            while not self.stopped.is_set() and self._transact(producer, consumer):
                pass
        except confluent_kafka.KafkaException as error:
            # The next run fences this one and aborts its open transaction.
            self.ends.append(str(error.args[0]))
        finally:
            consumer.close()

    def _transact(self, producer: Any, consumer: Any) -> bool:
        """Run one transaction. Return False if the run ends within it."""
        taken = [each for each in consumer.consume(self._chance.randint(1, EACH_MAX), 0.1) if not each.error()]
        if not taken:
            return True
        producer.begin_transaction()
        for each in taken:
            producer.produce("out", each.value(), partition=int(each.value()) % PARTITIONS)
        behind = confluent_kafka.TopicPartition("in", 0, taken[-1].offset() + 1)
        producer.send_offsets_to_transaction([behind], consumer.consumer_group_metadata(), STEP_S)
        if self._chance.random() < LIVES:
            self.ends.append("by chance")
            return False
        if self._chance.random() < ABORTS:
            producer.abort_transaction(STEP_S)
            self.aborts += 1
            self._go_back(consumer)
        else:
            producer.commit_transaction(STEP_S)
            self.commits += 1
            self.reached = behind.offset
        return True

    def _go_back(self, consumer: Any) -> None:
        """Seek to the end of the last committed transaction."""
        (place,) = consumer.committed([confluent_kafka.TopicPartition("in", 0)], STEP_S)
        self.reached = max(0, place.offset)
        consumer.assign([confluent_kafka.TopicPartition("in", 0, self.reached)])


def committed_in(port: int, topic: str, partition: int) -> list[bytes]:
    consumer = confluent_kafka.Consumer(
        {
            **settings_of(port),
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
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


@pytest.mark.timeout(400 + 60 * KILLS)
@pytest.mark.promise("P1", "P2")
def test_each_record_is_read_once_and_in_order_after_kills(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    port = free_port()
    with running(tmp_path / "data", *flags(port)) as broker:
        with RawClient(port) as client:
            client.create("in")
            client.create("out", PARTITIONS)
        with Worker(port, random.Random(seed + 1)) as worker, Source(port, worker) as source:

            def wait_until(reached: int) -> None:
                until = time.monotonic() + WAIT_S
                while worker.reached < reached:
                    assert time.monotonic() < until, (worker.ends, source.failed, broker.log())
                    time.sleep(0.005)

            for _ in range(KILLS):
                wait_until(worker.reached + 1)
                # Anywhere in a transaction, a sync or a response.
                time.sleep(chance.random() * 0.2)
                broker.kill()
                broker.start()
            wait_until(worker.reached + 1)
            source.stop()
            wait_until(source.sent)
        print(f"{source.sent} records, {worker.commits} commits, {worker.aborts} aborts, lives ended: {worker.ends}")
        assert not source.failed
        assert source.acknowledged == source.sent
        copied = [[b"%d" % each for each in range(at, source.sent, PARTITIONS)] for at in range(PARTITIONS)]
        assert committed_in(port, "in", 0) == [b"%d" % number for number in range(source.sent)]
        assert [committed_in(port, "out", partition) for partition in range(PARTITIONS)] == copied
        place = store_path(tmp_path / "data")
        with StreamView.open(place) as view:
            assert [values(view, "out", partition) for partition in range(PARTITIONS)] == copied, "as Spark reads it"
        assert broker.stop() == 0
    with basaltmq.open(place) as db:
        topic = db.topic("out", create=False)
        found = [[each.value for each in topic.read(partition)] for partition in range(PARTITIONS)]
        assert found == copied, "as the embedded API does"
