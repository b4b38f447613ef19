"""A disk that fills up, with a real broker on a small file system: blocked publishers, draining consumers, recovery.

The test needs the permission to mount a tmpfs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pika
import pika.exceptions
import pytest
from tests.fixtures.small_disk import MIB, fill, small_disk_at
from tests.interop.serve.test_blocked_publishers import eventually, refused
from tests.interop.server import Broker, running

from basaltmq.errors import RemoteError
from basaltmq.http_client import path
from basaltmq.store.space.reserve import NAME as RESERVE

BODY_BYTES = 128 << 10
WAIT_S = 60.0
ALARMS = path("health", "checks", "alarms")
LOW = "low on disk"
RETRIABLE = (7, 15, 56)
"""Kafka's REQUEST_TIMED_OUT, COORDINATOR_NOT_AVAILABLE and KAFKA_STORAGE_ERROR."""
pytestmark = [pytest.mark.spec("A11"), pytest.mark.promise("P8")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "data", 192 * MIB) as where:
        yield where


class Publishing:
    """A thread that publishes numbered persistent messages, each confirmed before the next. It reconnects."""

    def __init__(self, broker: Broker, queue: str) -> None:
        self.confirmed: list[int] = []
        self.refused: list[str] = []
        self._broker = broker
        self._queue = queue
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def end(self) -> None:
        """Stop, and wait for the message in flight."""
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                with contextlib.closing(pika.BlockingConnection(pika.URLParameters(self._broker.url()))) as connection:
                    channel = connection.channel()
                    channel.confirm_delivery()
                    while not self._stop.is_set():
                        number += 1
                        body = (b"%d " % number).ljust(BODY_BYTES, b"x")
                        channel.basic_publish("", self._queue, body, pika.BasicProperties(delivery_mode=2))
                        self.confirmed.append(number)
            except (pika.exceptions.AMQPError, OSError) as error:
                self.refused.append(repr(error))
                self._stop.wait(0.2)


def held(publishing: Publishing) -> set[int]:
    """Return the confirmed messages once no more are confirmed."""
    while True:
        before = len(publishing.confirmed)
        time.sleep(1)
        if len(publishing.confirmed) == before:
            return set(publishing.confirmed)


def drain(broker: Broker, queue: str, at_least: set[int]) -> None:
    """Acknowledge messages until all of these have been received. Reconnect if necessary."""
    missing = set(at_least)
    until = time.monotonic() + WAIT_S
    while missing:
        assert time.monotonic() < until, f"{len(missing)} messages are missing\n{broker.log()[-3000:]}"
        with (
            contextlib.suppress(pika.exceptions.AMQPError, OSError),
            contextlib.closing(pika.BlockingConnection(pika.URLParameters(broker.url()))) as connection,
        ):
            channel = connection.channel()
            channel.basic_qos(prefetch_count=100)
            for method, _, body in channel.consume(queue, inactivity_timeout=1.0):
                if method is None:
                    break
                channel.basic_ack(method.delivery_tag)
                missing.discard(int(body.split(b" ", 1)[0]))
                if not missing:
                    break
            channel.cancel()


def alarm(broker: Broker, about: str = LOW) -> str | None:
    """Return the text of the failed health check if it contains this. A store may be behind with compaction
    meanwhile."""
    try:
        broker.call("GET", ALARMS)
    except RemoteError as error:
        return str(error) if error.status == 503 and about in str(error) else None
    return None


def declare(broker: Broker, queue: str) -> None:
    broker.call("PUT", path("queues", "/", queue), {"durable": True})


def test_the_disk_alarm_clears_after_consumers_emptied_the_queue(small_disk: Path) -> None:
    with running(small_disk, f"--disk-free-min={80 * MIB}", f"--disk-reserve={16 * MIB}") as broker:
        declare(broker, "jobs")
        with Publishing(broker, "jobs") as publishing:
            eventually(lambda: bool(alarm(broker)), "the disk fills up")
            confirmed = held(publishing)
            drain(broker, "jobs", confirmed)
            # Without a command: the broker compacts by itself.
            eventually(lambda: not alarm(broker), f"the alarm goes out\n{broker.log()}")
            eventually(lambda: len(publishing.confirmed) > len(confirmed) + 10, "publishing goes on")
            publishing.end()
            assert publishing.refused == []


@pytest.mark.promise("P1", "P11")
def test_consumers_drain_a_full_disk_and_publishing_resumes(small_disk: Path) -> None:
    with running(small_disk, "--disk-free-min=1MiB", f"--disk-reserve={48 * MIB}") as broker:
        declare(broker, "jobs")
        assert (small_disk / RESERVE).stat().st_size == 48 * MIB
        with Publishing(broker, "jobs") as publishing:
            eventually(lambda: "released the reserve" in broker.log(), "the disk is full")
            eventually(lambda: bool(publishing.refused), "the publisher is told")
            eventually(lambda: bool(alarm(broker)), "the alarm is on")
            eventually(lambda: broker.call("GET", path("vhosts", "/"))["state"] == "running", "it comes back")
            confirmed = set(publishing.confirmed)
            assert len(confirmed) > 100
            drain(broker, "jobs", confirmed)
            eventually(lambda: not alarm(broker), f"space has come back\n{broker.log()[-5000:]}")
            assert (small_disk / RESERVE).stat().st_size == 48 * MIB
            eventually(lambda: len(publishing.confirmed) > len(confirmed) + 10, "publishing goes on")
            publishing.end()


@pytest.mark.promise("P1", "P11")
def test_a_virtual_host_restarts_when_other_programs_free_space(small_disk: Path) -> None:
    """The reserve is used up, and no consumer frees space."""
    other = small_disk / "somebody else's"
    with running(small_disk, "--disk-free-min=1MiB", "--disk-reserve=0") as broker:
        declare(broker, "jobs")
        with Publishing(broker, "jobs") as publishing:
            eventually(lambda: len(publishing.confirmed) > 100, "messages are confirmed")
            fill(other)
            eventually(lambda: "no space left" in broker.log(), "the disk is full")
            until = time.monotonic() + 8
            while time.monotonic() < until:
                # More restarts than the limit for other errors: it never stays down.
                assert broker.call("GET", path("vhosts", "/"))["state"] != "down"
                assert alarm(broker)
                with contextlib.suppress(OSError):
                    fill(other)
                time.sleep(0.5)
            confirmed = set(publishing.confirmed)
            other.unlink()
            eventually(lambda: not alarm(broker), f"the alarm goes out\n{broker.log()[-5000:]}")
            eventually(lambda: len(publishing.confirmed) > len(confirmed), "publishing goes on")
            publishing.end()
            drain(broker, "jobs", set(publishing.confirmed))
            assert "stays down" not in broker.log()


@pytest.mark.promise("P1")
@pytest.mark.parametrize("free_min", [80 * MIB, MIB])
def test_kafka_producers_get_a_retriable_error_and_a_deleted_topic_frees_its_segment(
    small_disk: Path, free_min: int
) -> None:
    """With the larger limit they are blocked. With the smaller one a write fails."""
    from confluent_kafka import KafkaError, Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    flags = (f"--disk-free-min={free_min}", f"--disk-reserve={48 * MIB}", "--kafka-enabled=true")
    with running(small_disk, *flags) as broker:
        server: dict[str, Any] = {"bootstrap.servers": f"127.0.0.1:{broker.port('kafka')}"}
        admin = AdminClient(server)
        for future in admin.create_topics([NewTopic("events", 1, 1)]).values():
            future.result(WAIT_S)
        results: list[Any] = []
        producer = Producer(server | {"request.timeout.ms": 3000, "retries": 0, "linger.ms": 0})
        until = time.monotonic() + WAIT_S
        while not any(results) and time.monotonic() < until:
            producer.produce("events", bytes(256 << 10), on_delivery=lambda error, _: results.append(error))
            producer.flush(WAIT_S)
        error = next(each for each in results if each)
        # The client's own code, if the connection was closed.
        assert error.code() in (*RETRIABLE, KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._MSG_TIMED_OUT)
        confirmed = sum(each is None for each in results)
        assert confirmed > 100
        eventually(lambda: bool(alarm(broker)), "the alarm is on")
        eventually(lambda: broker.call("GET", path("vhosts", "/"))["state"] == "running", "it serves")
        assert consumed(server, confirmed) >= confirmed
        for future in admin.delete_topics(["events"]).values():
            future.result(WAIT_S)
        eventually(lambda: not alarm(broker), f"the space of the topic is free\n{broker.log()}")
        eventually(lambda: log_bytes(small_disk) < MIB, "the segment is gone")


def log_bytes(data: Path) -> int:
    """Return the size of the segments of all lanes."""
    with contextlib.suppress(FileNotFoundError):
        return sum(each.stat().st_size for each in data.glob("vhosts/*/store/log/*/*.log"))
    # A segment was deleted between the listing and `stat`.
    return MIB


def consumed(server: dict[str, Any], wanted: int) -> int:
    """Return the number of records that a consumer reads, at most `wanted`."""
    from confluent_kafka import Consumer

    consumer = Consumer(server | {"group.id": "drain", "auto.offset.reset": "earliest"})
    consumer.subscribe(["events"])
    count = 0
    until = time.monotonic() + WAIT_S
    while count < wanted and time.monotonic() < until:
        message = consumer.poll(1.0)
        count += message is not None and message.error() is None
    consumer.close()
    return count


def test_the_size_limit_of_a_virtual_host_counts_its_log(tmp_path: Path) -> None:
    with running(tmp_path / "data", f"--disk-vhost-max={16 * MIB}") as broker:
        broker.call("PUT", path("queues", "/", "stream"), {"durable": True, "arguments": {"x-queue-type": "stream"}})
        with Publishing(broker, "stream") as publishing:
            over = "its limit is 16MiB"
            eventually(lambda: bool(alarm(broker, over)), "it is over its size")
            assert refused(broker.call, "GET", ALARMS).status == 503
            broker.call("DELETE", path("queues", "/", "stream"))
            eventually(lambda: not alarm(broker, over), "the space of the stream is free")
            publishing.end()
