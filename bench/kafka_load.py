"""One client of Kafka's protocol as a program.

    python -m bench.kafka_load produce|consume|latency ADDRESS TOPIC COUNT

Unmodified librdkafka, through confluent-kafka, in a separate process, so that only its threads and the broker's run. It
prints one JSON object.
"""

from __future__ import annotations

import importlib
import json
import statistics
import struct
import sys
import threading
import time
from typing import Any, Final

from bench.size import sized

SIZE: Final = 256
POLL: Final = 10_000
RATE: Final = 1000
"""Messages per second of the latency load."""

WARM_UP: Final = sized(2000, 300)
"""Messages whose latency does not count."""

WAIT_S: Final = 120.0
_SENT: Final = struct.Struct(">d")


def produce(kafka: Any, address: str, topic: str, count: int) -> dict[str, float]:
    """Measure the production of messages of 256 B until all are confirmed."""
    producer = kafka.Producer(
        {
            "bootstrap.servers": address,
            "acks": "all",
            "queue.buffering.max.messages": count + 1,
            "queue.buffering.max.kbytes": 2_000_000,
            "delivery.report.only.error": True,
        }
    )
    failed: list[str] = []

    def reported(error: Any, _message: Any) -> None:
        failed.append(str(error))

    producer.list_topics(topic, timeout=WAIT_S)
    body = b"x" * SIZE
    send = producer.produce
    begin = time.perf_counter()
    for _ in range(count):
        send(topic, body, on_delivery=reported)
    left = producer.flush(WAIT_S)
    seconds = time.perf_counter() - begin
    assert not failed, failed[0]
    assert not left, f"{left} messages were not confirmed in time"
    return {"rate": count / seconds}


def _from_start(kafka: Any, address: str, topic: str, **more: Any) -> Any:
    consumer = kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "bench",
            "enable.auto.commit": False,
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 1_000_000,
            **more,
        }
    )
    consumer.list_topics(topic, timeout=WAIT_S)
    consumer.assign([kafka.TopicPartition(topic, 0, kafka.OFFSET_BEGINNING)])
    return consumer


def consume(kafka: Any, address: str, topic: str, count: int) -> dict[str, float]:
    """Measure consumption from the first record to the last."""
    begin = time.perf_counter()
    consumer = _from_start(kafka, address, topic)
    until = begin + WAIT_S
    seen = 0
    while seen < count:
        assert time.perf_counter() < until, f"{seen} of {count} messages came in {WAIT_S} s"
        seen += len(consumer.consume(POLL, 0.5))
    seconds = time.perf_counter() - begin
    consumer.close()
    return {"rate": count / seconds}


def latency(kafka: Any, address: str, topic: str, count: int) -> dict[str, float]:
    """Measure the time from the call that sends a message to the call that receives it, at a steady rate."""
    producer = kafka.Producer({"bootstrap.servers": address, "acks": "all", "linger.ms": 0})
    consumer = _from_start(kafka, address, topic)
    total = WARM_UP + count
    took: list[float] = []

    def receive() -> None:
        until = time.perf_counter() + WAIT_S
        while len(took) < total and time.perf_counter() < until:
            message = consumer.poll(0.5)
            if message is not None and message.error() is None:
                took.append(time.perf_counter() - _SENT.unpack_from(message.value())[0])

    receiver = threading.Thread(target=receive)
    receiver.start()
    rest = b"x" * (SIZE - _SENT.size)
    begin = time.perf_counter() + 1.0
    for number in range(total):
        wait = begin + number / RATE - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        producer.produce(topic, _SENT.pack(time.perf_counter()) + rest)
        producer.poll(0)
    producer.flush(WAIT_S)
    receiver.join()
    consumer.close()
    assert len(took) == total, f"{len(took)} of {total} messages came"
    cuts = statistics.quantiles(took[WARM_UP:], n=1000)
    return {"p50_ms": cuts[499] * 1e3, "p99_ms": cuts[989] * 1e3, "p999_ms": cuts[998] * 1e3}


def main() -> None:
    role, address, topic, count = sys.argv[1:]
    kafka = importlib.import_module("confluent_kafka")
    work = {"produce": produce, "consume": consume, "latency": latency}[role]
    print(json.dumps(work(kafka, address, topic, int(count))))


if __name__ == "__main__":
    main()
