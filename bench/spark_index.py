"""The index rebuilt by Spark's tasks on two cores, beside the broker's own rebuild of the same log.

Both are timed end to end: opening the store, deleting the old index if there is one, reading the log from the page
cache, the new index in the store. Spark's session and its Python workers have been started before; their start is
reported separately. BASALT_BENCH_LOG_GB sets the size of the log (default 2). Most of the work is in Python: frames of
ten records with indexed keys. Frames of a hundred plain records, which a start of the broker indexes at almost no cost,
are measured without a target. There reading is the main cost, and one core reads at the speed of memory.
BASALT_BENCH_INDEX_PARTS=keyed,plain names the parts to run; both if it is not set.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

from bench.log_rig import MIB, Rig, batch_of, bench_path, clock_ms, middle
from bench.row import Row
from bench.size import sized

from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store

ROUNDS = 3
KEYED_RECORDS = 10
KEYED_BYTES = 1024
SHARDS = 8
BAR = 1.3
PARTS = ("keyed", "plain")


def run() -> list[Row]:
    log_bytes = int(float(os.environ.get("BASALT_BENCH_LOG_GB", sized(2.0, 0.125))) * (1 << 30))
    parts = frozenset(os.environ.get("BASALT_BENCH_INDEX_PARTS", ",".join(PARTS)).split(","))
    if not parts <= frozenset(PARTS):
        raise ValueError(f"BASALT_BENCH_INDEX_PARTS names some of {', '.join(PARTS)}, not {', '.join(parts)}")
    from basaltmq.pipeline.session import spark_session
    from basaltmq.pipeline.tasks import SparkTasks

    started_s = time.perf_counter()
    spark = spark_session("bench", master="local[2]", conf={"spark.driver.memory": "1g"})
    tasks = SparkTasks(spark)
    tasks.run(_warm_up, [0, 1])
    rows = [Row("start of Spark and its workers", time.perf_counter() - started_s, "s")]
    try:
        if "keyed" in parts:
            rows += _compared(tasks, "10 keyed records a frame", log_bytes, keyed=True, bar=BAR)
        if "plain" in parts:
            rows += _compared(tasks, "100 plain records a frame", log_bytes, keyed=False, bar=None)
    finally:
        spark.stop()
    return rows


def _warm_up(_: int) -> None:
    import basaltmq.pipeline.index.rebuild  # noqa: F401 imported once by each worker


def _compared(tasks: object, name: str, log_bytes: int, *, keyed: bool, bar: float | None) -> list[Row]:
    from basaltmq.pipeline.index.rebuild import RebuildJob, rebuild_index

    with bench_path() as path:
        _fill(path, log_bytes, keyed)
        store = path / "store"
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(ROUNDS):
            _wipe(store)
            _read(path)
            started_s = time.perf_counter()
            rig = Rig(path)
            theirs.append(time.perf_counter() - started_s)
            rig.close()
            before = _rows(store)
            done = rebuild_index(tasks, RebuildJob(path=str(store)))  # type: ignore[arg-type]
            ours.append(done.seconds)
            if _rows(store) != before:
                raise AssertionError("the rebuilt index is not the one the engine wrote")
    spread = [single / parallel for single, parallel in zip(theirs, ours, strict=True)]
    ratio = middle(spread)
    return [
        Row(f"{name}: the engine's own", log_bytes / middle(theirs) / MIB, "MiB/s"),
        Row(f"{name}: Spark on two cores", log_bytes / middle(ours) / MIB, "MiB/s"),
        Row(
            f"{name}: Spark / the engine's own",
            ratio,
            "ratio",
            "" if bar is None else f">= {bar}",
            None if bar is None else ratio >= bar,
        ),
        Row("  least of the rounds", min(spread), "ratio"),
        Row("  most", max(spread), "ratio"),
    ]


def _fill(path: Path, log_bytes: int, keyed: bool) -> None:
    rig = Rig(path)
    shards = rig.create(SHARDS)
    # The log is at its place in a store.
    value = os.urandom(KEYED_BYTES)
    number = 0
    while rig.engine.lanes[0].log.end < log_bytes:
        batch = _keyed(value, number) if keyed else batch_of(number)
        rig.engine.batch_write(shards[number % SHARDS], batch)
        number += 1
    rig.close()
    (path / "store" / "log").symlink_to(path / "log", target_is_directory=True)


def _keyed(value: bytes, number: int) -> ColumnBatch:
    begin = number * KEYED_RECORDS
    return ColumnBatch.from_records(
        [Record(value, b"key-%d" % at) for at in range(begin, begin + KEYED_RECORDS)], clock_ms()
    )


def _wipe(store: Path) -> None:
    with closing(open_store(store)) as opened:
        batch = Batch()
        batch.delete_range(Family.STREAM_INDEX, b"", b"\xff")
        opened.write(batch)


def _read(path: Path) -> None:
    for file in sorted((path / "log" / "0000").glob("*.log")):
        with open(file, "rb") as opened:
            while opened.read(4 * MIB):
                pass


def _rows(store: Path) -> int:
    with closing(open_store(store)) as opened:
        return hash(tuple(row for row in opened.scan(Family.STREAM_INDEX) if row[0][:1] not in b"PUX"))
