"""A broker whose store has damaged rows of queues: the responses to AMQP and gRPC clients, and the operator's view."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pika
import pytest
from tests.interop.server import ROOT, Broker

from basaltmq.broker.vhost_directory import VHostDirectories
from basaltmq.client import Client
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.parts import lp
from basaltmq.store.keys.queues import queue_stats_key
from basaltmq.store.open import open_store

WAIT_S = 30
COUNT = 6


def basalt(broker: Broker, *arguments: str) -> str:
    """Run a command against the broker and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "basaltmq.cli", *arguments],
        capture_output=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "", "BASALT_PASSWORD": "guest"},
    )
    assert done.returncode in (0, 2), done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture
def damaged(own_broker: Broker) -> tuple[Broker, Path]:
    """Start a broker with two queues of six messages. Two messages have damaged rows and one has no body."""
    broker = own_broker
    connection = pika.BlockingConnection(pika.URLParameters(broker.url("amqp")))
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("amqp", durable=True)
    for number in range(COUNT):
        body = b"%d" % number if number < COUNT - 1 else b"%d" % number + b"." * 6000
        channel.basic_publish("", "amqp", body, pika.BasicProperties(delivery_mode=2))
    connection.close()
    with Client(f"127.0.0.1:{broker.port('fila')}") as client:
        client.create_queue("grpc")
        client.enqueue("grpc", [b"%d" % number for number in range(COUNT)])
    broker.stop()
    path = VHostDirectories(broker.data_dir).store("/")
    store = open_store(path, create=False)
    try:
        batch = Batch()
        for name in ("amqp", "grpc"):
            rows = list(store.scan(Family.MESSAGES, lp(name), lp(name) + b"\xff"))
            batch.put(Family.MESSAGES, rows[0][0], rows[0][1][:9])
            batch.put(Family.MESSAGES, rows[2][0], b"\x7f" + rows[2][1][1:])
        for key, _ in store.scan(Family.MESSAGE_CONTENT):
            batch.delete(Family.MESSAGE_CONTENT, key)
        batch.put(Family.QUEUE_STATS, queue_stats_key("grpc"), b"")
        store.write(batch)
        store.sync()
    finally:
        store.close()
    broker.start()
    return broker, path


@pytest.mark.spec("A12")
@pytest.mark.promise("P7", "P11")
def test_clients_get_undamaged_messages_and_operators_see_damaged_rows(damaged: tuple[Broker, Path]) -> None:
    broker, path = damaged
    connection = pika.BlockingConnection(pika.URLParameters(broker.url("amqp")))
    channel = connection.channel()
    found: list[bytes] = []
    for method, _, body in channel.consume("amqp", inactivity_timeout=WAIT_S):
        assert method is not None, f"only {found} came"
        channel.basic_ack(method.delivery_tag)
        found.append(body)
        if len(found) == 3:
            break
    assert found == [b"1", b"3", b"4"]
    channel.basic_publish("", "amqp", b"after")
    method, _, body = next(iter(channel.consume("amqp", inactivity_timeout=WAIT_S)))
    assert body == b"after"
    channel.basic_ack(method.delivery_tag)
    connection.close()

    with Client(f"127.0.0.1:{broker.port('fila')}") as client:
        messages = client.lease("grpc", COUNT, wait=WAIT_S)
        assert [each.payload for each in messages] == [b"1", b"3", b"4", b"5"]
        assert client.ack(messages) == 4
        assert client.lease("grpc") == []

    for name, expected in (("amqp", 3), ("grpc", 3)):
        shown: dict[str, Any] = broker.call("GET", f"/api/queues/%2F/{name}")
        assert (shown["quarantined"], shown["state"], shown["messages_ready"]) == (expected, "running", 0)
    rows = broker.call("GET", "/api/quarantine/%2F", queue="amqp")
    assert {row["family"] for row in rows} == {"messages"}
    assert [row["queue"] for row in rows] == ["amqp"] * 3
    whole = broker.call("GET", f"/api/quarantine/%2F/{rows[0]['id']}")
    assert whole["value"]
    with urllib.request.urlopen(f"{broker.url('admin')}/metrics", timeout=WAIT_S) as answer:  # noqa: S310
        metrics = answer.read().decode()
    assert 'basalt_rows_quarantined{vhost="/"} 6' in metrics
    assert 'basalt_queue_rows_quarantined{vhost="/"} 6' in metrics
    assert rows[0]["message_id"] in broker.log(), "the log names queue and message"

    server = ("--server", broker.url("admin"))
    listed = json.loads(basalt(broker, "queue", "quarantine", "list", *server, "--json"))
    assert len(listed) == 6
    assert "restarted" in basalt(broker, "queue", "restart", "amqp", *server)
    assert broker.call("GET", "/api/queues/%2F/amqp")["messages_ready"] == 0
    assert "1 rows deleted" in basalt(broker, "queue", "quarantine", "delete", rows[0]["id"], "--yes", *server)
    assert len(broker.call("GET", "/api/quarantine/%2F")) == 5
    broker.stop()
    report = basalt(broker, "store", "verify", str(path), "--json")
    for row in rows[1:]:
        assert row["id"] in report
    assert rows[0]["id"] not in report
    assert basalt(broker, "--data-dir", str(path), "queue", "quarantine", "export").count("\n") == 5
