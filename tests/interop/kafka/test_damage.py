"""A batch that cannot be read: consumers skip it, and the loss is named. `skip_damaged` off: CORRUPT_MESSAGE."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.server import Broker, running

from basaltmq.cli.main import main
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import scan

WAIT_S = 60
FLAGS = ("--kafka-enabled=true", "--kafka-port=0", "--fila-enabled=false")
BATCHES = 5
DAMAGED = 2


def servers(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('kafka')}"


def produce(broker: Broker, topic: str, *, transactional: bool = False) -> None:
    """One batch for each record."""
    options = {"bootstrap.servers": servers(broker), "linger.ms": 0, "enable.idempotence": True}
    if transactional:
        options["transactional.id"] = "damage"
    producer = confluent_kafka.Producer(options)
    if transactional:
        producer.init_transactions(WAIT_S)
    for at in range(BATCHES):
        if transactional:
            producer.begin_transaction()
        producer.produce(topic, b"value-%d" % at, partition=0)
        assert producer.flush(WAIT_S) == 0
        if transactional:
            producer.commit_transaction(WAIT_S) if at != 1 else producer.abort_transaction(WAIT_S)


def damage(broker: Broker, find: bytes) -> None:
    """Change a byte of a record in the log of a running broker."""
    (segment,) = (path for path in broker.data_dir.glob("vhosts/*/store/log/*/*.log") if find in path.read_bytes())
    raw = segment.read_bytes()
    at = raw.index(find)
    with open(segment, "r+b") as file:
        file.seek(at)
        file.write(bytes((raw[at] ^ 1,)))


def got(broker: Broker, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", broker.port("admin"), timeout=WAIT_S)
    try:
        login = base64.b64encode(b"guest:guest").decode()
        connection.request("GET", path, headers={"Authorization": f"Basic {login}"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def consume(broker: Broker, topic: str, count: int, **more: Any) -> tuple[list[bytes], list[Any]]:
    """Return `count` values in order, or fewer before an error, and the errors."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": servers(broker),
            "group.id": f"damage-{time.monotonic_ns()}",
            "auto.offset.reset": "earliest",
            **more,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    found: list[bytes] = []
    errors: list[Any] = []
    until = time.monotonic() + WAIT_S
    try:
        while len(found) < count and not errors and time.monotonic() < until:
            message = consumer.poll(0.2)
            if message is not None and message.error():
                errors.append(message.error())
            elif message is not None:
                found.append(message.value())
    finally:
        consumer.close()
    return found, errors


@pytest.mark.promise("P7")
def test_consumers_skip_a_damaged_batch_and_its_offsets_are_logged(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        produce(broker, "orders")
        damage(broker, b"value-%d" % DAMAGED)
        expected = [b"value-%d" % at for at in range(BATCHES) if at != DAMAGED]
        assert consume(broker, "orders", len(expected)) == (expected, [])
        said = f"topic 'orders', partition 0: offsets {DAMAGED} to {DAMAGED} cannot be read; consumers skip them"
        assert broker.log().count(said) == 1
        status, checked = got(broker, "/api/health/checks/store-damage")
        assert status == 503
        assert json.loads(checked)["frames"] == {"/": [f"topic 'orders'[0], offsets {DAMAGED} to {DAMAGED}"]}
        assert 'basalt_log_damaged_frames{vhost="/"} 1' in got(broker, "/metrics")[1]
        # The topic remains usable: a restarted producer and retention also read the damaged part.
        broker.stop()
        broker.start()
        produce(broker, "orders")
        expected += [b"value-%d" % at for at in range(BATCHES)]
        assert consume(broker, "orders", len(expected)) == (expected, [])


@pytest.mark.promise("P7")
@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
def test_kcat_reads_past_a_damaged_batch_at_the_end(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        produce(broker, "orders")
        damage(broker, b"value-%d" % (BATCHES - 1))
        said = subprocess.run(
            ["kcat", "-C", "-b", servers(broker), "-t", "orders", "-p", "0", "-o", "beginning", "-e", "-q"],
            capture_output=True,
            timeout=WAIT_S,
            check=True,
        )
        assert said.stdout.split() == [b"value-%d" % at for at in range(BATCHES - 1)]


@pytest.mark.promise("P7")
def test_a_damaged_abort_marker_hides_no_later_transaction(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        produce(broker, "orders", transactional=True)
        (segment,) = broker.data_dir.glob("vhosts/*/store/log/*/*.log")
        raw = segment.read_bytes()
        # The marker's key: version 0, type 0 (abort). The frame of "value-1" precedes it.
        at = raw.index(b"\x08\0\0\0\0\x0c", raw.index(b"value-1"))
        with open(segment, "r+b") as file:
            file.seek(at)
            file.write(b"\x09")
        expected = [b"value-%d" % at for at in range(BATCHES) if at != 1]
        assert consume(broker, "orders", len(expected), **{"isolation.level": "read_committed"}) == (expected, [])
        assert "cannot be read; consumers skip them" in broker.log()


@pytest.mark.promise("P7")
def test_a_damaged_batch_is_an_error_if_it_must_not_be_skipped(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS, "--kafka-skip-damaged=false") as broker:
        produce(broker, "orders")
        damage(broker, b"value-%d" % DAMAGED)
        found, errors = consume(broker, "orders", BATCHES)
        assert found == [b"value-%d" % at for at in range(DAMAGED)]
        assert [error.code() for error in errors] == [confluent_kafka.KafkaError.INVALID_MSG]


@pytest.mark.promise("P7")
def test_a_truncated_log_or_a_failed_store_fails_the_health_check(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        produce(broker, "orders")
        broker.stop()
        (segment,) = broker.data_dir.glob("vhosts/*/store/log/*/*.log")
        raw = segment.read_bytes()
        segment.write_bytes(raw[: raw.index(b"value-%d" % DAMAGED)])
        broker.start()
        assert consume(broker, "orders", DAMAGED) == ([b"value-%d" % at for at in range(DAMAGED)], [])
        status, checked = got(broker, "/api/health/checks/store-damage")
        assert status == 503
        found = json.loads(checked)["log"]["/"]
        assert any(f"has lost offsets {DAMAGED} to {BATCHES - 1}" in line for line in found)
        broker.kill()
        (kept,) = broker.data_dir.glob("vhosts/*/store/quarantine/log-losses.txt")
        assert kept.read_text().splitlines() == found
        (current,) = broker.data_dir.glob("vhosts/*/store/kv/CURRENT")
        current.unlink()
        broker.start()
        status, checked = got(broker, "/api/health/checks/store-damage")
        assert (status, list(json.loads(checked)["down"])) == (503, ["/"])
        assert "CURRENT" in json.loads(checked)["reason"]


@pytest.mark.promise("P7")
def test_a_lost_commit_loses_the_records_of_its_transaction_and_verify_names_them(tmp_path: Path) -> None:
    with running(tmp_path / "data", *FLAGS) as broker:
        produce(broker, "orders", transactional=True)
        broker.stop()
        (segment,) = broker.data_dir.glob("vhosts/*/store/log/*/*.log")
        with contextlib.closing(LaneView(segment.parent)) as lane:
            marker = [found.position for found in scan(lane, lane.start)][-1]
        os.truncate(segment, marker)
        store = segment.parents[2]
        response = CliRunner().invoke(main, ["--data-dir", str(store), "store", "verify", "--json"])
    # Each transaction has a record and a marker.
    last = 2 * BATCHES - 1
    assert f"lost: shard 1, offsets {last - 1} to {last} (topic 'orders'[0])" in response.output
