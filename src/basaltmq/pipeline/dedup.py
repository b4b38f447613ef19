"""Dedup job: removes duplicate records.

Records are duplicates if they have the same identity: the key, a hash of the value, or a SQL expression. Without a
window, the first record of each identity is kept. With a window, a record is removed if the previous one of its
identity is at most that much older. So with a window of two minutes, a copy sent every minute is removed all day, and a
record after a pause is kept. Records without an identity, such as those with a null key, are all kept.
"""

from __future__ import annotations

import time

import msgspec
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as sql

from basaltmq.errors import InvalidArgumentError
from basaltmq.pipeline.sink import Sink, copy_records

ORDER = ("timestamp", "topic", "partition", "offset")


class DedupJob(msgspec.Struct, frozen=True, kw_only=True):
    source: dict[str, str]
    """Options of the basalt source."""
    to: Sink
    by: str = "key"
    """`key`, `value`, or a SQL expression on the columns of a record."""
    window_s: float | None = None
    checkpoint: str | None = None
    dry_run: bool = False


class Deduped(msgspec.Struct, frozen=True):
    run: str
    read: int
    kept: int
    duplicates: int
    seconds: float


def dedup(spark: SparkSession, job: DedupJob) -> Deduped:
    if job.window_s is not None and not job.window_s > 0:
        raise InvalidArgumentError(f"the window must be longer than 0 s, not {job.window_s}")
    began_s = time.monotonic()
    run, read, kept = copy_records(
        spark,
        job.source,
        job.to,
        lambda records: first_of_each(records, job.by, job.window_s),
        job="dedup",
        checkpoint=job.checkpoint,
        dry_run=job.dry_run,
    )
    return Deduped(run, read, kept, read - kept, time.monotonic() - began_s)


def first_of_each(records: DataFrame, by: str, window_s: float | None) -> DataFrame:
    """Return the records that are not duplicates."""
    identity = {"key": sql.col("key"), "value": sql.sha2("value", 256)}.get(by)
    identified = records.withColumn("_identity", sql.expr(by) if identity is None else identity)
    # Records without identity would all go to one task, so they bypass the window.
    without_identity = identified.where(sql.col("_identity").isNull())
    before = Window.partitionBy("_identity").orderBy(*ORDER)
    previous = sql.lag("timestamp").over(before)
    stays = previous.isNull()
    if window_s is not None:
        age_us = sql.unix_micros("timestamp") - sql.unix_micros(previous)
        stays = stays | (age_us > int(window_s * 1_000_000))
    named = (
        identified.where(sql.col("_identity").isNotNull()).withColumn("_stays", stays).where("_stays").drop("_stays")
    )
    return named.unionByName(without_identity).drop("_identity")
