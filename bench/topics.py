"""Topics through the product's interfaces, 100 per call: create, write and read at random, list, delete. `--full`: 1 M.

Creation is durable: each call is one sync. Kafka's CreateTopics carries 100 topics of one partition per request. The
peer of a batch is a loop of single creations in the same run.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench.connections import _basalt
from bench.row import Row

import basaltmq
from basaltmq.protocols.kafka.wire import api as k

TOPICS: Final = 50_000
TOPICS_FULL: Final = 1_000_000
PER_CALL: Final = 100
SINGLE: Final = 500
SAMPLE: Final = 5_000
DELETED: Final = 50_000
LISTED: Final = 50_000
PAGE: Final = 500
MIB: Final = 1 << 20

CREATE_RATE_MIN: Final = 5_000
FLAT_MIN: Final = 0.70
MEMORY_MIB_MAX: Final = 300
OPEN_S_MAX: Final = 3.0


def run(full: bool = False) -> list[Row]:
    count = TOPICS_FULL if full else TOPICS
    with tempfile.TemporaryDirectory(prefix="basalt-bench-topics-") as folder:
        return [*_embedded(Path(folder) / "embedded", count), *_kafka(Path(folder) / "kafka", count // 5)]


def _name(number: int) -> str:
    return f"orders.region-{number % 97}.{number}"


def _embedded(path: Path, count: int) -> list[Row]:
    with basaltmq.open(path) as db:
        started = time.perf_counter()
        for number in range(SINGLE):
            db.topic(f"single-{number}")
        single = SINGLE / (time.perf_counter() - started)
        rates = []
        tenth = count // 10
        for begin in range(0, count, tenth):
            started = time.perf_counter()
            for first in range(begin, begin + tenth, PER_CALL):
                made = db.create_topics(_name(number) for number in range(first, first + PER_CALL))
                assert made == PER_CALL, made
            rates.append(tenth / (time.perf_counter() - started))
        memory = _resident_mib()
    ratio = rates[-1] / rates[0]
    total = 10 / sum(1 / rate for rate in rates)
    rows = [
        Row("create one per call", single, "topics/s"),
        Row(
            f"create {count}, {PER_CALL} per call", total, "topics/s", f">= {CREATE_RATE_MIN}", total >= CREATE_RATE_MIN
        ),
        Row("create, last tenth / first tenth", ratio, "x", f">= {FLAT_MIN}", ratio >= FLAT_MIN),
        Row("memory of the process", memory, "MiB", f"<= {MEMORY_MIB_MAX}", memory <= MEMORY_MIB_MAX),
    ]
    started = time.perf_counter()
    with basaltmq.open(path) as db:
        took = time.perf_counter() - started
        rows.append(Row("open", took, "s", f"<= {OPEN_S_MAX}", took <= OPEN_S_MAX))
        rows += _used(db, count)
        memory = _resident_mib()
        rows.append(Row("memory afterwards", memory, "MiB", f"<= {MEMORY_MIB_MAX}", memory <= MEMORY_MIB_MAX))
        rows.append(Row("open files", len(os.listdir("/proc/self/fd")), ""))
    return rows


def _used(db: basaltmq.Basalt, count: int) -> list[Row]:
    chosen = random.Random(1).sample(range(count), SAMPLE)
    started = time.perf_counter()
    for number in chosen:
        db.topic(_name(number)).append(b"%d" % number, durability="written")
    appended = SAMPLE / (time.perf_counter() - started)
    started = time.perf_counter()
    for number in chosen:
        assert [record.value for record in db.topic(_name(number)).read()] == [b"%d" % number]
    read = SAMPLE / (time.perf_counter() - started)
    started, listed, after = time.perf_counter(), 0, None
    while listed < LISTED:
        page = db.streams.topics.page(start_after=after, limit=PAGE)
        listed, after = listed + len(page.topics), page.next_after
        if after is None:
            break
    paged = listed / (time.perf_counter() - started)
    going = min(count, DELETED)
    started = time.perf_counter()
    for first in range(0, going, PER_CALL):
        assert db.delete_topics(_name(number) for number in range(first, first + PER_CALL)) == PER_CALL
    deleted = going / (time.perf_counter() - started)
    return [
        Row("append to a random topic", appended, "topics/s"),
        Row("read a random topic", read, "topics/s"),
        Row("list, 500 per page", paged, "topics/s"),
        Row(f"delete, {PER_CALL} per call", deleted, "topics/s"),
    ]


def _kafka(path: Path, count: int) -> list[Row]:
    with _basalt(path) as (_, kafka), socket.create_connection(("127.0.0.1", kafka.port), timeout=60) as client:
        _ask(client, k.CREATE_TOPICS, {"topics": [_new("first")], "timeout_ms": 30_000})
        started = time.perf_counter()
        for first in range(0, count, PER_CALL):
            wanted = [_new(_name(number)) for number in range(first, first + PER_CALL)]
            answer = _ask(client, k.CREATE_TOPICS, {"topics": wanted, "timeout_ms": 30_000})
            assert not any(each["error_code"] for each in answer["topics"]), answer
        created = count / (time.perf_counter() - started)
        started = time.perf_counter()
        for first in range(0, count, PER_CALL):
            names = [_name(number) for number in range(first, first + PER_CALL)]
            answer = _ask(client, k.DELETE_TOPICS, {"topic_names": names, "timeout_ms": 30_000})
            assert not any(each["error_code"] for each in answer["responses"]), answer
        deleted = count / (time.perf_counter() - started)
    is_met = created >= CREATE_RATE_MIN
    return [
        Row(f"Kafka CreateTopics, {PER_CALL} per request", created, "topics/s", f">= {CREATE_RATE_MIN}", is_met),
        Row(f"Kafka DeleteTopics, {PER_CALL} per request", deleted, "topics/s"),
    ]


def _new(name: str) -> dict[str, Any]:
    return {"name": name, "num_partitions": 1, "replication_factor": 1, "configs": []}


def _ask(client: socket.socket, key: int, body: dict[str, Any]) -> dict[str, Any]:
    client.sendall(k.encode_request(key, 5, 1, "bench", body))
    size = struct.unpack(">i", client.recv(4, socket.MSG_WAITALL))[0]
    return k.decode_response(key, 5, client.recv(size, socket.MSG_WAITALL))[1]


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB
