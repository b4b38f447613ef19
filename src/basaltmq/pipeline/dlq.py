"""Dead-letter jobs: a report by queue, cause and time, and a redrive of selected messages.

A redrive stores its state in its checkpoint:

    plan.json    name of the run, queue, condition
    snapshot/    all dead letters at the start, as Parquet; complete before the first message moves

The condition is evaluated on the snapshot, so later dead letters stay, and a repeated evaluation gives the same result.
A message moves in one batch and then carries the name of the run in a header. So an interrupted redrive resumes where
it stopped. A message that was redriven and dead-lettered again is not moved a second time.

The cause of a message comes from its headers (`queues/lifecycle/dead_letters.py`). A message from AMQP that was
dead-lettered through an exchange has its history in its envelope, so its reason is `unknown`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final
from uuid import uuid4

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError, StoreLockedError
from basaltmq.pipeline.files import Files
from basaltmq.pipeline.remote import RemoteView
from basaltmq.pipeline.source import remote_view
from basaltmq.pipeline.store_path import DEFAULT_VHOST, store_path
from basaltmq.queues.browsing.browse import ALL_NS, browse
from basaltmq.queues.config import decode_config
from basaltmq.queues.lifecycle.dead_letters import FIRST_QUEUE, HISTORY, LAST_ERROR
from basaltmq.queues.message import Message
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.open import open_store, open_view
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.group_commit import GroupCommit

STAMP: Final = "x-redrive-run"
"""Header with the run that redrove a message."""

IDS_MAX: Final = 5_000_000
"""Maximum messages of one run. Their ids are in the driver's memory, 100 bytes each."""

IDS_PER_REQUEST: Final = 10_000
"""Ids per request to a broker, which scans the queue once per request."""

SHOWN_MAX: Final = 50
"""Maximum number of causes and of fairness keys in a report."""

ERROR_CHARACTERS: Final = 200
"""Characters of an error text. The rest is usually a stack trace, which differs each time."""

_DEATHS: Final = (
    "array<struct<queue: string, reason: string, count: bigint, first_ms: bigint, last_ms: bigint, attempts: bigint>>"
)


class Cause(msgspec.Struct, frozen=True):
    """Messages with the same cause."""

    queue: str
    """The dead-letter queue."""
    origin: str
    """The queue that dead-lettered them first."""
    reason: str
    error: str
    messages: int
    attempts: int
    """Sum of their attempts before they were dead-lettered."""
    first: str
    last: str


class DeadQueue(msgspec.Struct, frozen=True):
    queue: str
    messages: int
    size_bytes: int
    oldest: str | None
    newest: str | None
    origins: int
    redriven_before: int
    """Messages that were redriven and dead-lettered again."""


class DeadHour(msgspec.Struct, frozen=True):
    """Messages dead-lettered in one hour."""

    queue: str
    hour: str
    reason: str
    messages: int


class DeadKey(msgspec.Struct, frozen=True):
    queue: str
    fairness_key: str
    messages: int


class DlqReport(msgspec.Struct, frozen=True):
    queues: list[DeadQueue]
    causes: list[Cause]
    hours: list[DeadHour]
    keys: list[DeadKey]
    seconds: float


def dead_letter_queues(path: str, vhost: str = DEFAULT_VHOST) -> list[str]:
    """Return the queues that other queues use for dead letters."""
    with closing(open_view(store_path(path, vhost))) as store:
        configs = [decode_config(queue_keys.decode_queue_key(key), raw) for key, raw in store.scan(Family.QUEUES)]
    names = {config.name for config in configs}
    return sorted({name for each in configs if (name := each.dead_letter_queue) is not None and name in names})


def dead_letters(spark: SparkSession, location: dict[str, str], queue: str) -> DataFrame:
    """Return the messages of a queue with their causes."""
    options = location | {"queue": queue, "includeHeaders": "true"}
    return with_causes(spark.read.format("basalt").options(**options).load())


def with_causes(messages: DataFrame) -> DataFrame:
    """Add the columns origin, reason, error, died_at, died_of_attempts and redriven_by from the headers."""
    deaths = sql.from_json(header(HISTORY), _DEATHS)
    return (
        messages.withColumn("_death", deaths.getItem(0))
        .withColumn("origin", sql.coalesce(header(FIRST_QUEUE), sql.col("_death.queue"), sql.lit("unknown")))
        .withColumn("reason", sql.coalesce(sql.col("_death.reason"), sql.lit("unknown")))
        .withColumn("error", sql.coalesce(header(LAST_ERROR), sql.lit("")))
        .withColumn("died_at", sql.coalesce(sql.timestamp_millis("_death.last_ms"), sql.col("timestamp")))
        .withColumn("died_of_attempts", sql.coalesce(sql.col("_death.attempts"), sql.lit(0)))
        .withColumn("redriven_by", header(STAMP))
        .drop("_death")
    )


def header(name: str) -> Column:
    """Return the first header of a name as text, or null."""
    named = sql.filter("headers", lambda each: each.getField("key") == sql.lit(name))
    return sql.get(named, sql.lit(0)).getField("value").cast("string")


def dlq_report(spark: SparkSession, location: dict[str, str], queues: list[str]) -> DlqReport:
    """Report dead letters without changing them."""
    if not queues:
        raise InvalidArgumentError("no queue has a dead-letter queue; give the queue to report")
    began_s = time.monotonic()
    result = DlqReport([], [], [], [], 0.0)
    for queue in queues:
        messages = dead_letters(spark, location, queue).cache()
        try:
            _report(result, queue, messages)
        finally:
            messages.unpersist()
    return msgspec.structs.replace(result, seconds=time.monotonic() - began_s)


def _report(result: DlqReport, queue: str, messages: DataFrame) -> None:
    def moment(column: Column) -> Column:
        return sql.date_format(column, "yyyy-MM-dd HH:mm:ss")

    row: Any = messages.agg(
        sql.count(sql.lit(1)).alias("messages"),
        sql.coalesce(sql.sum(sql.octet_length("value")), sql.lit(0)).alias("size_bytes"),
        moment(sql.min("died_at")).alias("oldest"),
        moment(sql.max("died_at")).alias("newest"),
        sql.countDistinct("origin").alias("origins"),
        sql.count("redriven_by").alias("redriven_before"),
    ).collect()[0]
    result.queues.append(DeadQueue(queue, *row))
    # Workers store a traceback below the first line.
    short = sql.substring(sql.substring_index("error", "\n", 1), 1, ERROR_CHARACTERS)
    causes = (
        messages.groupBy("origin", "reason", short.alias("error"))
        .agg(
            sql.count(sql.lit(1)).alias("messages"),
            sql.sum("died_of_attempts").alias("attempts"),
            moment(sql.min("died_at")).alias("first"),
            moment(sql.max("died_at")).alias("last"),
        )
        .orderBy(sql.col("messages").desc(), "origin", "reason", "error")
        .limit(SHOWN_MAX)
        .collect()
    )
    result.causes.extend(Cause(queue, *each) for each in causes)
    hour = sql.date_format("died_at", "yyyy-MM-dd HH:00").alias("hour")
    hours = messages.groupBy(hour, "reason").count().orderBy("hour", "reason").collect()
    result.hours.extend(DeadHour(queue, *each) for each in hours)
    by_key = (
        messages.groupBy(sql.col("key").cast("string").alias("key"))
        .count()
        .orderBy(sql.col("count").desc(), "key")
        .limit(SHOWN_MAX)
        .collect()
    )
    result.keys.extend(DeadKey(queue, each["key"] or "", each["count"]) for each in by_key)


class RedriveJob(msgspec.Struct, frozen=True, kw_only=True):
    path: str = ""
    """Data directory, which no other process may have open for writing; or use `broker`."""
    broker: dict[str, str] = {}
    """Options of the basalt source: the broker."""
    vhost: str = DEFAULT_VHOST
    queue: str
    to: str | None = None
    """None means the original queue of each message."""
    where: str | None = None
    """SQL condition on value, key, headers, timestamp, attempts, origin, reason, error, died_at and redriven_by."""
    rate_per_s: float | None = None
    checkpoint: str
    dry_run: bool = False


class RedrivePlan(msgspec.Struct, frozen=True):
    """Parameters of a redrive, fixed at its first start."""

    run: str
    queue: str
    to: str | None
    where: str | None


_decode_plan: Final = json_decoder(RedrivePlan)


class Redriven(msgspec.Struct, frozen=True):
    run: str
    snapshot: str | None
    dead: int
    """Messages in the snapshot."""
    wanted: int
    """Messages that match the condition."""
    redriven: int
    """Messages moved by this run."""
    stayed: int
    """Matching messages that remain: leased, delayed, or their original queue does not exist."""
    seconds: float


def redrive(spark: SparkSession, job: RedriveJob, on_progress: Callable[[int, int], None] | None = None) -> Redriven:
    """Start the job, or resume it. Attempts are reset, and a header names the run."""
    began_s = time.monotonic()
    location = job.broker or {"path": job.path, "vhost": job.vhost}
    if job.dry_run:
        dead, wanted = _counts(dead_letters(spark, location, job.queue), job.where)
        return Redriven("", None, dead, wanted, 0, wanted, time.monotonic() - began_s)
    plan = _plan(spark, job)
    snapshot = f"{job.checkpoint.rstrip('/')}/snapshot"
    files = Files(spark, snapshot)
    if not files.exists(f"{snapshot}/_SUCCESS"):
        dead_letters(spark, location, job.queue).write.mode("overwrite").parquet(snapshot)
    kept = spark.read.parquet(snapshot)
    dead, wanted = _counts(kept, plan.where)
    if wanted > IDS_MAX:
        raise InvalidArgumentError(
            f"{wanted} messages exceed the limit of {IDS_MAX} per run; restrict them with a condition"
        )
    chosen = kept if plan.where is None else kept.where(plan.where)
    ids = {bytes(row["messageId"]) for row in chosen.select("messageId").toLocalIterator()}
    move = _move_remote if job.broker else _move
    moved, left = move(job, plan, ids, on_progress)
    return Redriven(plan.run, snapshot, dead, wanted, moved, left, time.monotonic() - began_s)


def _counts(messages: DataFrame, where: str | None) -> tuple[int, int]:
    wanted = sql.count(sql.lit(1)) if where is None else sql.count_if(sql.expr(where))
    dead, chosen = messages.agg(sql.count(sql.lit(1)), wanted).collect()[0]
    return dead, chosen


def _plan(spark: SparkSession, job: RedriveJob) -> RedrivePlan:
    root = job.checkpoint.rstrip("/")
    files = Files(spark, root)
    path = f"{root}/plan.json"
    plan = files.read_plan(path, _decode_plan)
    if plan is None:
        plan = RedrivePlan(f"redrive-{uuid4().hex}", job.queue, job.to, job.where)
        files.write_json(path, plan)
    if (plan.queue, plan.to, plan.where) != (job.queue, job.to, job.where):
        raise InvalidArgumentError(
            f"{path} belongs to another redrive; give the same queue and condition, or another checkpoint"
        )
    return plan


def _move(
    job: RedriveJob, plan: RedrivePlan, ids: set[bytes], on_progress: Callable[[int, int], None] | None
) -> tuple[int, int]:
    """Move the messages in a store. Return (number moved, matching messages that remain)."""
    seen = 0

    def is_wanted(message: Message) -> bool:
        nonlocal seen
        is_one = message.id in ids and message.headers.get(STAMP) != plan.run
        seen += is_one
        if on_progress is not None and is_one:
            on_progress(seen, len(ids))
        return is_one

    with closing(_opened(job)) as store:
        with closing(GroupCommit(store)) as commit, QueuePlane(store, commit) as plane:
            moved = plane.redrive(
                plan.queue, to=plan.to, wanted=is_wanted, rate_per_s=job.rate_per_s, stamp={STAMP: plan.run}
            )
        store.sync()
        return moved, _left(store, plan, ids)


def _opened(job: RedriveJob) -> RocksStore:
    try:
        return open_store(store_path(job.path, job.vhost), create=False)
    except StoreLockedError as error:
        raise StoreLockedError(
            f"{error}. A redrive needs write access: use the broker with --server "
            "http://host:15672, or while no other process has the store open for writing; the checkpoint "
            "is not affected"
        ) from None


def _move_remote(
    job: RedriveJob, plan: RedrivePlan, ids: set[bytes], on_progress: Callable[[int, int], None] | None
) -> tuple[int, int]:
    """Like `_move`, through the broker."""
    remote = remote_view(job.broker)
    ordered = sorted(ids)
    stamp = {STAMP: plan.run}
    moved = begin_ns = 0
    for at in range(0, len(ordered), IDS_PER_REQUEST):
        some = ordered[at : at + IDS_PER_REQUEST]
        count, begin_ns = remote.redrive(
            plan.queue, some, to=plan.to, stamp=stamp, rate_per_s=job.rate_per_s, begin_ns=begin_ns, before=moved
        )
        moved += count
        if on_progress is not None:
            on_progress(at + len(some), len(ordered))
    return moved, sum(_left_remote(remote, plan, ids))


def _left_remote(remote: RemoteView, plan: RedrivePlan, ids: set[bytes]) -> Iterator[int]:
    for batch in remote.messages(plan.queue, 0, ALL_NS):
        for message_id, headers in zip(batch.column("messageId"), batch.column("headers"), strict=True):
            stamps = [each["value"] for each in headers.as_py() or () if each["key"] == STAMP]
            yield message_id.as_py() in ids and stamps != [plan.run.encode()]


def _left(store: Reader, plan: RedrivePlan, ids: set[bytes]) -> int:
    left = 0
    after = b""
    while True:
        page = browse(store, plan.queue, after=after)
        left += sum(each.id in ids and each.headers.get(STAMP) != plan.run for each in page.messages)
        if page.is_last:
            return left
        after = page.cursors[-1]
