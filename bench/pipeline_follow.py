"""A streaming query follows a topic that another process writes at 200,000 records per second.

    python -m bench.pipeline_follow STORE SECONDS     the writer: columnar batches at a steady rate, durable each

The writer publishes its position in eight bytes of a file. Lag is the difference between this position and the end of
the query's last finished batch, in seconds of writing, measured once per second. It is bounded if it does not grow: the
last third of the time is compared with the second third.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from bench.log_rig import middle
from bench.row import Row

import basaltmq
from basaltmq.log.arrow import from_arrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RATE_PER_S = 200_000
BATCH_RECORDS = 500
VALUE_BYTES = 256
PARTITIONS = 4
TOPIC = "followed"
BATCHES = 32
GROWTH_MAX_S = 1.0
"""Lag varies by one batch, which takes about a second."""

WAIT_S = 120.0


def follow(spark: SparkSession, path: Path, seconds: float) -> list[Row]:
    path.mkdir()
    with basaltmq.open(path / "data") as db:
        db.topic(TOPIC, partitions=PARTITIONS, index_keys=False)
    writer = subprocess.Popen([sys.executable, "-m", "bench.pipeline_follow", str(path), str(seconds)])
    try:
        query = (
            spark.readStream.format("basalt")
            .option("subscribe", TOPIC)
            .option("startingOffsets", "earliest")
            .load(str(path / "data"))
            .writeStream.format("noop")
            .option("checkpointLocation", str(path / "checkpoint"))
            .start()
        )
        try:
            lags, batches = _watch(query, path, writer)
        finally:
            query.stop()
    finally:
        writer.kill()
        writer.wait()
    reported = json.loads((path / "writer.json").read_text())
    third = len(lags) // 3
    before, after = middle(lags[third : 2 * third]), middle(lags[2 * third :])
    growth = after - before
    return [
        Row("records written while a query followed", reported["rate_per_s"], "records/s"),
        Row("batches of the query", batches, "batches"),
        Row("lag, the middle third of the time", before, "s"),
        Row("lag, the last third", after, "s"),
        Row("most after the first third", max(lags[third:]), "s"),
        Row("how much lag grew", growth, "s", f"<= {GROWTH_MAX_S:g}", growth <= GROWTH_MAX_S),
        Row("  of the rate wanted", reported["rate_per_s"] / RATE_PER_S, "ratio", ">= 0.98", reported["is_steady"]),
    ]


def _watch(query: Any, path: Path, writer: subprocess.Popen[bytes]) -> tuple[list[float], int]:
    """Return the lag in seconds, once per second from the first finished batch on, and the number of batches."""
    lags: list[float] = []
    batches = 0
    deadline = time.monotonic() + WAIT_S
    while writer.poll() is None:
        time.sleep(1)
        failed = query.exception()
        if failed is not None:
            raise RuntimeError("the query failed") from failed
        progress = query.lastProgress
        if progress is None or not progress["numInputRows"]:
            assert lags or time.monotonic() < deadline, "the query has not begun"
            continue
        batches = progress["batchId"] + 1
        ends = progress["sources"][0]["endOffset"]
        if isinstance(ends, str):
            ends = json.loads(ends)
        done = sum(ends[TOPIC].values())
        lags.append((_written(path) - done) / RATE_PER_S)
    assert lags, "the query finished no batch while the topic was written; give it more time"
    return lags, batches


def _written(path: Path) -> int:
    try:
        return int.from_bytes((path / "written").read_bytes(), "little")
    except FileNotFoundError:
        return 0


def _write(path: Path, seconds: float) -> None:
    ends = pa.array([VALUE_BYTES * at for at in range(BATCH_RECORDS + 1)], pa.int32()).buffers()[1]
    keys = pa.array([b"customer-%05d" % (at % 97) for at in range(BATCH_RECORDS)])
    batches = []
    for _ in range(BATCHES):
        content = pa.py_buffer(os.urandom(VALUE_BYTES * BATCH_RECORDS))
        values = pa.Array.from_buffers(pa.binary(), BATCH_RECORDS, [None, ends, content])
        batches.append(
            from_arrow(pa.RecordBatch.from_arrays([keys, values], ["key", "value"]), time.time_ns() // 1_000_000)
        )
    reported = os.open(path / "written", os.O_WRONLY | os.O_CREAT, 0o644)
    with basaltmq.open(path / "data") as db:
        topic = db.topic(TOPIC)
        started = time.monotonic()
        wanted = int(seconds * RATE_PER_S) // BATCH_RECORDS
        for number in range(wanted):
            topic.append(batches[number % BATCHES], partition=number % PARTITIONS)
            written = (number + 1) * BATCH_RECORDS
            os.pwrite(reported, written.to_bytes(8, "little"), 0)
            early_s = started + written / RATE_PER_S - time.monotonic()
            if early_s > 0:
                time.sleep(early_s)
        rate = wanted * BATCH_RECORDS / (time.monotonic() - started)
    os.close(reported)
    (path / "writer.json").write_text(json.dumps({"rate_per_s": rate, "is_steady": rate >= 0.98 * RATE_PER_S}))


if __name__ == "__main__":
    _write(Path(sys.argv[1]), float(sys.argv[2]))
