"""Spark writes topics: batch and streaming, each batch once, even if Spark repeats it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

import basaltmq

pytestmark = [pytest.mark.spec("F1", "F3"), pytest.mark.timeout(300), pytest.mark.xdist_group("spark")]


def contents(path: Path, topic: str) -> list[list[tuple[bytes | None, bytes]]]:
    with basaltmq.open(path) as db:
        found = db.topic(topic)
        return [[(record.key, (record.value or b"")) for record in found.read(p)] for p in range(found.partitions)]


def test_a_frame_is_written_where_keys_say_and_once_per_run(spark: SparkSession, tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("out", partitions=2)
        twin = db.topic("twin", partitions=2)
        for i in range(40):
            twin.append(f"v{i}", key=f"k{i % 5}")
    frame = spark.range(40, numPartitions=2).selectExpr("concat('k', id % 5) AS key", "concat('v', id) AS value")
    write = frame.write.format("basalt").mode("append").option("path", str(tmp_path / "data")).option("topic", "out")
    for _ in range(2):
        write.option("runId", "load").option("batchId", "0").save()
    assert contents(tmp_path / "data", "out") == contents(tmp_path / "data", "twin")
    with (
        basaltmq.open(tmp_path / "data"),
        pytest.raises((AnalysisException, PySparkException), match="is open for writing by process"),
    ):
        write.save()
    with pytest.raises((AnalysisException, PySparkException), match="cannot be overwritten"):
        frame.write.format("basalt").mode("overwrite").option("topic", "out").save(str(tmp_path / "data"))


def test_a_stream_writes_each_batch_once_though_spark_does_one_again(spark: SparkSession, tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("in").append([b"%d" % i for i in range(20)])
    with basaltmq.open(tmp_path / "target") as db:
        db.topic("out")
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        query = (
            spark.readStream.format("basalt")
            .option("subscribe", "in")
            .option("startingOffsets", "earliest")
            .load(str(tmp_path / "data"))
            .select("value", "timestamp")
            .writeStream.format("basalt")
            .option("topic", "out")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start(str(tmp_path / "target"))
        )
        assert query.awaitTermination(120)

    run()
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("in").append([b"20"])
    run()
    # The state if Spark was killed before it marked the last batch as done.
    for path in (checkpoint / "commits").glob("*1*"):
        path.unlink()
    run()
    expected = [(None, b"%d" % i) for i in range(21)]
    assert contents(tmp_path / "target", "out") == [expected]
    assert not (tmp_path / "target" / "staging").exists()
