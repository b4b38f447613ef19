"""Spark reads topics: the source is found by name; batch and streaming, during writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

import basaltmq

pytestmark = [pytest.mark.spec("F1"), pytest.mark.timeout(300), pytest.mark.xdist_group("spark")]


def values(frame: DataFrame) -> list[tuple[int, int, str]]:
    rows = frame.selectExpr("partition", "offset", "CAST(value AS STRING) AS text").collect()
    return sorted((row.partition, row.offset, row.text) for row in rows)


def test_a_batch_reads_a_topic_that_is_being_written(spark: SparkSession, tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        orders = db.topic("orders", partitions=2)
        for partition in (0, 1):
            orders.append([f"{partition}-{i}" for i in range(50)], partition=partition)
        source = spark.read.format("basalt").option("subscribe", "orders")
        frame = source.load(str(tmp_path / "data"))
        assert [(f.name, f.dataType.simpleString()) for f in frame.schema] == [
            ("key", "binary"),
            ("value", "binary"),
            ("topic", "string"),
            ("partition", "int"),
            ("offset", "bigint"),
            ("timestamp", "timestamp"),
            ("timestampType", "int"),
        ]
        assert values(frame) == [(p, i, f"{p}-{i}") for p in (0, 1) for i in range(50)]
        orders.append(["0-50"], partition=0)
        assert source.load(str(tmp_path / "data")).where("partition = 0").count() == 51


def test_invalid_options_are_reported_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders")
    read = spark.read.format("basalt")
    for options, reported in (
        ({"path": str(tmp_path / "data"), "subscribe": "oders"}, "there is no topic 'oders'"),
        ({"path": str(tmp_path / "none"), "subscribe": "orders"}, "there is no store at"),
        ({"path": str(tmp_path / "data"), "subscribe": "orders", "endingOffset": "5"}, "did you mean endingOffsets"),
    ):
        with pytest.raises((AnalysisException, PySparkException), match=reported):
            read.options(**options).load().count()


def test_a_stream_reads_each_record_once_over_restarts(spark: SparkSession, tmp_path: Path) -> None:
    checkpoint, out = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    with basaltmq.open(tmp_path / "data") as db:
        orders = db.topic("orders", partitions=2)

        def run() -> None:
            stream = (
                spark.readStream.format("basalt")
                .option("subscribe", "orders")
                .option("startingOffsets", "earliest")
                .option("maxOffsetsPerTrigger", "30")
                .load(str(tmp_path / "data"))
            )
            query = (
                stream.writeStream.format("parquet")
                .option("checkpointLocation", checkpoint)
                .trigger(availableNow=True)
                .start(out)
            )
            assert query.awaitTermination(120)

        for turn in range(2):
            for partition in (0, 1):
                orders.append([f"{turn}-{i}" for i in range(40)], partition=partition)
            run()
        found = values(spark.read.parquet(out))
    expected = [(p, turn * 40 + i, f"{turn}-{i}") for p in (0, 1) for turn in range(2) for i in range(40)]
    assert found == expected
    offsets = sorted(Path(checkpoint, "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert len(offsets) >= 4
    assert '{"orders": {"0": 80, "1": 80}, "@topics": ' in offsets[-1].read_text()


def test_a_stream_detects_a_topic_that_was_created_again(spark: SparkSession, tmp_path: Path) -> None:
    data, checkpoint, out = (str(tmp_path / name) for name in ("data", "checkpoint", "out"))

    def run(fail_on_data_loss: str) -> None:
        options = {"subscribe": "orders", "startingOffsets": "earliest", "failOnDataLoss": fail_on_data_loss}
        stream = spark.readStream.format("basalt").options(**options).load(data)
        writer = stream.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start(out)
        try:
            query.awaitTermination(120)
        finally:
            query.stop()

    with basaltmq.open(data) as db:
        db.topic("orders").append(["old"] * 100)
    run("true")
    with basaltmq.open(data) as db:
        db.delete_topic("orders")
        db.topic("orders").append([f"new {at}" for at in range(180)])
    with pytest.raises(PySparkException, match=r"orders\[0\] belongs to another topic: expected topic id"):
        run("true")
    run("false")
    found = spark.read.parquet(out).selectExpr("CAST(value AS STRING) AS text").where("text LIKE 'new%'").collect()
    assert sorted(row.text for row in found) == sorted(f"new {at}" for at in range(180))
