"""Topic settings under their Kafka names: described, altered, and applied to producers."""

from __future__ import annotations

import gzip
import time
from typing import Any

import pytest
from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.client_modules import confluent_kafka, kafka_python
from tests.interop.kafka.raw import RawClient, batch_of
from tests.interop.server import Broker
from tests.log_frames import encode_plain

from basaltmq.log.batches.kafka import read_header, recompressed
from basaltmq.log.batches.record import Record
from basaltmq.protocols.kafka.admin.topic_settings import SETTINGS
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e

WAIT_S = 60.0
TOPIC = 2
BROKER = 4
DYNAMIC_TOPIC = 1
DEFAULT = 5
SET, DELETE, APPEND, SUBTRACT = range(4)

APACHE_KAFKA = {
    "cleanup.policy": "delete",
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.type": "producer",
    "compression.zstd.level": "3",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": "9223372036854775807",
    "flush.ms": "9223372036854775807",
    "follower.replication.throttled.replicas": "",
    "index.interval.bytes": "4096",
    "leader.replication.throttled.replicas": "",
    "local.retention.bytes": "-2",
    "local.retention.ms": "-2",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.message.bytes": None,
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "remote.log.copy.disable": "false",
    "remote.log.delete.on.disable": "false",
    "remote.storage.enable": "false",
    "retention.bytes": "-1",
    "retention.ms": None,
    "segment.bytes": "1073741824",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
"""The topic settings of Apache Kafka 4.1 with their defaults. None: Basalt's default differs."""


def servers(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('kafka')}"


def described(client: RawClient, name: str, kind: int = TOPIC) -> dict[str, dict[str, Any]]:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
    asked = {"resources": [resource], "include_synonyms": True, "include_documentation": True}
    (found,) = client.ask(k.DESCRIBE_CONFIGS, 4, asked)["results"]
    assert found["error_code"] == 0, found
    return {row["name"]: row for row in found["configs"]}


def altered(client: RawClient, name: str, *changes: tuple[str, int, str | None]) -> int:
    configs = [{"name": each, "config_operation": operation, "value": value} for each, operation, value in changes]
    resource = {"resource_type": TOPIC, "resource_name": name, "configs": configs}
    (found,) = client.ask(k.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})["responses"]
    code: int = found["error_code"]
    return code


def test_every_setting_of_apache_kafka_is_described(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("described")
        rows = described(client, "described")
        assert set(rows) == {*APACHE_KAFKA, "basalt.durability"}
        for name, default in APACHE_KAFKA.items():
            row = rows[name]
            assert default in {None, row["value"]}, name
            # MirrorMaker 2 copies every setting that is not a default.
            assert (row["config_source"], row["read_only"], row["is_sensitive"]) == (DEFAULT, False, False), name
            assert row["documentation"]
            assert row["config_type"] == SETTINGS[name].type
            assert all(each["source"] == DEFAULT for each in row["synonyms"])
        assert rows["basalt.durability"]["config_source"] == DEFAULT
        assert rows["retention.ms"]["synonyms"] == [{"name": "log.retention.ms", "value": "-1", "source": DEFAULT}]
        assert altered(client, "described", ("retention.ms", SET, "5000"), ("segment.bytes", SET, "2048")) == 0
        rows = described(client, "described")
        assert rows["segment.bytes"]["value"] == "2048"
        assert rows["retention.ms"]["synonyms"] == [
            {"name": "retention.ms", "value": "5000", "source": DYNAMIC_TOPIC},
            {"name": "log.retention.ms", "value": "-1", "source": DEFAULT},
        ]
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers(kafka)})
    resource = kafka_admin.ConfigResource(kafka_admin.ConfigResource.Type.TOPIC, "described")
    found = admin.describe_configs([resource])[resource].result(WAIT_S)
    assert {name for name, entry in found.items() if not entry.is_default} == {"retention.ms", "segment.bytes"}


def test_settings_survive_a_restart_and_return_to_their_defaults(kafka: Broker) -> None:
    given = {"segment_ms": "1000", "compression_type": "gzip", "min_insync_replicas": "2", "retention_ms": "9000"}
    with RawClient(kafka.port("kafka")) as client:
        client.create("kept", 1, **given)
    kafka.stop()
    kafka.start()
    with RawClient(kafka.port("kafka")) as client:
        rows = described(client, "kept")
        assert {name: rows[name.replace("_", ".")]["value"] for name in given} == given
        assert altered(client, "kept", *((name.replace("_", "."), DELETE, None) for name in given)) == 0
        assert all(row["config_source"] == DEFAULT for row in described(client, "kept").values())


def test_create_topics_returns_the_settings_of_the_topic(kafka: Broker) -> None:
    asked = {
        "name": "responded",
        "num_partitions": 2,
        "replication_factor": 1,
        "configs": [{"name": "flush.ms", "value": "7"}],
    }
    with RawClient(kafka.port("kafka")) as client:
        (topic,) = client.ask(k.CREATE_TOPICS, 7, {"topics": [asked], "timeout_ms": 10_000})["topics"]
    rows = {row["name"]: row for row in topic["configs"]}
    assert len(rows) == len(SETTINGS)
    assert (rows["flush.ms"]["value"], rows["flush.ms"]["config_source"]) == ("7", DYNAMIC_TOPIC)


def test_list_settings_are_appended_and_subtracted(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("lists")
        assert altered(client, "lists", ("cleanup.policy", APPEND, "compact")) == 0
        assert described(client, "lists")["cleanup.policy"]["value"] == "compact,delete"
        assert altered(client, "lists", ("cleanup.policy", SUBTRACT, "delete")) == 0
        assert described(client, "lists")["cleanup.policy"]["value"] == "compact"
        assert altered(client, "lists", ("leader.replication.throttled.replicas", APPEND, "0:1,1:1")) == 0
        assert described(client, "lists")["leader.replication.throttled.replicas"]["value"] == "0:1,1:1"
        refused: tuple[tuple[str, int, str | None], ...] = (
            ("cleanup.policy", SUBTRACT, "compact"),
            ("retention.ms", APPEND, "1"),
            ("retention.ms", SET, None),
            ("retention.ms", SET, "soon"),
            ("retention.ms", SET, "-2"),
            ("retention.ms", 9, "1"),
            ("remote.storage.enable", SET, "true"),
            ("compression.type", SET, "brotli"),
            ("min.cleanable.dirty.ratio", SET, "2"),
            ("leader.replication.throttled.replicas", SET, "x"),
            ("no.such", SET, "1"),
            ("no.such", DELETE, None),
        )
        before = described(client, "lists")
        for change in refused:
            assert altered(client, "lists", change) == e.INVALID_CONFIG, change
        assert described(client, "lists") == before


def test_the_broker_has_no_altered_settings(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        rows = described(client, "1", BROKER)
        assert rows["advertised.listeners"]["value"] == f"PLAINTEXT://127.0.0.1:{kafka.port('kafka')}"
        assert rows["socket.request.max.bytes"]["value"].isdecimal()
        assert described(client, "", BROKER) == {}


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd", "uncompressed"])
def test_the_broker_compresses_as_the_topic_requires(kafka: Broker, codec: str) -> None:
    topic = f"compressed-{codec}"
    sent = "lz4" if codec == "uncompressed" else "none"
    values = [b"%d %s" % (number, b"text " * (number % 50) * 40) for number in range(300)]
    with RawClient(kafka.port("kafka")) as client:
        client.create(topic, compression_type=codec)
    options: dict[str, Any] = {"bootstrap.servers": servers(kafka), "compression.type": sent, "linger.ms": 50}
    producer = confluent_kafka.Producer({**options, "enable.idempotence": True})
    for value in values:
        producer.produce(topic, value, key=b"key")
    assert producer.flush(WAIT_S) == 0
    with RawClient(kafka.port("kafka")) as client:
        raw = client.fetch(topic, 0, max_bytes=64 << 20)["records"]
    assert read_header(raw).codec == ["uncompressed", "gzip", "snappy", "lz4", "zstd"].index(codec)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers(kafka), "group.id": "g", "check.crcs": True})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    found: list[bytes] = []
    while len(found) < len(values):
        batch = consumer.consume(len(values) - len(found), WAIT_S)
        assert batch
        found += [each.value() for each in batch]
    consumer.close()
    assert found == values
    if codec in {"gzip", "uncompressed"}:
        # kafka-python reads these without further packages.
        python = kafka_python.KafkaConsumer(bootstrap_servers=servers(kafka), consumer_timeout_ms=30_000)
        python.assign([kafka_python.TopicPartition(topic, 0)])
        python.seek_to_beginning()
        assert [next(python).value for _ in values] == values
        python.close()


def test_only_the_batch_that_cannot_be_compressed_is_refused(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("strict", compression_type="zstd")
        damaged = bytearray(batch_of(b"x" * 100))
        damaged[-5] ^= 1
        assert client.produce("strict", bytes(damaged))["error_code"] == e.CORRUPT_MESSAGE
        bomb = recompressed(batch_of(bytes(60 << 20)), 1, 9, 128 << 20)
        assert len(bomb) < 1 << 20
        assert client.produce("strict", bomb)["error_code"] == e.MESSAGE_TOO_LARGE
        assert client.produce("strict", batch_of(gzip.compress(b"fine")))["base_offset"] == 0


def test_timestamps_far_from_the_clock_are_refused(kafka: Broker) -> None:
    now_ms = time.time_ns() // 1_000_000

    def sent(client: RawClient, topic: str, *times_ms: int) -> int:
        batch = encode_plain([Record(b"v", timestamp_ms=each) for each in times_ms])
        code: int = client.produce(topic, batch)["error_code"]
        return code

    with RawClient(kafka.port("kafka")) as client:
        client.create("timed")
        assert sent(client, "timed", 0, now_ms) == 0
        assert sent(client, "timed", now_ms, now_ms + 7_200_000) == e.INVALID_TIMESTAMP
        assert altered(client, "timed", ("message.timestamp.after.max.ms", SET, "86400000")) == 0
        assert sent(client, "timed", now_ms, now_ms + 7_200_000) == 0
        assert altered(client, "timed", ("message.timestamp.before.max.ms", SET, "60000")) == 0
        # The first record of a batch need not be the oldest.
        assert sent(client, "timed", now_ms, now_ms - 120_000) == e.INVALID_TIMESTAMP
        assert altered(client, "timed", ("message.timestamp.type", SET, "LogAppendTime")) == 0
        assert sent(client, "timed", 5, now_ms + 99_000_000) == 0


def test_a_record_without_key_is_refused_by_a_compacted_topic(kafka: Broker) -> None:
    def batch(*keys: bytes | None) -> bytes:
        return encode_plain([Record(b"v", key=key, timestamp_ms=5) for key in keys])

    with RawClient(kafka.port("kafka")) as client:
        client.create("keyed", cleanup_policy="compact")
        client.create("keyed-later")
        assert client.produce("keyed-later", batch(None))["error_code"] == 0
        assert altered(client, "keyed-later", ("cleanup.policy", SET, "compact")) == 0
        for topic, offset in (("keyed", 0), ("keyed-later", 1)):
            assert client.produce(topic, batch(b"a", None))["error_code"] == e.INVALID_RECORD
            assert client.produce(topic, batch(None))["error_code"] == e.INVALID_RECORD
            assert client.produce(topic, batch(b"a", b""))["base_offset"] == offset
