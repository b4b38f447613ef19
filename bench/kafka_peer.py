"""Kafka's protocol compared with Apache Kafka: the same load, on the same machine, in turns.

The peer is a single KRaft node with the heap and collector of its start script. It runs from the published jars in the
folder BASALT_KAFKA_JARS, which maven fills:

    mvn -q -f bench/kafka_peer.xml dependency:copy-dependencies -DoutputDirectory="$BASALT_KAFKA_JARS"

The load is librdkafka in a separate process (`bench.kafka_load`), acks=all. Kafka confirms after write(2), as Basalt
does at `written`; `synced` waits for the disk. Each load runs once unmeasured, then in turns on all, several times; the
figure is the median of each. A ratio of rates is the median of the ratios of the turns, because the client limits them
and its speed drifts by a fifth within a run. A ratio of latencies is the ratio of the medians, because stalls of the
host affect single turns. The latency of the plain disk in the same run is shown next to them: one thread overwrites and
syncs a file at the same rate, measured from the time each write was due. Without jars Basalt is measured alone.
BASALT_BENCH_PARTS selects parts: `topics` (memory and start), `produce`, `consume` and `latency`; all of them if it is
not set.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.row import Row
from bench.side_by_side.brokers import basalt_kafka, kafka, kafka_jars
from bench.side_by_side.process import Side
from bench.size import sized

COUNT: Final = int(os.environ.get("BASALT_BENCH_MESSAGES", sized(1_000_000, 50_000)))
ROUNDS: Final = int(os.environ.get("BASALT_BENCH_ROUNDS", "3"))
LATENCY_COUNT: Final = sized(5_000, 500)
LATENCY_ROUNDS: Final = max(5, ROUNDS)
"""More and shorter turns, so that a stall of the disk or the host affects only one turn."""

DISK_COUNT: Final = 2_000
DISK_RATE: Final = 1_000
DISK_FILE_BYTES: Final = 8 << 20
DISK_WRITE_BYTES: Final = 4096
READS: Final = 3
"""Reads of each topic in a round. The consumer's thread is the bottleneck, and its time varies by up to a third."""

TOPICS_PART, PRODUCE, CONSUME, LATENCY = ALL_PARTS = ("topics", "produce", "consume", "latency")
TOPICS: Final = sized(1000, 100)
PARTITIONS: Final = 4
CREATE_AT_ONCE: Final = 100
CONFIRM_S: Final = 120.0
LOAD_S: Final = 400.0
SETTLE_S: Final = 5.0
"""Time for a broker to settle after its start or after it was filled, before a measurement."""

BASALT: Final = "Basalt"
KAFKA: Final = "Kafka"


class Load(NamedTuple):
    """One side of the comparison: a broker, and the durability of its topics."""

    name: str
    side: Side
    config: dict[str, str]


Start = Callable[[Path], "contextlib.AbstractContextManager[Side]"]


def run() -> list[Row]:
    if importlib.util.find_spec("confluent_kafka") is None:
        raise SystemExit("kafka_peer needs confluent-kafka: pip install confluent-kafka")
    starts: dict[str, Start] = {BASALT: basalt_kafka}
    jars = kafka_jars()
    if jars is not None:
        starts[KAFKA] = partial(kafka, jars)
    else:
        print("BASALT_KAFKA_JARS holds no kafka_2.13 jar, or there is no java: Basalt is measured alone", flush=True)
    parts = _parts()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="basalt-bench-kafka-") as folder:
        if TOPICS_PART in parts:
            rows += _many_topics(starts, Path(folder) / "topics")
        if parts - {TOPICS_PART}:
            with contextlib.ExitStack() as stack:
                sides = {name: stack.enter_context(start(Path(folder) / "load")) for name, start in starts.items()}
                time.sleep(SETTLE_S)
                rows += _loads(sides, parts, Path(folder))
    return rows


def _parts() -> frozenset[str]:
    named = os.environ.get("BASALT_BENCH_PARTS", "")
    parts = frozenset(named.replace(",", " ").split() or ALL_PARTS)
    if not parts <= frozenset(ALL_PARTS):
        raise SystemExit(f"BASALT_BENCH_PARTS={named}: there are {', '.join(ALL_PARTS)}")
    return parts


def _many_topics(starts: dict[str, Start], folder: Path) -> list[Row]:
    """Measure memory with many topics, with a record in each partition, and the time to start with and without them."""
    empty: dict[str, float] = {}
    full: dict[str, float] = {}
    memory: dict[str, float] = {}
    for name, start in starts.items():
        with start(folder) as side:
            empty[name] = side.start_s
            _fill(side)
            time.sleep(SETTLE_S)
            memory[name] = _resident_mib(side.pid)
        with start(folder) as side:
            full[name] = side.start_s
        shutil.rmtree(folder, ignore_errors=True)
    size = f"{TOPICS:,} topics x {PARTITIONS}"
    return [
        *_at_most(f"memory, {size}", memory, "MiB", 0.25),
        *_at_most("start, empty", empty, "s", 0.5),
        *_at_most(f"start, {size}", full, "s", 0.5),
    ]


def _at_most(name: str, figures: dict[str, float], unit: str, bar: float) -> list[Row]:
    rows = [Row(f"{name}, {each}", figure, unit) for each, figure in figures.items()]
    if KAFKA in figures:
        ratio = figures[BASALT] / figures[KAFKA]
        rows.append(Row(f"{name}: ours / theirs", ratio, "x", f"<= {bar}", ratio <= bar))
    return rows


def _fill(side: Side) -> None:
    client = _client()
    names = [f"many-{at}" for at in range(TOPICS)]
    for at in range(0, TOPICS, CREATE_AT_ONCE):
        create_topics(side, names[at : at + CREATE_AT_ONCE], PARTITIONS, {})
    producer = client.Producer({"bootstrap.servers": side.address, "acks": "all"})
    for name in names:
        for partition in range(PARTITIONS):
            producer.produce(name, b"x" * 256, partition=partition)
    left = producer.flush(CONFIRM_S)
    assert not left, f"{left} messages were not confirmed"


def create_topics(side: Side, names: list[str], partitions: int, config: dict[str, str]) -> None:
    admin = importlib.import_module("confluent_kafka.admin")
    client = admin.AdminClient({"bootstrap.servers": side.address})
    made = [admin.NewTopic(name, partitions, 1, config=config) for name in names]
    for done in client.create_topics(made, operation_timeout=60, request_timeout=60).values():
        done.result(CONFIRM_S)


def _loads(sides: dict[str, Side], parts: frozenset[str], folder: Path) -> list[Row]:
    written, synced = ({"basalt.durability": level} for level in ("written", "synced"))
    loads = [Load(f"{BASALT}, written", sides[BASALT], written), Load(f"{BASALT}, synced", sides[BASALT], synced)]
    if KAFKA in sides:
        loads.append(Load(KAFKA, sides[KAFKA], {}))
    rows: list[Row] = []
    if PRODUCE in parts or CONSUME in parts:
        rows += _throughput(loads, parts)
    if LATENCY in parts:
        rows += _latency(loads, folder)
    return rows


def _throughput(loads: list[Load], parts: frozenset[str]) -> list[Row]:
    """Write each topic once and, if requested, read it from its start several times, in turns."""
    roles = [role for role in (PRODUCE, CONSUME) if role in parts]
    seen: dict[str, dict[str, list[float]]] = {role: {load.name: [] for load in loads} for role in roles}
    spent: dict[str, dict[str, list[float]]] = {role: {load.name: [] for load in loads} for role in roles}
    for turn in range(ROUNDS + 1):
        topics = {load.name: f"load-{load.name.replace(', ', '-')}-{turn}" for load in loads}
        for load in loads:
            create_topics(load.side, [topics[load.name]], 1, load.config)
        for role in (PRODUCE, *[CONSUME] * (READS if turn else 1))[: None if CONSUME in parts else 1]:
            for load in loads:
                before = _cpu_s(load.side.pid)
                rate = _load(role, load.side, topics[load.name], COUNT)["rate"]
                if turn and role in roles:
                    spent[role][load.name].append((_cpu_s(load.side.pid) - before) / COUNT * 1e6)
                    seen[role][load.name].append(rate)
    bars = {
        PRODUCE: ("produce", {f"{BASALT}, written": 1.0, f"{BASALT}, synced": 0.7}),
        CONSUME: ("consume from the start", {f"{BASALT}, written": 1.0, f"{BASALT}, synced": 1.0}),
    }
    return [
        *[row for role in roles for row in _rates(bars[role][0], seen[role], bars[role][1])],
        *[Row(f"{role}, CPU of {name}", min(each), "us/msg") for role in roles for name, each in spent[role].items()],
    ]


def _latency(loads: list[Load], folder: Path) -> list[Row]:
    slow: dict[str, list[float]] = {load.name: [] for load in loads}
    middle: dict[str, list[float]] = {load.name: [] for load in loads}
    disk: list[float] = []
    for turn in range(LATENCY_ROUNDS):
        disk.append(_disk_p99_ms(folder / "disk"))
        for load in loads:
            topic = f"latency-{load.name.replace(', ', '-')}-{turn}"
            create_topics(load.side, [topic], 1, load.config)
            found = _load(LATENCY, load.side, topic, LATENCY_COUNT)
            slow[load.name].append(found["p99_ms"])
            middle[load.name].append(found["p50_ms"])
    spread = f"{min(disk):.1f}-{max(disk):.1f}"
    return [
        *[Row(f"latency at 1 k msg/s, p50, {name}", statistics.median(each), "ms") for name, each in middle.items()],
        Row(f"1 k syncs/s of the bare disk, p99 ({spread})", statistics.median(disk), "ms"),
        *_latencies(slow),
    ]


def _disk_p99_ms(path: Path) -> float:
    """Return the p99 wait of one thread that overwrites and syncs a block at a steady rate, from the time each write
    was due."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, bytes(DISK_FILE_BYTES), 0)
        os.fdatasync(fd)
        block = b"x" * DISK_WRITE_BYTES
        took = []
        begin = time.perf_counter()
        for number in range(DISK_COUNT):
            due = begin + number / DISK_RATE
            time.sleep(max(0.0, due - time.perf_counter()))
            os.pwrite(fd, block, number * DISK_WRITE_BYTES % DISK_FILE_BYTES)
            os.fdatasync(fd)
            took.append(time.perf_counter() - due)
    finally:
        os.close(fd)
        path.unlink()
    return statistics.quantiles(took, n=100)[98] * 1e3


def _rates(name: str, seen: dict[str, list[float]], bars: dict[str, float]) -> list[Row]:
    rows = []
    for each, figures in seen.items():
        spread = f"{min(figures) / 1e3:.0f}-{max(figures) / 1e3:.0f} k"
        rows.append(Row(f"{name}, {each} ({spread})", statistics.median(figures), "msg/s"))
    if KAFKA in seen:
        for each, bar in bars.items():
            ratio = statistics.median(ours / theirs for ours, theirs in zip(seen[each], seen[KAFKA], strict=True))
            rows.append(Row(f"{name}: {each} / {KAFKA}", ratio, "x", f">= {bar}", ratio >= bar))
    return rows


def _latencies(seen: dict[str, list[float]]) -> list[Row]:
    rows = []
    for each, figures in seen.items():
        spread = f"{min(figures):.1f}-{max(figures):.1f}"
        rows.append(Row(f"latency at 1 k msg/s, p99, {each} ({spread})", statistics.median(figures), "ms"))
    if KAFKA in seen:
        for each in seen:
            if each != KAFKA:
                ratio = statistics.median(seen[each]) / statistics.median(seen[KAFKA])
                rows.append(Row(f"latency, p99: {each} / {KAFKA}", ratio, "x", "<= 1", ratio <= 1))
    return rows


def _load(role: str, side: Side, topic: str, count: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.kafka_load", role, side.address, topic, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LOAD_S, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _client() -> Any:
    return importlib.import_module("confluent_kafka")


def _resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _cpu_s(pid: int) -> float:
    """Return the time of all threads, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
