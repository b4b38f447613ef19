"""Dedup: records without those that came before.

Two records are the same if their identity is: the key, a hash of the value, or what an expression in SQL says. With a
window, a record goes if another one of its identity came at most so long before it, by their times; so a copy that is
sent every minute for a day goes all day with a window of two minutes, and what comes back after a silence stays.
Without a window the first one of each identity stays. Records without an identity (a key that is null) all stay.
"""

from __future__ import annotations

import time

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as sql

from basaltmq.errors import InvalidArgumentError
from basaltmq.pipeline.sink import Outlet, named_run, pour

ORDER = ("timestamp", "topic", "partition", "offset")


class DedupJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to read, what makes two records the same, and where the rest goes."""

    source: dict[str, str]
    """Options of the basalt source."""
    to: Outlet
    by: str = "key"
    """`key`, `value`, or an expression in SQL over the columns of a record."""
    window_s: float | None = None
    checkpoint: str | None = None
    dry_run: bool = False


class Deduped(msgspec.Struct, frozen=True):
    """What was done, or would be."""

    run: str
    read: int
    kept: int
    duplicates: int
    seconds: float


def dedup(spark: SparkSession, job: DedupJob) -> Deduped:
    """Run the job."""
    if not job.dry_run:
        job.to.check()
    if job.window_s is not None and not job.window_s > 0:
        raise InvalidArgumentError(f"a window is longer than 0 s, not {job.window_s}")
    began_s = time.monotonic()
    run = named_run(spark, None if job.dry_run else job.checkpoint, "dedup")
    read, kept = Observation(), Observation()
    records = spark.read.format("basalt").options(**job.source | {"includeHeaders": "true"}).load()
    counted = sql.count(sql.lit(1)).alias("records")
    found = first_of_each(records.observe(read, counted), job.by, job.window_s).observe(kept, counted)
    if job.dry_run:
        found.write.format("noop").mode("overwrite").save()
    else:
        pour(spark, found, job.to, run)
    seen, left = int(read.get["records"]), int(kept.get["records"])
    return Deduped(run, seen, left, seen - left, time.monotonic() - began_s)


def first_of_each(records: DataFrame, by: str, window_s: float | None) -> DataFrame:
    """Records that are not like one before them."""
    identity = {"key": sql.col("key"), "value": sql.sha2("value", 256)}.get(by)
    told = records.withColumn("_identity", sql.expr(by) if identity is None else identity)
    # All that have none would come together in one task.
    nameless = told.where(sql.col("_identity").isNull())
    before = Window.partitionBy("_identity").orderBy(*ORDER)
    previous = sql.lag("timestamp").over(before)
    stays = previous.isNull()
    if window_s is not None:
        age_us = sql.unix_micros("timestamp") - sql.unix_micros(previous)
        stays = stays | (age_us > int(window_s * 1_000_000))
    named = told.where(sql.col("_identity").isNotNull()).withColumn("_stays", stays).where("_stays").drop("_stays")
    return named.unionByName(nameless).drop("_identity")
