"""A broker on a store with a damaged block in an SST file, without a repair: what it still serves.

The first block of all tables of one family of the virtual host `/` is damaged.
"""

from __future__ import annotations

from pathlib import Path

import pika
import pytest
from tests.interop.server import Broker

from basaltmq.broker.vhost_directory import VHostDirectories
from basaltmq.client import Client
from basaltmq.errors import BasaltError
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.salvage.files import table_family

WAIT_S = 60
QUEUES = {"brief": 100, "long": 6_000, "large": 60_000, "timed": 100}
"""Queues and the size of their messages."""

COUNT = 5
PERSISTENT = pika.BasicProperties(delivery_mode=2)
VHOSTS = ("/", "other")


def connect(broker: Broker, vhost: str) -> pika.BlockingConnection:
    name = "%2F" if vhost == "/" else vhost
    return pika.BlockingConnection(pika.URLParameters(broker.url("amqp", vhost=name)))


def publish(broker: Broker, vhost: str, mark: str, count: int) -> None:
    connection = connect(broker, vhost)
    channel = connection.channel()
    channel.confirm_delivery()
    for name, size in QUEUES.items():
        arguments = {"x-message-ttl": 3_600_000} if name == "timed" else {}
        channel.queue_declare(name, durable=True, arguments=arguments)
        for number in range(count):
            channel.basic_publish("", name, f"{mark} {number} ".encode().ljust(size, b"."), PERSISTENT)
    connection.close()


def publish_to_stream(broker: Broker) -> None:
    connection = connect(broker, "/")
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("stream", durable=True, arguments={"x-queue-type": "stream"})
    channel.basic_publish("", "stream", b"record")
    connection.close()


def take(broker: Broker, vhost: str, queue: str, last: str) -> list[str]:
    """Consume up to the message `last`. Return the marks of all messages."""
    connection = connect(broker, vhost)
    channel = connection.channel()
    found: list[str] = []
    for method, _, body in channel.consume(queue, inactivity_timeout=WAIT_S):
        assert method is not None, f"{vhost} {queue}: only {found} came"
        channel.basic_ack(method.delivery_tag)
        found.append(body.decode().rstrip(". "))
        if found[-1] == last:
            break
    connection.close()
    return found


def harm(store: Path, family: Family) -> None:
    tables = [each for each in (store / "kv").glob("*.sst") if table_family(each)[0] == family.label]
    assert tables, "no row of the family is flushed"
    for table in tables:
        data = bytearray(table.read_bytes())
        data[12] ^= 4
        table.write_bytes(data)


@pytest.mark.spec("A12")
@pytest.mark.promise("P1", "P7", "P11")
@pytest.mark.parametrize(
    "family",
    [Family.MESSAGES, Family.BODY_PLACES, Family.BODY_FILES, Family.TIMERS, Family.SHARDS],
    ids=lambda each: each.label,
)
def test_every_queue_serves_new_messages(own_broker: Broker, family: Family) -> None:
    broker = own_broker
    broker.call("PUT", "/api/vhosts/other", {})
    broker.call("PUT", "/api/permissions/other/guest", {"configure": ".*", "write": ".*", "read": ".*"})
    for vhost in VHOSTS:
        publish(broker, vhost, "before", COUNT)
    publish_to_stream(broker)
    with Client(f"127.0.0.1:{broker.port('fila')}") as client:
        client.create_queue("leased")
        client.enqueue("leased", [b"leased"])
        assert len(client.lease("leased", 1, wait=WAIT_S)) == 1
    assert broker.stop() == 0
    store = VHostDirectories(broker.data_dir).store("/")
    with_rows = open_store(store, create=False)
    with_rows.compact()
    with_rows.close()
    harm(store, family)
    broker.start()
    for vhost in VHOSTS:
        # Confirmed before the damage is found, and after it.
        publish(broker, vhost, "found", 1)
        for name in QUEUES:
            before = [f"before {number}" for number in range(COUNT)]
            found = take(broker, vhost, name, "found 0")
            assert found[-1] == "found 0"
            assert vhost == "/" or found == [*before, "found 0"]
        publish(broker, vhost, "after", 1)
        for name in QUEUES:
            assert take(broker, vhost, name, "after 0") == ["after 0"]
    if family is not Family.SHARDS:
        with pytest.raises(BasaltError, match="unreadable rows: /"):
            broker.call("GET", "/api/health/checks/store-damage")
    assert "Traceback" not in broker.log()
