"""Target of a job's records: a topic, or a directory of Parquet files.

A topic gets all records as one batch of a named run. The checkpoint keeps the name, so a restarted job writes nothing
twice (`streams/imports`). A Parquet directory is complete when it contains Spark's `_SUCCESS`. An incomplete directory
is written again; a complete one is never overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from uuid import uuid4

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql

from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError
from basaltmq.pipeline.files import Files

RECORD = ("key", "value", "headers", "timestamp")
"""Columns that a topic stores."""


class Sink(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `parquet` and `topic` is set."""

    parquet: str | None = None
    topic: str | None = None
    location: dict[str, str] = {}
    """Options of the basalt sink: the store of the topic."""

    def check(self) -> None:
        if (self.parquet is None) == (self.topic is None):
            raise InvalidArgumentError("give exactly one target: a topic, or a Parquet directory")


class Named(msgspec.Struct, frozen=True):
    run: str


_decode_named: Final = json_decoder(Named)


def named_run(spark: SparkSession, checkpoint: str | None, kind: str) -> str:
    """Return the run in the checkpoint, or create one. Without a checkpoint, the run is new."""
    fresh = f"{kind}-{uuid4().hex}"
    if checkpoint is None:
        return fresh
    files = Files(spark, checkpoint)
    path = f"{checkpoint.rstrip('/')}/run.json"
    known = files.read_plan(path, _decode_named)
    if known is not None:
        return known.run
    files.write_json(path, Named(fresh))
    return fresh


def copy_records(
    spark: SparkSession,
    source: dict[str, str],
    sink: Sink,
    select: Callable[[DataFrame], DataFrame],
    *,
    job: str,
    checkpoint: str | None,
    dry_run: bool,
) -> tuple[str, int, int]:
    """Write the records of `source` that `select` returns. Return the run, and the numbers read and selected."""
    if not dry_run:
        sink.check()
    run = named_run(spark, None if dry_run else checkpoint, job)
    read, selected = Observation(), Observation()
    records = spark.read.format("basalt").options(**source | {"includeHeaders": "true"}).load()
    counted = sql.count(sql.lit(1)).alias("records")
    found = select(records.observe(read, counted)).observe(selected, counted)
    if dry_run:
        found.write.format("noop").mode("overwrite").save()
    else:
        write_records(spark, found, sink, run)
    return run, int(read.get["records"]), int(selected.get["records"])


def write_records(spark: SparkSession, frame: DataFrame, sink: Sink, run: str) -> None:
    """Write the records. Records of a key stay in timestamp order."""
    if sink.parquet is not None:
        root = sink.parquet.rstrip("/")
        if Files(spark, root).exists(f"{root}/_SUCCESS"):
            raise InvalidArgumentError(f"{root} exists and is complete; choose another directory, or delete it")
        frame.write.mode("overwrite").option("compression", "zstd").parquet(root)
        return
    assert sink.topic is not None, "checked before"
    (
        frame.repartition("key")
        .sortWithinPartitions("timestamp", "topic", "partition", "offset")
        .select(*(sql.col(name) for name in RECORD))
        .write.format("basalt")
        .mode("append")
        .options(**sink.location, topic=sink.topic, runId=run, batchId="0")
        .save()
    )
