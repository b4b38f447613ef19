"""Latest job: returns the newest record of each key, like a compacted topic, without changing the topic.

Within a partition the record with the highest offset is the newest. A key may be in several partitions, if their number
was changed; then the record with the latest timestamp wins. A newest record without a value is a tombstone and is left
out by default. Records without a key are left out.
"""

from __future__ import annotations

import time

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from basaltmq.pipeline.sink import Sink, copy_records

_RECORD = ("value", "timestamp", "topic", "partition", "offset", "headers")


class LatestJob(msgspec.Struct, frozen=True, kw_only=True):
    source: dict[str, str]
    """Options of the basalt source."""
    to: Sink
    keep_deleted: bool = False
    checkpoint: str | None = None
    dry_run: bool = False


class LatestResult(msgspec.Struct, frozen=True):
    run: str
    read: int
    keys: int
    """Keys written. Tombstones count only with `keep_deleted`."""
    seconds: float


def latest(spark: SparkSession, job: LatestJob) -> LatestResult:
    began_s = time.monotonic()
    run, read, keys = copy_records(
        spark,
        job.source,
        job.to,
        lambda records: newest_of_each(records, keep_deleted=job.keep_deleted),
        job="latest",
        checkpoint=job.checkpoint,
        dry_run=job.dry_run,
    )
    return LatestResult(run, read, keys, time.monotonic() - began_s)


def newest_of_each(records: DataFrame, *, keep_deleted: bool = False) -> DataFrame:
    """Return one record per key."""
    record = sql.struct(*_RECORD)
    within = (
        records.where(sql.col("key").isNotNull())
        .groupBy("topic", "key", "partition")
        .agg(sql.max_by(record, "offset").alias("record"))
    )
    order = sql.struct("record.timestamp", "record.partition", "record.offset")
    found = (
        within.groupBy("topic", "key")
        .agg(sql.max_by("record", order).alias("record"))
        .select("key", *(f"record.{name}" for name in _RECORD))
    )
    return found if keep_deleted else found.where(sql.col("value").isNotNull())
