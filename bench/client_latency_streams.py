"""Effects of Kafka and gRPC clients on other clients: scenarios of `client_latency`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from bench.client_latency_probe import KafkaWire
from bench.client_latency_target import Target
from tests.log_frames import encode_plain

from basaltmq.log.batches.record import Record
from basaltmq.protocols.kafka.wire import api as k

TOPICS: Final = 10_000
PARTITIONS: Final = 10_000
RECORDS: Final = 100_000
DEAD: Final = 200_000
GROUPS: Final = 10_000
TOPIC_RESOURCE: Final = 2
CALL_S: Final = 120


def _admin(target: Target) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": f"127.0.0.1:{target.kafka}"})


def _topics(admin: Any, count: int, *, partitions: int = 1, step: int = 500) -> None:
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

    for at in range(0, count, step):
        topics = [NewTopic(f"t{n:06}", partitions, 1) for n in range(at, min(count, at + step))]
        for each in admin.create_topics(topics).values():
            each.result(CALL_S)


def kafka_metadata(target: Target) -> Iterator[None]:
    """Metadata of 10,000 topics, five times."""
    admin = _admin(target)
    _topics(admin, TOPICS)
    yield
    for _ in range(5):
        admin.list_topics(timeout=60)


def kafka_create(target: Target) -> Iterator[None]:
    """CreateTopics of 2,000 topics in one request."""
    admin = _admin(target)
    admin.list_topics(timeout=60)
    yield
    _topics(admin, 2000, step=2000)


def kafka_produce(target: Target) -> Iterator[None]:
    """A flood of 1 KB records."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": f"127.0.0.1:{target.kafka}", "queue.buffering.max.kbytes": 1 << 20,
                         "queue.buffering.max.messages": 500_000})  # fmt: skip
    producer.list_topics("t", timeout=60)
    body = b"x" * 1024
    yield
    for _ in range(300_000):
        producer.produce("t", body)
    producer.flush(120)


def grpc_flood(target: Target) -> Iterator[None]:
    """Pipelined batches over gRPC, and leases of them."""
    from basaltmq.client import Client, Draft

    client = Client(f"127.0.0.1:{target.fila}")
    client.create_queue("g")
    batch: list[bytes | str | Draft] = [Draft(payload=b"x" * 1024) for _ in range(1000)]
    yield
    for _ in range(30):
        client.enqueue("g", batch)
    client.close()


def kafka_partitions(target: Target) -> Iterator[None]:
    """Metadata of 10 topics with 10,000 partitions each, twice."""
    admin = _admin(target)
    _topics(admin, 10, partitions=PARTITIONS, step=1)
    yield
    for _ in range(2):
        admin.list_topics(timeout=CALL_S)


def kafka_list_offsets(target: Target) -> Iterator[None]:
    """ListOffsets of 5,000 partitions in one request: the client takes minutes for 100,000."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

    admin = _admin(target)
    _topics(admin, 1, partitions=5000)
    wanted = {TopicPartition("t000000", p): OffsetSpec.latest() for p in range(5000)}  # type: ignore[no-untyped-call]
    yield
    for each in admin.list_offsets(wanted, request_timeout=CALL_S).values():
        each.result(CALL_S)


def kafka_delete(target: Target) -> Iterator[None]:
    """DeleteTopics of 5,000 topics in one request."""
    admin = _admin(target)
    _topics(admin, 5000)
    yield
    for each in admin.delete_topics([f"t{n:06}" for n in range(5000)], operation_timeout=CALL_S).values():
        each.result(CALL_S)


def kafka_large_batches(target: Target) -> Iterator[None]:
    """Batches of 100,000 records, compressed and not, produced and fetched."""
    from confluent_kafka import Consumer, Producer

    where = {"bootstrap.servers": f"127.0.0.1:{target.kafka}"}
    many = {"linger.ms": 1000, "batch.num.messages": RECORDS, "batch.size": 64 << 20, "message.max.bytes": 64 << 20,
            "queue.buffering.max.messages": 4 * RECORDS}  # fmt: skip
    _topics(_admin(target), 1)
    yield
    for codec in ("none", "lz4"):
        producer = Producer({**where, **many, "compression.type": codec})
        for _ in range(2 * RECORDS):
            producer.produce("t000000", b"x" * 8)
        producer.flush(CALL_S)
    consumer = Consumer(
        {**where, "group.id": "g", "auto.offset.reset": "earliest", "fetch.message.max.bytes": 64 << 20}
    )
    consumer.subscribe(["t000000"])
    left = 4 * RECORDS
    while left > 0:
        left -= len(consumer.consume(10_000, timeout=10))
    consumer.close()


def grpc_redrive(target: Target) -> Iterator[None]:
    """200,000 dead letters go back to their queue."""
    import grpc

    from basaltmq.client import Client, Draft
    from basaltmq.wire import fila_wire_pb2 as wire

    client = Client(f"127.0.0.1:{target.fila}")
    client.create_queue("g")
    batch: list[bytes | str | Draft] = [Draft(payload=b"x" * 256) for _ in range(1000)]
    for _ in range(DEAD // 1000):
        client.enqueue("g.dlq", batch)
    with grpc.insecure_channel(f"127.0.0.1:{target.fila}") as channel:
        redrive = channel.unary_unary(
            "/fila.v1.FilaAdmin/Redrive",
            request_serializer=wire.RedriveRequest.SerializeToString,
            response_deserializer=wire.RedriveResponse.FromString,
        )
        yield
        moved = redrive(wire.RedriveRequest(dlq_queue="g.dlq"), timeout=CALL_S).redriven
    assert moved == DEAD, f"{moved} of {DEAD} were redriven"
    client.close()


def kafka_configs(target: Target) -> Iterator[None]:
    """DescribeConfigs of 5,000 topics, then AlterConfigs of the same, in one request each."""
    client = KafkaWire(target.kafka)
    _topics(_admin(target), 5000)
    describe = [{"resource_type": TOPIC_RESOURCE, "resource_name": f"t{n:06}", "configuration_keys": None}
                for n in range(5000)]  # fmt: skip
    alter = [{"resource_type": TOPIC_RESOURCE, "resource_name": f"t{n:06}",
              "configs": [{"name": "retention.ms", "config_operation": 0, "value": "3600000"}]}
             for n in range(5000)]  # fmt: skip
    described = k.encode_request(k.DESCRIBE_CONFIGS, 1, 1, "c", {"resources": describe})
    altered = k.encode_request(k.INCREMENTAL_ALTER_CONFIGS, 0, 2, "c", {"resources": alter})
    yield
    client.exchange(described)
    client.exchange(altered)
    client.close()


def kafka_offsets(target: Target) -> Iterator[None]:
    """OffsetCommit and OffsetFetch of 50,000 partitions of one group."""
    client = KafkaWire(target.kafka)
    _topics(_admin(target), 5, partitions=PARTITIONS, step=1)
    each = [{"partition_index": p, "committed_offset": 0} for p in range(PARTITIONS)]
    commits = [{"name": f"t{n:06}", "partitions": each} for n in range(5)]
    wanted = [{"name": f"t{n:06}", "partition_indexes": list(range(PARTITIONS))} for n in range(5)]
    commit = k.encode_request(k.OFFSET_COMMIT, 2, 1, "c", {
        "group_id": "g", "generation_id": -1, "member_id": "",
        "retention_time_ms": -1, "topics": commits})  # fmt: skip
    fetch = k.encode_request(k.OFFSET_FETCH, 2, 2, "c", {"group_id": "g", "topics": wanted})
    every = k.encode_request(k.OFFSET_FETCH, 2, 3, "c", {"group_id": "g", "topics": None})
    yield
    for request in (commit, fetch, every):
        client.exchange(request)
    client.close()


def kafka_groups(target: Target) -> Iterator[None]:
    """ListGroups, DescribeGroups and DeleteGroups of 10,000 groups."""
    client = KafkaWire(target.kafka)
    _topics(_admin(target), 1)
    for n in range(GROUPS):
        client.exchange(k.encode_request(k.OFFSET_COMMIT, 2, 1, "c", {
            "group_id": f"g{n}", "generation_id": -1, "member_id": "",
            "retention_time_ms": -1, "topics": [
                {"name": "t000000", "partitions": [{"partition_index": 0, "committed_offset": 0}]}]}))  # fmt: skip
    names = [f"g{n}" for n in range(GROUPS)]
    yield
    for _ in range(3):
        client.call(k.LIST_GROUPS, 1, {})
    client.call(k.DESCRIBE_GROUPS, 1, {"groups": names})
    client.call(k.DELETE_GROUPS, 1, {"groups_names": names})
    client.close()


def kafka_fetch_many(target: Target) -> Iterator[None]:
    """Fetches of 10,000 partitions each, and a Produce to 10,000 partitions."""
    client = KafkaWire(target.kafka)
    _topics(_admin(target), 1, partitions=PARTITIONS)
    batch = encode_plain([Record(timestamp_ms=1, value=b"x" * 100)])
    produce = k.encode_request(k.PRODUCE, 3, 1, "c", {"acks": 1, "timeout_ms": 10_000, "topics": [
        {"name": "t000000", "partitions": [{"index": p, "records": batch} for p in range(PARTITIONS)]}]})  # fmt: skip
    wanted = [{"partition": p, "fetch_offset": 0, "partition_max_bytes": 1 << 16} for p in range(PARTITIONS)]
    fetch = k.encode_request(k.FETCH, 4, 2, "c", {
        "replica_id": -1, "max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1 << 26,
        "topics": [{"topic": "t000000", "partitions": wanted}]})  # fmt: skip
    yield
    client.exchange(produce)
    for _ in range(3):
        client.exchange(fetch)
    client.close()


def grpc_lease(target: Target) -> Iterator[None]:
    """Leases of 10,000 messages, and acknowledgements of them."""
    from basaltmq.client import Client, Draft

    client = Client(f"127.0.0.1:{target.fila}")
    client.create_queue("g")
    batch: list[bytes | str | Draft] = [Draft(payload=b"x" * 256) for _ in range(1000)]
    for _ in range(40):
        client.enqueue("g", batch)
    yield
    left = 40_000
    while left:
        leased = client.lease("g", min(left, 10_000))
        client.ack(leased)
        left -= len(leased)
    client.close()


def grpc_large(target: Target) -> Iterator[None]:
    """Enqueues of 2 MB messages over gRPC, and leases of them."""
    from basaltmq.client import Client

    client = Client(f"127.0.0.1:{target.fila}")
    client.create_queue("g")
    yield
    for _ in range(60):
        client.enqueue("g", b"x" * 2_000_000)
    for _ in range(60):
        client.ack(client.lease("g", 1))
    client.close()


def kafka_large_records(target: Target) -> Iterator[None]:
    """Produce of records of 900 KB, fetched again in responses of 36 MB."""
    client = KafkaWire(target.kafka)
    _topics(_admin(target), 1)
    batch = encode_plain([Record(timestamp_ms=1, value=b"x" * 900_000)])
    produce = k.encode_request(k.PRODUCE, 3, 1, "c", {"acks": -1, "timeout_ms": 10_000, "topics": [
        {"name": "t000000", "partitions": [{"index": 0, "records": batch}]}]})  # fmt: skip
    yield
    for _ in range(200):
        client.exchange(produce)
    for at in range(0, 200, 40):
        client.exchange(k.encode_request(k.FETCH, 4, 2, "c", {
            "replica_id": -1, "max_wait_ms": 0, "min_bytes": 0, "max_bytes": 50 << 20, "topics": [{"topic": "t000000",
             "partitions": [{"partition": 0, "fetch_offset": at, "partition_max_bytes": 50 << 20}]}]}))  # fmt: skip
    client.close()


STREAM_SCENARIOS: Final[dict[str, Callable[[Target], Iterator[None]]]] = {
    each.__name__: each
    for each in (
        kafka_metadata, kafka_create, kafka_produce, kafka_partitions, kafka_list_offsets, kafka_delete,
        kafka_large_batches, kafka_configs, kafka_offsets, kafka_groups, kafka_fetch_many, kafka_large_records,
        grpc_flood, grpc_redrive, grpc_lease, grpc_large,
    )
}  # fmt: skip
