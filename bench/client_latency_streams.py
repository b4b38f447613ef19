"""What a client of Kafka or gRPC can do to the others: more scenarios of `client_latency`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from bench.client_latency_target import Target

TOPICS: Final = 10_000
PARTITIONS: Final = 10_000
RECORDS: Final = 100_000
DEAD: Final = 200_000
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


STREAM_SCENARIOS: Final[dict[str, Callable[[Target], Iterator[None]]]] = {
    each.__name__: each
    for each in (
        kafka_metadata, kafka_create, kafka_produce, kafka_partitions, kafka_list_offsets, kafka_delete,
        kafka_large_batches, grpc_flood, grpc_redrive,
    )
}  # fmt: skip
