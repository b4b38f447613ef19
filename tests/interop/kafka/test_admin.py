"""Administration of groups and settings with the admin clients of librdkafka and kafka-python."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.interop.kafka.client_modules import admin as kafka_admin
from tests.interop.kafka.client_modules import confluent_kafka, kafka_python
from tests.interop.kafka.raw import RawClient, batch_of
from tests.interop.server import Broker

from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e

WAIT_S = 60.0


def servers(broker: Broker) -> str:
    return f"127.0.0.1:{broker.port('kafka')}"


def committed(broker: Broker, topic: str, group: str) -> None:
    with RawClient(broker.port("kafka")) as client:
        client.create(topic)
        client.produce(topic, batch_of(b"a", b"b", b"c"))
    consumer = confluent_kafka.Consumer({"bootstrap.servers": servers(broker), "group.id": group})
    place = confluent_kafka.TopicPartition(topic, 0, 2)
    consumer.commit(offsets=[place], asynchronous=False)
    consumer.close()


def test_groups_are_listed_described_and_deleted(kafka: Broker) -> None:
    committed(kafka, "listed", "listed-group")
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers(kafka)})
    listed = admin.list_consumer_groups().result(WAIT_S)
    assert "listed-group" in {each.group_id for each in listed.valid}
    described = admin.describe_consumer_groups(["listed-group"])["listed-group"].result(WAIT_S)
    assert described.state == confluent_kafka.ConsumerGroupState.EMPTY
    wanted = confluent_kafka.ConsumerGroupTopicPartitions("listed-group")
    (offsets,) = admin.list_consumer_group_offsets([wanted]).values()
    assert [(each.topic, each.offset) for each in offsets.result(WAIT_S).topic_partitions] == [("listed", 2)]
    admin.delete_consumer_groups(["listed-group"])["listed-group"].result(WAIT_S)
    with pytest.raises(confluent_kafka.KafkaException, match="GROUP_ID_NOT_FOUND"):
        admin.delete_consumer_groups(["listed-group"])["listed-group"].result(WAIT_S)


def test_offsets_of_a_group_are_deleted_by_partition(kafka: Broker) -> None:
    committed(kafka, "forgotten", "forgetting")
    asked: dict[str, Any] = {
        "group_id": "forgetting",
        "topics": [{"name": "forgotten", "partitions": [{"partition_index": 0}, {"partition_index": 7}]}],
    }
    with RawClient(kafka.port("kafka")) as client:
        found = client.ask(k.OFFSET_DELETE, 0, asked)
        codes = [each["error_code"] for each in found["topics"][0]["partitions"]]
        assert codes == [0, e.UNKNOWN_TOPIC_OR_PARTITION]
        assert client.ask(k.OFFSET_DELETE, 0, asked)["error_code"] == e.GROUP_ID_NOT_FOUND
        wanted = {"group_id": "forgetting", "topics": [{"name": "forgotten", "partition_indexes": [0]}]}
        place = client.ask(k.OFFSET_FETCH, 7, wanted)["topics"][0]["partitions"][0]
        assert (place["committed_offset"], place["error_code"]) == (-1, 0)


def test_settings_of_a_topic_are_altered(kafka: Broker) -> None:
    with RawClient(kafka.port("kafka")) as client:
        client.create("altered")
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers(kafka)})
    entry = kafka_admin.ConfigEntry("retention.ms", "60000", incremental_operation=kafka_admin.AlterConfigOpType.SET)
    resource = kafka_admin.ConfigResource(kafka_admin.ConfigResource.Type.TOPIC, "altered", incremental_configs=[entry])
    (altered,) = admin.incremental_alter_configs([resource]).values()
    altered.result(WAIT_S)
    (described,) = admin.describe_configs([resource]).values()
    assert described.result(WAIT_S)["retention.ms"].value == "60000"


@pytest.mark.spec("B10")
def test_changed_cleanup_settings_of_a_topic_take_effect(kafka: Broker) -> None:
    """Both topics were created without compaction and filled with compressed batches, without a key index."""
    producer = confluent_kafka.Producer({"bootstrap.servers": servers(kafka), "compression.type": "lz4"})
    for name in ("compacted", "retained"):
        with RawClient(kafka.port("kafka")) as client:
            client.create(name)
        for number in range(60):
            producer.produce(name, b"%d" % number, key=b"%d" % (number % 7), timestamp=1_700_000_000_000)
            if number % 20 == 19:
                assert producer.flush(WAIT_S) == 0
    admin = kafka_admin.AdminClient({"bootstrap.servers": servers(kafka)})
    kind = kafka_admin.ConfigResource.Type.TOPIC

    def altered(topic: str, **given: str) -> None:
        entries = [
            kafka_admin.ConfigEntry(
                name.replace("_", "."), value, incremental_operation=kafka_admin.AlterConfigOpType.SET
            )
            for name, value in given.items()
        ]
        resource = kafka_admin.ConfigResource(kind, topic, incremental_configs=entries)
        admin.incremental_alter_configs([resource])[resource].result(WAIT_S)
        shown = admin.describe_configs([resource])[resource].result(WAIT_S)
        assert {name: shown[name.replace("_", ".")].value for name in given} == given

    # With compact alone retention does not apply, as with Apache Kafka.
    altered("compacted", cleanup_policy="compact", retention_bytes="1")
    altered("retained", retention_bytes="1")
    latest = [b"%d" % number for number in range(53, 60)]

    def seen(topic: str) -> list[bytes]:
        with RawClient(kafka.port("kafka")) as client:
            asked = {"topics": [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -2}]}]}
            offset = client.ask(k.LIST_OFFSETS, 5, asked)["topics"][0]["partitions"][0]["offset"]
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": servers(kafka), "group.id": "seen", "enable.partition.eof": True}
        )
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, offset)])
        found: list[bytes] = []
        try:
            while (message := consumer.poll(WAIT_S)) is not None and not message.error():
                found.append(message.value())
        finally:
            consumer.close()
        return found

    until = time.monotonic() + WAIT_S
    while (len(seen("compacted")) > 7 or seen("retained")) and time.monotonic() < until:
        time.sleep(0.3)
    assert seen("compacted") == latest
    assert seen("retained") == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kafka_python_creates_and_deletes_topics(kafka: Broker) -> None:
    admin = kafka_python.KafkaAdminClient(bootstrap_servers=servers(kafka))
    try:
        admin.create_topics([kafka_python.admin.NewTopic("python-admin", 2, 1)])
        assert "python-admin" in admin.list_topics()
        admin.delete_topics(["python-admin"])
        assert "python-admin" not in admin.list_topics()
    finally:
        admin.close()
