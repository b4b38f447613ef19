"""Groups of the second protocol (KIP-848) with librdkafka: members join, leave and are killed, and so is the broker.

A member commits what it has read before it releases a partition. Whatever happens to members and broker, some member
reads and commits every record, and committed offsets never decrease. No partition has two owners at a time, unless a
member missed its session timeout, which can happen on a busy machine.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.kafka.raw import RawClient
from tests.interop.server import Broker, running

from basaltmq.http_client import path
from basaltmq.protocols.kafka.wire import api as k

WAIT_S = 90.0
POLL_S = 0.02
PARTITIONS = 6
SESSION_MS = 1_500
"""Short, so that the group does not wait long for a killed member."""

GROUP_RESOURCE = 32

VICTIM = """
import sys
import confluent_kafka
consumer = confluent_kafka.Consumer({
    "bootstrap.servers": sys.argv[1], "group.id": sys.argv[2], "group.protocol": "consumer", "client.id": "victim",
    "auto.offset.reset": "earliest", "enable.auto.commit": False, "log_level": 0})
consumer.subscribe([sys.argv[3]])
while True:
    consumer.poll(0.1)
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Start a broker that keeps its ports when it restarts."""
    with running(tmp_path_factory.mktemp("consumers") / "data", "--fila-enabled=false") as started:
        yield started


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as things:
        yield things


def servers(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('kafka')}"


class Reader:
    """A member in its own thread."""

    def __init__(self, group: Group, **settings: Any) -> None:
        self._group = group
        self.name = f"reader-{len(group.readers)}"
        self.shares: frozenset[tuple[str, int]] = frozenset()
        self.handed = 0
        """Number of assignments and revocations."""
        self.errors: list[Any] = []
        self._read: dict[tuple[str, int], int] = {}
        self._stopped = threading.Event()
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": servers(group.broker),
                "group.id": group.name,
                "group.protocol": "consumer",
                "client.id": self.name,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 50,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 100,
                "retry.backoff.ms": 20,
                "log_level": 0,
                **settings,
            }
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._consumer.subscribe(
            [self._group.topic], on_assign=self._given, on_revoke=self._revoked, on_lost=self._lost
        )
        while not self._stopped.is_set():
            message = self._consumer.poll(0.02)
            if message is not None and message.error():
                self.errors.append(message.error())
            elif message is not None:
                place = message.topic(), message.partition()
                self._group.saw(place, message.offset())
                self._read[place] = message.offset() + 1
        self._consumer.close()
        self.shares = frozenset()

    def _given(self, _: Any, places: list[Any]) -> None:
        self.handed += bool(places)
        self._group.given(self.name, places)
        self.shares |= {(each.topic, each.partition) for each in places}

    def _revoked(self, consumer: Any, places: list[Any]) -> None:
        self.handed += bool(places)
        going = [
            confluent_kafka.TopicPartition(each.topic, each.partition, self._read.pop((each.topic, each.partition)))
            for each in places
            if (each.topic, each.partition) in self._read
        ]
        if going:
            with suppress(confluent_kafka.KafkaException):
                # Refused if the member was removed meanwhile. The next owner starts at the previous commit.
                consumer.commit(offsets=going, asynchronous=False)
        self._let_go(places)

    def _lost(self, _: Any, places: list[Any]) -> None:
        self.handed += bool(places)
        self._group.has_lost = True
        for each in places:
            self._read.pop((each.topic, each.partition), None)
        self._let_go(places)

    def _let_go(self, places: list[Any]) -> None:
        self.shares -= {(each.topic, each.partition) for each in places}
        self._group.let_go(self.name, places)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class Group:
    """A group on a topic, and the records that its members read."""

    def __init__(self, broker: Broker, name: str, stack: ExitStack, topic: str, session_ms: int = 30_000) -> None:
        self.broker, self.name, self.topic = broker, name, topic
        self.readers: list[Reader] = []
        self.seen: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.has_lost = False
        self.doubles: list[str] = []
        self._stack = stack
        self._owners: dict[tuple[str, int], str] = {}
        self._committed: dict[int, int] = {}
        self._lock = threading.Lock()
        settings = {"consumer.session.timeout.ms": session_ms, "consumer.heartbeat.interval.ms": 100}
        with RawClient(broker.port("kafka")) as client:
            configs = [{"name": each, "config_operation": 0, "value": str(value)} for each, value in settings.items()]
            resource = {"resource_type": GROUP_RESOURCE, "resource_name": name, "configs": configs}
            response = client.ask(k.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False})
        assert response["responses"][0]["error_code"] == 0, response

    def read(self, **settings: Any) -> Reader:
        reader = Reader(self, **settings)
        self._stack.callback(reader.stop)
        self.readers.append(reader)
        return reader

    def saw(self, place: tuple[str, int], offset: int) -> None:
        with self._lock:
            self.seen[place].add(offset)

    def given(self, reader: str, places: list[Any]) -> None:
        with self._lock:
            for each in places:
                before = self._owners.get((each.topic, each.partition), reader)
                if before != reader:
                    self.doubles.append(f"{each.partition} is {before}'s and given to {reader}")
                self._owners[each.topic, each.partition] = reader

    def let_go(self, reader: str, places: list[Any]) -> None:
        with self._lock:
            for each in places:
                if self._owners.get((each.topic, each.partition)) == reader:
                    del self._owners[each.topic, each.partition]

    def are_shared(self, *readers: Reader, topic: str = "", partitions: int = PARTITIONS) -> bool:
        """Whether these members own all partitions, with counts that differ by at most one."""
        sizes = [sum(name == (topic or self.topic) for name, _ in each.shares) for each in readers]
        return sum(sizes) == partitions and max(sizes) - min(sizes) <= 1

    def wait(self, what: Callable[[], bool]) -> None:
        """Wait until the condition holds, and check the committed offsets meanwhile."""
        until = time.monotonic() + WAIT_S
        while not what():
            self.check_committed()
            assert time.monotonic() < until, [(each.name, each.shares, each.errors) for each in self.readers]
            time.sleep(POLL_S)

    def check_committed(self) -> None:
        asked = {"group_id": self.name, "topics": [{"name": self.topic, "partition_indexes": [*range(PARTITIONS)]}]}
        try:
            with RawClient(self.broker.port("kafka")) as client:
                found = client.ask(k.OFFSET_FETCH, 8, {"groups": [asked], "require_stable": False})["groups"][0]
        except OSError:
            # The broker is restarting.
            return
        for topic in found["topics"]:
            for each in topic["partitions"]:
                at, offset = each["partition_index"], each["committed_offset"]
                assert offset >= self._committed.get(at, -1), f"what is committed of {at} went back"
                self._committed[at] = offset

    def described(self) -> dict[str, Any]:
        with RawClient(self.broker.port("kafka")) as client:
            found = client.ask(k.CONSUMER_GROUP_DESCRIBE, 1, {"group_ids": [self.name]})
            one: dict[str, Any] = found["groups"][0]
            return one


class Load:
    """A producer that sends to every partition until it is stopped."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self.sent = 0
        """By partition."""
        self._topic = topic
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": servers(broker), "linger.ms": 1, "log_level": 0}
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.01):
            for partition in range(PARTITIONS):
                self._producer.produce(self._topic, b"x", partition=partition)
            self.sent += 1
            self._producer.poll(0)

    def stop(self) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(WAIT_S)
            assert self._producer.flush(WAIT_S) == 0


def create(broker: Broker, topic: str, partitions: int = PARTITIONS) -> None:
    with RawClient(broker.port("kafka")) as client:
        client.create(topic, partitions)


@pytest.mark.timeout(300)
def test_all_records_are_read_while_members_join_leave_and_are_killed(broker: Broker, stack: ExitStack) -> None:
    create(broker, "rolled")
    group = Group(broker, "rolling", stack, "rolled", SESSION_MS)
    load = Load(broker, "rolled")
    stack.callback(load.stop)
    command = [sys.executable, "-W", "ignore", "-c", VICTIM, servers(broker), "rolling", "rolled"]
    victim = subprocess.Popen(command)
    stack.callback(victim.kill)
    first, second = group.read(), group.read()

    def has_three() -> bool:
        found = group.described()
        shares = [each["assignment"]["topic_partitions"] for each in found["members"]]
        return len(shares) == 3 and all(sum(len(one["partitions"]) for one in each) == 2 for each in shares)

    group.wait(has_three)
    victim.kill()
    victim.wait(WAIT_S)
    group.wait(lambda: group.are_shared(first, second))
    third = group.read()
    group.wait(lambda: group.are_shared(first, second, third))
    second.stop()
    group.wait(lambda: group.are_shared(first, third))
    load.stop()
    everything = set(range(load.sent))
    group.wait(lambda: all(group.seen["rolled", at] >= everything for at in range(PARTITIONS)))
    first.stop()
    group.wait(lambda: group.are_shared(third))
    third.stop()
    group.check_committed()
    assert group.has_lost or not group.doubles, group.doubles
    assert group.has_lost or not any(each.errors for each in group.readers)


def test_a_pattern_subscription_includes_later_topics_and_the_group_is_described(
    broker: Broker, stack: ExitStack
) -> None:
    create(broker, "seen-1", 2)
    group = Group(broker, "patterned", stack, "^seen-.*")
    reader = group.read()
    group.wait(lambda: len(reader.shares) == 2)
    create(broker, "seen-2", 3)
    create(broker, "unseen-3", 1)
    group.wait(lambda: len(reader.shares) == 5)
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers(broker), "log_level": 0})
    found = admin.describe_consumer_groups(["patterned"])["patterned"].result(WAIT_S)
    assert (found.type, found.partition_assignor) == (confluent_kafka.ConsumerGroupType.CONSUMER, "uniform")
    assert [len(each.assignment.topic_partitions) for each in found.members] == [5]
    listed = admin.list_consumer_groups(types={confluent_kafka.ConsumerGroupType.CONSUMER}).result(WAIT_S)
    assert "patterned" in {each.group_id for each in listed.valid}
    listed = admin.list_consumer_groups(types={confluent_kafka.ConsumerGroupType.CLASSIC}).result(WAIT_S)
    assert "patterned" not in {each.group_id for each in listed.valid}


def test_a_static_member_restarts_without_a_rebalance(broker: Broker, stack: ExitStack) -> None:
    create(broker, "static")
    group = Group(broker, "statics", stack, "static")
    other = group.read()
    static = group.read(**{"group.instance.id": "the-one"})
    group.wait(lambda: group.are_shared(other, static))
    share, epoch, handed = static.shares, group.described()["group_epoch"], other.handed
    static.stop()
    back = group.read(**{"group.instance.id": "the-one"})
    group.wait(lambda: back.shares == share)
    assert group.described()["group_epoch"] == epoch or group.has_lost
    assert other.handed == handed or group.has_lost


def test_unauthorized_use_of_a_group_is_an_error(broker: Broker) -> None:
    broker.call("PUT", path("users", "carol"), {"password": "secret", "tags": []})
    broker.call("PUT", path("permissions", "/", "carol"), {"configure": "", "write": "", "read": "^open-"})
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers(broker),
            "group.id": "closed-group",
            "group.protocol": "consumer",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "carol",
            "sasl.password": "secret",
            "log_level": 0,
        }
    )
    consumer.subscribe(["open-topic"])
    try:
        until = time.monotonic() + WAIT_S
        codes: set[int] = set()
        while confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED not in codes:
            message = consumer.poll(0.1)
            assert time.monotonic() < until, codes
            if message is not None:
                codes.add(message.error().code())
    finally:
        consumer.close()


@pytest.mark.promise("P1")
@pytest.mark.timeout(300)
def test_members_continue_from_committed_offsets_after_kill_9(broker: Broker, stack: ExitStack) -> None:
    create(broker, "outlived")
    group = Group(broker, "outliving", stack, "outlived")
    first, second = group.read(), group.read()
    load = Load(broker, "outlived")
    stack.callback(load.stop)
    group.wait(lambda: group.are_shared(first, second) and load.sent > 50)
    epoch = group.described()["group_epoch"]
    broker.kill()
    broker.start()
    group.wait(lambda: group.has_lost and group.are_shared(first, second))
    assert group.described()["group_epoch"] > epoch
    load.stop()
    group.wait(lambda: all(group.seen["outlived", at] >= set(range(load.sent)) for at in range(PARTITIONS)))
    for reader in group.readers:
        reader.stop()
    group.check_committed()
