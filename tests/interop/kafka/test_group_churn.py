"""Groups whose members are replaced, with every assignor of librdkafka: no record is skipped or read twice.

Each group reads the same topic with three members while records arrive. The members are replaced one after the other,
BASALT_CHURN times. A member commits what it has read when its partitions are revoked. At the end every group has read
every record, in order within each partition, and its members own disjoint partitions.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from typing import Any

import pytest
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.kafka.raw import RawClient
from tests.interop.server import Broker

ROLLS = int(os.environ.get("BASALT_CHURN", "0"))
ASSIGNORS = ("range", "roundrobin", "cooperative-sticky")
PARTITIONS = 6
MEMBERS = 3
WAIT_S = 90.0


class Member:
    """A consumer in its own thread."""

    def __init__(self, group: Group, broker: Broker) -> None:
        self._group = group
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": f"127.0.0.1:{broker.port('kafka')}",
                "group.id": group.name,
                "partition.assignment.strategy": group.name,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "heartbeat.interval.ms": 200,
                "session.timeout.ms": 30_000,
                "fetch.wait.max.ms": 50,
                "log_level": 0,
            }
        )
        self.shares: frozenset[int] = frozenset()
        self._read: dict[int, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._consumer.subscribe(["churned"], on_revoke=self._revoked, on_lost=self._lost)
        while not self._stopped.is_set():
            message = self._consumer.poll(0.05)
            if message is not None and not message.error():
                self._group.saw(message.partition(), message.offset())
                self._read[message.partition()] = message.offset() + 1
            self.shares = frozenset(each.partition for each in self._consumer.assignment())
        self._consumer.close()

    def _revoked(self, consumer: Any, places: list[Any]) -> None:
        going = [
            confluent_kafka.TopicPartition("churned", each.partition, self._read.pop(each.partition))
            for each in places
            if each.partition in self._read
        ]
        if not going:
            return
        try:
            consumer.commit(offsets=going, asynchronous=False)
        except confluent_kafka.KafkaException:
            # Refused while the group rebalances. The next owner starts at the previous commit.
            self._group.is_exact = False

    def _lost(self, _: Any, places: list[Any]) -> None:
        self._group.is_exact = False
        for each in places:
            self._read.pop(each.partition, None)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class Group:
    def __init__(self, name: str, broker: Broker) -> None:
        self.name = name
        self._broker = broker
        self._lock = threading.Lock()
        self.seen: dict[int, list[int]] = defaultdict(list)
        self.is_exact = True
        """Whether every partition was released with all read records committed."""
        self.members = [Member(self, broker) for _ in range(MEMBERS)]

    def saw(self, partition: int, offset: int) -> None:
        with self._lock:
            self.seen[partition].append(offset)

    def replace(self, at: int) -> None:
        self.members[at].stop()
        self.members[at] = Member(self, self._broker)

    def is_shared_out(self) -> bool:
        shares = [each.shares for each in self.members]
        return len(frozenset().union(*shares)) == PARTITIONS == sum(map(len, shares))


@pytest.mark.skipif(ROLLS == 0, reason="nine clients come and go: BASALT_CHURN says how often")
@pytest.mark.timeout(300 + 60 * ROLLS)
def test_every_assignor_reads_everything_while_members_are_replaced(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("churned", PARTITIONS)
    producer = confluent_kafka.Producer({"bootstrap.servers": f"127.0.0.1:{kafka.port('kafka')}", "log_level": 0})
    sent = [0] * PARTITIONS

    def send(count: int) -> None:
        for number in range(count):
            producer.produce("churned", b"x", partition=number % PARTITIONS)
            sent[number % PARTITIONS] += 1
        assert producer.flush(WAIT_S) == 0

    def wait(what: Any) -> None:
        until = time.monotonic() + WAIT_S
        while not all(what(group) for group in groups):
            assert time.monotonic() < until, [(group.name, [each.shares for each in group.members]) for group in groups]
            time.sleep(0.02)

    groups: list[Group] = []
    try:
        groups += [Group(name, kafka) for name in ASSIGNORS]
        send(60)
        wait(Group.is_shared_out)
        for number in range(ROLLS):
            going = [threading.Thread(target=group.replace, args=(number % MEMBERS,)) for group in groups]
            for each in going:
                each.start()
            send(60)
            for each in going:
                each.join(WAIT_S)
            wait(Group.is_shared_out)
        send(60)
        wait(lambda group: all(len(set(group.seen[at])) == sent[at] for at in range(PARTITIONS)))
    finally:
        for group in groups:
            for member in group.members:
                member.stop()
    for group in groups:
        for partition in range(PARTITIONS):
            seen = group.seen[partition]
            # If records are committed before a partition is released, they are read once and in order.
            assert (seen if group.is_exact else sorted(set(seen))) == list(range(sent[partition])), group.name
