"""Latency report: wait and processing times by queue and fairness key, from the topic `__events`.

    wait      enqueued -> leased for the first time
    work      leased for the last time -> acked
    total     enqueued -> acked

Percentiles are approximate (Spark), and exact up to 10,000 messages of a queue. `redelivered` counts messages leased
more than once. The skew of a queue is the wait of its slowest fairness key divided by that of the median key. If events
are sampled or the oldest are deleted, the counts cover only the events that exist. A message without a lease event has
no wait time.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from basaltmq.queues.events.event import TOPIC

PERCENTILES: Final = (0.5, 0.95, 0.99)
ACCURACY: Final = 10_000
KEYS_MAX: Final = 50
"""Fairness keys in the report, those with the longest wait."""


class Times(msgspec.Struct, frozen=True):
    """Percentiles 50, 95 and 99 in milliseconds; None without events."""

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


class QueueLatency(msgspec.Struct, frozen=True):
    queue: str
    fairness_key: str | None
    enqueued: int
    acked: int
    failed: int
    """Nacks and expired leases."""
    dead_lettered: int
    dropped: int
    redelivered: int
    wait: Times
    work: Times
    total: Times


class Minute(msgspec.Struct, frozen=True):
    """Events of a queue in one minute."""

    queue: str
    minute: str
    enqueued: int
    acked: int
    failed: int


class Latencies(msgspec.Struct, frozen=True):
    queues: list[QueueLatency]
    keys: list[QueueLatency]
    minutes: list[Minute]
    skew: dict[str, float]
    """By queue: p95 wait of the slowest fairness key, divided by that of the median key."""


def latency(spark: SparkSession, source: str | dict[str, str], options: dict[str, str] | None = None) -> Latencies:
    """Return the latencies of all events. `source` is a path, or options of the basalt source."""
    location = {"path": source} if isinstance(source, str) else source
    given = location | {"subscribe": TOPIC, "explodeEvents": "true"} | (options or {})
    events = spark.read.format("basalt").options(**given).load().cache()
    try:
        messages = _messages(events).cache()
        try:
            queues = [_row(row, None) for row in _summed(messages, "queue").orderBy("queue").collect()]
            by_key = _summed(messages, "queue", "fairnessKey").orderBy(sql.col("wait")[1].desc_nulls_last())
            keys = [_row(row, row["fairnessKey"]) for row in by_key.limit(KEYS_MAX).collect()]
        finally:
            messages.unpersist()
        return Latencies(queues, keys, _minutes(events), _skew(keys))
    finally:
        events.unpersist()


def _messages(events: DataFrame) -> DataFrame:
    """Return one row per message and queue."""

    def count(*kinds: str) -> Column:
        return sql.count_if(sql.col("kind").isin(*kinds))

    def at(kind: str) -> Column:
        return sql.when(sql.col("kind") == kind, sql.col("atNs"))

    return events.groupBy("queue", "fairnessKey", "messageId").agg(
        sql.min("enqueuedNs").alias("enqueued_ns"),
        sql.min(at("leased")).alias("first_ns"),
        sql.max(at("leased")).alias("last_ns"),
        sql.max(at("acked")).alias("acked_ns"),
        count("enqueued").alias("enqueued"),
        count("leased").alias("leased"),
        count("acked").alias("acked"),
        count("nacked", "lapsed").alias("failed"),
        count("dead_lettered").alias("dead_lettered"),
        count("dropped").alias("dropped"),
    )


def _summed(messages: DataFrame, *by: str) -> DataFrame:
    def percentiles(begin: str, end: str) -> Column:
        took = sql.greatest(sql.lit(0), sql.col(end) - sql.col(begin)) / 1e6
        known = sql.when(sql.col(begin).isNotNull() & sql.col(end).isNotNull(), took)
        return sql.percentile_approx(known, list(PERCENTILES), ACCURACY)

    return messages.groupBy(*by).agg(
        *(sql.sum(name).alias(name) for name in ("enqueued", "acked", "failed", "dead_lettered", "dropped")),
        sql.count_if(sql.col("leased") > 1).alias("redelivered"),
        percentiles("enqueued_ns", "first_ns").alias("wait"),
        percentiles("last_ns", "acked_ns").alias("work"),
        percentiles("enqueued_ns", "acked_ns").alias("total"),
    )


def _row(row: Any, fairness_key: str | None) -> QueueLatency:
    return QueueLatency(
        row["queue"],
        fairness_key,
        row["enqueued"],
        row["acked"],
        row["failed"],
        row["dead_lettered"],
        row["dropped"],
        row["redelivered"],
        *(Times(*(row[name] or (None, None, None))) for name in ("wait", "work", "total")),
    )


def _minutes(events: DataFrame) -> list[Minute]:
    minute = sql.date_format(sql.timestamp_micros((sql.col("atNs") / 1000).cast("bigint")), "yyyy-MM-dd HH:mm")
    rows = (
        events.groupBy("queue", minute.alias("minute"))
        .agg(
            sql.count_if(sql.col("kind") == "enqueued").alias("enqueued"),
            sql.count_if(sql.col("kind") == "acked").alias("acked"),
            sql.count_if(sql.col("kind").isin("nacked", "lapsed")).alias("failed"),
        )
        .orderBy("queue", "minute")
        .collect()
    )
    return [Minute(row["queue"], row["minute"], row["enqueued"], row["acked"], row["failed"]) for row in rows]


def _skew(keys: list[QueueLatency]) -> dict[str, float]:
    waits: dict[str, list[float]] = {}
    for each in keys:
        if each.wait.p95_ms is not None:
            waits.setdefault(each.queue, []).append(each.wait.p95_ms)
    found = {}
    for queue, of in waits.items():
        median = sorted(of)[len(of) // 2]
        if len(of) > 1 and median > 0:
            found[queue] = max(of) / median
    return found
