"""Acknowledged records exist once and in order, although the broker is killed in between."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.interop.kafka.client_modules import confluent_kafka
from tests.interop.kafka.raw import RawClient, batch_of
from tests.interop.ports import free_port
from tests.interop.server import running

from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.streams.view import StreamView

WAIT_S = 60.0


def flags(port: int) -> tuple[str, ...]:
    return ("--kafka-enabled=true", f"--kafka-port={port}", "--fila-enabled=false")


@pytest.mark.promise("P1")
def test_a_batch_repeated_after_kill_9_is_deduplicated(tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path / "data", *flags(port)) as broker:
        with RawClient(port) as client:
            client.create("again")
            asked = {"transactional_id": None, "transaction_timeout_ms": 0}
            pid = client.ask(k.INIT_PRODUCER_ID, 4, asked)["producer_id"]
            for sequence in range(8):
                batch = batch_of(b"%d" % sequence, producer=(pid, 0, sequence))
                assert client.produce("again", batch)["base_offset"] == sequence
        broker.kill()
        broker.start()
        with RawClient(port) as client:
            assert client.ask(k.INIT_PRODUCER_ID, 4, asked)["producer_id"] > pid
            assert client.produce("again", batch)["base_offset"] == 7
            skipped = client.produce("again", batch_of(b"9", producer=(pid, 0, 9)))
            assert skipped["error_code"] == e.OUT_OF_ORDER_SEQUENCE_NUMBER
            assert client.produce("again", batch_of(b"8", producer=(pid, 0, 8)))["base_offset"] == 8
        assert broker.stop() == 0
        broker.start()
        with RawClient(port) as client:
            assert client.produce("again", batch_of(b"8", producer=(pid, 0, 8)))["base_offset"] == 8
            assert client.fetch("again", 0)["high_watermark"] == 9


@pytest.mark.promise("P9")
def test_a_running_broker_checkpoints_its_index(tmp_path: Path) -> None:
    """Otherwise a start after a crash replays everything since the previous start."""
    batches = 80
    with running(tmp_path / "data", *flags(port := free_port())) as broker:
        with RawClient(port) as client:
            client.create("large")
            for _ in range(batches):
                assert client.produce("large", batch_of(bytes(1_000_000)))["error_code"] == 0
        deadline = time.monotonic() + WAIT_S
        (store,) = (tmp_path / "data" / "vhosts").glob("*/store")
        while True:
            with StreamView.open(store) as view:
                assert view.info("large", 0).records == batches
                assert view._stores is not None
                replayed = view._stores.frames
            if replayed < batches // 2:
                break
            assert time.monotonic() < deadline, f"{replayed} frames are not in the index"
            time.sleep(0.5)
        broker.kill()


def test_committed_offsets_survive_kill_9_and_members_rejoin(tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path / "data", *flags(port)) as broker:
        producer = confluent_kafka.Producer({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
        for number in range(10):
            producer.produce("kept", b"%d" % number)
        assert producer.flush(WAIT_S) == 0
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": f"127.0.0.1:{port}",
                "group.id": "kept",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "heartbeat.interval.ms": 500,
                "log_level": 0,
            }
        )
        consumer.subscribe(["kept"])
        found: list[bytes] = []
        until = time.monotonic() + WAIT_S
        while len(found) < 10 and time.monotonic() < until:
            found += [message.value() for message in consumer.consume(10 - len(found), 0.5) if not message.error()]
        consumer.commit(asynchronous=False)
        broker.kill()
        broker.start()
        producer.produce("kept", b"after")
        assert producer.flush(WAIT_S) == 0
        while len(found) < 11 and time.monotonic() < until:
            found += [message.value() for message in consumer.consume(1, 0.5) if not message.error()]
        consumer.close()
        assert found == [*(b"%d" % number for number in range(10)), b"after"]
