"""Where a job's records go: to a topic, as one batch of a run that counts once, or to a folder of Parquet.

A run is named in the checkpoint if there is one, so that a job that is started again with it writes nothing twice to a
topic (`streams.imports`). A folder is done when it has Spark's `_SUCCESS`; what a killed job left without it is written
anew, and a folder that is done is never written to again.
"""

from __future__ import annotations

from typing import Final
from uuid import uuid4

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from basaltmq.decoding import json_decoder
from basaltmq.errors import CorruptionError, InvalidArgumentError
from basaltmq.pipeline.files import Files

RECORD = ("key", "value", "headers", "timestamp")
"""Columns a topic takes."""


class Outlet(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two."""

    parquet: str | None = None
    topic: str | None = None
    place: dict[str, str] = {}
    """Options of the basalt sink that say which store the topic is in."""

    def check(self) -> None:
        if (self.parquet is None) == (self.topic is None):
            raise InvalidArgumentError("records go to a topic or to a folder of Parquet: give one of the two")


class Named(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of a run."""

    run: str


_decode_named: Final = json_decoder(Named)


def named_run(spark: SparkSession, checkpoint: str | None, kind: str) -> str:
    """The run a checkpoint names, or one made for it; without a checkpoint, one of its own."""
    fresh = f"{kind}-{uuid4().hex}"
    if checkpoint is None:
        return fresh
    files = Files(spark, checkpoint)
    path = f"{checkpoint.rstrip('/')}/run.json"
    if files.exists(path):
        try:
            return _decode_named(files.read(path)).run
        except msgspec.DecodeError as error:
            raise CorruptionError(f"{path} cannot be read: {error}; begin anew with another checkpoint") from None
    files.write(path, msgspec.json.encode(Named(fresh)))
    return fresh


def pour(spark: SparkSession, frame: DataFrame, outlet: Outlet, run: str) -> None:
    """Write the records. Those of a key stay in the order of their times."""
    if outlet.parquet is not None:
        root = outlet.parquet.rstrip("/")
        if Files(spark, root).exists(f"{root}/_SUCCESS"):
            raise InvalidArgumentError(f"{root} is there and complete; name another folder, or remove it")
        frame.write.mode("overwrite").option("compression", "zstd").parquet(root)
        return
    assert outlet.topic is not None, "checked before"
    (
        frame.repartition("key")
        .sortWithinPartitions("timestamp", "topic", "partition", "offset")
        .select(*(sql.col(name) for name in RECORD))
        .write.format("basalt")
        .mode("append")
        .options(**outlet.place, topic=outlet.topic, runId=run, batchId="0")
        .save()
    )
