"""Spark on segments: reading compared with Parquet, archiving compared with a copy of Parquet, and following a topic
during writes.

The same rows are in a topic (4 partitions, frames of 100 records, keys, incompressible values of 256 bytes) and in
Parquet files that Spark wrote from it. Both are in the page cache. The figures are measured in turns, three times, in
one warm session on `local[2]`. Sums over every column must be equal. The cost of the session and the first queries is
reported separately. CPU time is that of the JVM and of Spark's Python workers together. On a busy machine it is more
reliable than elapsed time.

The bench uses a million records, ten million with --full, or the number in BASALT_BENCH_PIPELINE_RECORDS. The target of
archive is for ten million. BASALT_BENCH_PIPELINE_PARTS=read,archive,follow selects parts; the default is all.
BASALT_BENCH_PIPELINE_ROUNDS sets the number of turns; the default is three.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from bench.log_rig import bench_path, middle
from bench.pipeline_follow import follow
from bench.row import Row
from bench.size import sized

import basaltmq
from basaltmq.pipeline.archive.archive import ArchiveJob, archive
from basaltmq.pipeline.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS = sized(1_000_000, 50_000)
RECORDS_FULL = 10_000_000
VALUE_BYTES = 256
FRAME_RECORDS = 100
PARTITIONS = 4
ROUNDS = sized(3, 1)
CODEC = "zstd"
TOPIC = "orders"
BEGIN_MS = 1_780_000_000_000
FOLLOWED_S = sized(20.0, 5.0)
FOLLOWED_FULL_S = 90.0
PARTS = ("read", "archive", "follow")

SUMS = (
    "sum(length(value))",
    "sum(length(key))",
    "sum(length(topic))",
    "sum(partition)",
    "sum(offset)",
    "max(timestamp)",
    "sum(timestampType)",
    "count(1)",
)


class Took(NamedTuple):
    """Time of one action."""

    wall_s: float
    cpu_s: float


def run(full: bool = False) -> list[Row]:
    records = int(os.environ.get("BASALT_BENCH_PIPELINE_RECORDS", RECORDS_FULL if full else RECORDS))
    parts = frozenset(os.environ.get("BASALT_BENCH_PIPELINE_PARTS", ",".join(PARTS)).split(","))
    if not parts <= frozenset(PARTS):
        raise ValueError(
            f"BASALT_BENCH_PIPELINE_PARTS names some of {', '.join(PARTS)}, not {', '.join(sorted(parts))}"
        )
    with bench_path() as path:
        data = path / "data"
        _fill(data, "few", FRAME_RECORDS * PARTITIONS)
        if parts & {"read", "archive"}:
            _fill(data, TOPIC, records)
        started = time.perf_counter()
        spark = spark_session("basalt-bench", master="local[2]", conf=_settings(path))
        start_s = time.perf_counter() - started
        try:
            rows = [Row("start of Java and a session", start_s, "s"), *_fixed_costs(spark, data)]
            if parts & {"read", "archive"}:
                _copy(spark, data, path / "parquet")
            if "read" in parts:
                rows += _reading(spark, data, path / "parquet", records)
            if "archive" in parts:
                rows += _archiving(spark, data, path, records)
            shutil.rmtree(path / "parquet", ignore_errors=True)
            if "follow" in parts:
                rows += follow(spark, path / "followed", FOLLOWED_FULL_S if full else FOLLOWED_S)
        finally:
            spark.stop()
    return rows


def _settings(path: Path) -> dict[str, str]:
    return {
        "spark.driver.memory": "2g",
        "spark.local.dir": str(path / "spark"),
        "spark.sql.warehouse.dir": str(path / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
    }


def _fill(data: Path, name: str, records: int) -> None:
    """Append frames of one producer each, partitions in turn, as with many writers."""
    sizes = [VALUE_BYTES * at for at in range(FRAME_RECORDS + 1)]
    ends = pa.array(sizes, pa.int32()).buffers()[1]
    keys = [
        pa.array([f"customer-{(at * FRAME_RECORDS + each) % 9973:05d}".encode() for each in range(FRAME_RECORDS)])
        for at in range(100)
    ]
    with basaltmq.open(data) as db:
        topic = db.topic(name, partitions=PARTITIONS, durability="written", index_keys=False)
        for number in range(records // FRAME_RECORDS):
            content = pa.py_buffer(os.urandom(VALUE_BYTES * FRAME_RECORDS))
            values = pa.Array.from_buffers(pa.binary(), FRAME_RECORDS, [None, ends, content])
            first_ms = BEGIN_MS + number * FRAME_RECORDS // 10
            times = pa.array([first_ms + at // 10 for at in range(FRAME_RECORDS)], pa.timestamp("ms", tz="UTC"))
            batch = pa.RecordBatch.from_arrays([keys[number % 100], values, times], ["key", "value", "timestamp"])
            topic.append(batch, partition=number % PARTITIONS)


def _from_log(spark: SparkSession, data: Path, topic: str = TOPIC) -> DataFrame:
    return spark.read.format("basalt").option("subscribe", topic).load(str(data))


def _sums(frame: DataFrame) -> tuple[object, ...]:
    return tuple(frame.selectExpr(*SUMS).collect()[0])


def _drop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _fixed_costs(spark: SparkSession, data: Path) -> list[Row]:
    """Measure a query on few rows. The first one loads classes and starts Python workers."""
    first = _took(lambda: _sums(_from_log(spark, data, "few")))
    again = [_took(lambda: _sums(_from_log(spark, data, "few"))).wall_s for _ in range(ROUNDS)]
    return [
        Row("first query of 400 records", first.wall_s, "s"),
        Row("the same again: what any query costs", middle(again), "s"),
    ]


def _copy(spark: SparkSession, data: Path, parquet: Path) -> None:
    """Write the topic as Parquet, and load both into the page cache."""
    _from_log(spark, data).write.option("compression", CODEC).parquet(str(parquet))
    for each in [*(data / "log").rglob("*.log"), *parquet.glob("*.parquet")]:
        with open(each, "rb", buffering=0) as file:
            while file.read(4 << 20):
                pass


def _reading(spark: SparkSession, data: Path, parquet: Path, records: int) -> list[Row]:
    def theirs() -> DataFrame:
        return spark.read.parquet(str(parquet))

    def ours() -> DataFrame:
        return _from_log(spark, data)

    # This also warms both up.
    expected = _sums(theirs())
    assert expected[-1] == records, f"Parquet has {expected[-1]} of {records} records"
    assert _sums(ours()) == expected, "the topic and its copy in Parquet differ"
    actions: tuple[tuple[str, Callable[[DataFrame], object]], ...] = (("sum every column", _sums), ("noop sink", _drop))
    rows: list[Row] = []
    for name, action in actions:
        pairs = _in_turns(lambda act=action: act(theirs()), lambda act=action: act(ours()))  # type: ignore[misc]
        ratio = middle([own.wall_s / other.wall_s for other, own in pairs])
        spread = [own.wall_s / other.wall_s for other, own in pairs]
        rows += [
            Row(f"Parquet, {name}", records / middle([other.wall_s for other, _ in pairs]), "records/s"),
            Row(f"segments, {name}", records / middle([own.wall_s for _, own in pairs]), "records/s"),
            Row(f"segments / Parquet, time, {name}", ratio, "ratio", "<= 2", ratio <= 2),
            Row("  least of the rounds", min(spread), "ratio"),
            Row("  most", max(spread), "ratio"),
            Row("  in CPU time", middle([own.cpu_s / max(other.cpu_s, 0.01) for other, own in pairs]), "ratio"),
        ]
    return rows


def _archiving(spark: SparkSession, data: Path, path: Path, records: int) -> list[Row]:
    def copy() -> None:
        source = spark.read.parquet(str(path / "parquet"))
        source.write.mode("overwrite").option("compression", CODEC).parquet(str(path / "copy"))

    def archived() -> None:
        shutil.rmtree(path / "archive", ignore_errors=True)
        job = ArchiveJob(
            source={"path": str(data), "subscribe": TOPIC}, target=str(path / "archive"), compression=CODEC
        )
        done = archive(spark, job)
        assert done.records == records, f"{done.records} of {records} records were archived"

    pairs = _in_turns(copy, archived)
    ratio = middle([other.wall_s / own.wall_s for other, own in pairs])
    spread = [other.wall_s / own.wall_s for other, own in pairs]
    shutil.rmtree(path / "copy")
    shutil.rmtree(path / "archive")
    return [
        Row("Parquet to Parquet", records / middle([other.wall_s for other, _ in pairs]), "records/s"),
        Row("archive", records / middle([own.wall_s for _, own in pairs]), "records/s"),
        # Starting a streaming query takes seconds, more than processing a few records.
        Row("archive / Parquet to Parquet", ratio, "ratio", ">= 0.5", ratio >= 0.5)
        if records >= RECORDS_FULL
        else Row("archive / Parquet to Parquet, with its start", ratio, "ratio"),
        Row("  least of the rounds", min(spread), "ratio"),
        Row("  most", max(spread), "ratio"),
        Row("  in CPU time", middle([other.cpu_s / max(own.cpu_s, 0.01) for other, own in pairs]), "ratio"),
    ]


def _in_turns(other: Callable[[], object], own: Callable[[], object]) -> list[tuple[Took, Took]]:
    """Run both once to warm up, then in turns."""
    other()
    own()
    return [(_took(other), _took(own)) for _ in range(int(os.environ.get("BASALT_BENCH_PIPELINE_ROUNDS", ROUNDS)))]


def _took(action: Callable[[], object]) -> Took:
    cpu_s, started = _cpu_s(), time.perf_counter()
    action()
    return Took(time.perf_counter() - started, _cpu_s() - cpu_s)


def _cpu_s() -> float:
    """Return the CPU seconds of all child processes, including ended ones."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))

    def is_below(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    return sum(count for process, count in ticks.items() if is_below(process)) / os.sysconf("SC_CLK_TCK")
