"""Replay job: writes records of an archive or a log to a topic, each exactly once, even if the job is killed.

    plan: offset ranges by partition, split into steps            -> plan.json in the checkpoint, written once
    step: read, filter and write its records as one batch of the run (`streams/imports`), numbered by the step

The target store records the last completed step, so a restarted job continues after it. An interrupted step is finished
or repeated, never applied twice. Records keep their key, value, headers and timestamp. They are partitioned by key, or
with `keep_partitions` stay in their partition. The order of records with the same key is kept.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final
from uuid import uuid4

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql

from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError
from basaltmq.pipeline.archive.data_files import read_archived
from basaltmq.pipeline.archive.manifest import Manifest, read_manifests
from basaltmq.pipeline.files import Files
from basaltmq.pipeline.source import Topics, offsets_of, open_topics
from basaltmq.pipeline.store_path import DEFAULT_VHOST, store_path
from basaltmq.store.open import open_view
from basaltmq.streams.imports.imports import read_run

STEP_RECORDS: Final = 500_000
"""Default of offsets per step: some seconds of work. Each step opens the store once."""

_SERVER: Final = "server"

RATED_STEP_S: Final = 5.0
"""With a rate limit, a step covers at most this time, so that the rate stays even."""


class Range(msgspec.Struct, frozen=True):
    """Offsets [begin, end) of a partition."""

    topic: str
    partition: int
    begin: int
    end: int

    def cut(self, index: int, count: int) -> Range:
        """Return part `index` of `count` equal parts."""
        width = self.end - self.begin
        begin = self.begin + width * index // count
        return msgspec.structs.replace(self, begin=begin, end=self.begin + width * (index + 1) // count)


class Plan(msgspec.Struct, frozen=True):
    """Ranges and steps of a replay, fixed at its first start."""

    run: str
    ranges: list[Range]
    steps: int


_decode_plan: Final = json_decoder(Plan)
_decode_offsets: Final = json_decoder(dict[str, dict[str, int]])


class ReplayJob(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `archive` and `source` must be set."""

    topics: list[str]
    target: dict[str, str]
    """Options of the basalt sink: the store to write to."""
    target_topic: str | None = None
    """None keeps the topic of each record."""
    archive: str | None = None
    source: dict[str, str] | None = None
    """Options of the basalt source: location of the log."""
    bounds: dict[str, str] = {}
    """Options of the source for the range. An archive supports only timestamps."""
    checkpoint: str
    where: str | None = None
    """SQL condition on key, value, topic, partition, offset, timestamp and headers."""
    rate_per_s: float | None = None
    step_records: int = STEP_RECORDS
    keep_partitions: bool = False
    dry_run: bool = False


class Replayed(msgspec.Struct, frozen=True):
    run: str
    steps: int
    """Steps of this run."""
    steps_before: int
    records: int
    """Records written in this run, after the condition."""
    seconds: float


def replay(
    spark: SparkSession,
    job: ReplayJob,
    on_progress: Callable[[int, int], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Replayed:
    """Start the job, or resume it. `on_progress` gets the steps done and the total."""
    if (job.archive is None) == (job.source is None):
        raise InvalidArgumentError("give exactly one of archive and source")
    if job.rate_per_s is not None and not job.rate_per_s > 0:
        raise InvalidArgumentError(f"the rate must be above 0 records/s, not {job.rate_per_s}")
    files = Files(spark, job.checkpoint)
    plan = _plan(spark, files, job)
    began_s = time.monotonic()
    first = _steps_done(files, job, plan.run)
    records = 0
    for step in range(first, 0 if job.dry_run else plan.steps):
        records += _do(spark, job, plan, step)
        if _SERVER in job.target:
            files.write(_done_path(job), str(step + 1).encode())
        if on_progress is not None:
            on_progress(step + 1, plan.steps)
        if job.rate_per_s is not None:
            sleep(max(0.0, records / job.rate_per_s - (time.monotonic() - began_s)))
    steps = 0 if job.dry_run else max(0, plan.steps - first)
    return Replayed(plan.run, steps, first, records, time.monotonic() - began_s)


def _plan(spark: SparkSession, files: Files, job: ReplayJob) -> Plan:
    path = f"{job.checkpoint.rstrip('/')}/plan.json"
    known = files.read_plan(path, _decode_plan)
    if known is not None:
        return known
    ranges = _archived_ranges(spark, job) if job.archive is not None else _log_ranges(job)
    if not ranges:
        raise InvalidArgumentError(f"no records to replay in {', '.join(job.topics)}")
    total = sum(each.end - each.begin for each in ranges)
    most = job.step_records
    if job.rate_per_s is not None:
        most = max(1, min(most, int(job.rate_per_s * RATED_STEP_S)))
    plan = Plan(f"replay-{uuid4().hex}", ranges, math.ceil(total / most))
    if not job.dry_run:
        files.write_json(path, plan)
    return plan


def _archived_ranges(spark: SparkSession, job: ReplayJob) -> list[Range]:
    ranges: dict[tuple[str, int], Range] = {}
    for manifest in _manifests(spark, job):
        for file in manifest.files:
            if file.topic in job.topics:
                key = file.topic, file.partition
                known = ranges.get(key, Range(*key, file.first_offset, file.last_offset + 1))
                begin, end = min(known.begin, file.first_offset), max(known.end, file.last_offset + 1)
                ranges[key] = Range(*key, begin, end)
    return [ranges[key] for key in sorted(ranges)]


def _log_ranges(job: ReplayJob) -> list[Range]:
    assert job.source is not None, "checked before"
    ranges = []
    with open_topics(job.source) as view:
        for (name, number), (start, end) in offsets_of(view, job.topics).items():
            begin = max(start, _offset(view, job, "starting", name, number, start))
            stop = min(end, _offset(view, job, "ending", name, number, end))
            if begin < stop:
                ranges.append(Range(name, number, begin, stop))
    return ranges


def _offset(view: Topics, job: ReplayJob, side: str, name: str, number: int, default: int) -> int:
    """Return the offset of one bound in a partition."""
    time_ms = job.bounds.get(f"{side}Timestamp")
    if time_ms is not None:
        return view.offset_at(name, number, int(time_ms))
    text = job.bounds.get(f"{side}Offsets", "")
    if text == "latest":
        return view.info(name, number).high_watermark
    if not text.startswith("{"):
        return default
    try:
        offsets = _decode_offsets(text)
    except msgspec.DecodeError as error:
        raise InvalidArgumentError(
            f'offsets must have the form {{"topic": {{"0": 12}}}}, not {text!r:.80}: {error}'
        ) from None
    return offsets.get(name, {}).get(str(number), default)


def _manifests(spark: SparkSession, job: ReplayJob) -> list[Manifest]:
    assert job.archive is not None, "called for an archive only"
    root = job.archive.rstrip("/")
    found = read_manifests(Files(spark, root), root)
    if not found:
        raise InvalidArgumentError(f"{root} is not an archive: it has no manifests")
    return found


def _steps_done(files: Files, job: ReplayJob, run: str) -> int:
    if _SERVER in job.target:
        # Written after each step, so at most one step behind. A broker applies a step of a run only once.
        path = _done_path(job)
        return int(files.read(path)) if files.exists(path) else 0
    with closing(open_view(store_path(job.target["path"], job.target.get("vhost", DEFAULT_VHOST)))) as store:
        return read_run(store, run).last_batch + 1


def _done_path(job: ReplayJob) -> str:
    return f"{job.checkpoint.rstrip('/')}/steps-done"


def _do(spark: SparkSession, job: ReplayJob, plan: Plan, step: int) -> int:
    ranges = [part for each in plan.ranges if (part := each.cut(step, plan.steps)).begin < part.end]
    if not ranges:
        return 0
    frame = _archived(spark, job, ranges) if job.archive is not None else _logged(spark, job, ranges)
    if frame is None:
        return 0
    if job.archive is not None:
        frame = _between(frame, job.bounds)
    if job.where is not None:
        frame = frame.where(job.where)
    seen = Observation()
    columns = ["key", "value", "headers", "timestamp"]
    columns += ["topic"] if job.target_topic is None else []
    columns += ["partition"] if job.keep_partitions else []
    writer = (
        frame.observe(seen, sql.count(sql.lit(1)).alias("records"))
        .select(*columns)
        .write.format("basalt")
        .mode("append")
        .options(**job.target, runId=plan.run, batchId=str(step))
    )
    if job.target_topic is not None:
        writer = writer.option("topic", job.target_topic)
    writer.save()
    return int(seen.get["records"])


def _archived(spark: SparkSession, job: ReplayJob, ranges: list[Range]) -> DataFrame | None:
    wanted = {(each.topic, each.partition): each for each in ranges}
    paths = []
    for manifest in _manifests(spark, job):
        for file in manifest.files:
            of = wanted.get((file.topic, file.partition))
            if of is not None and file.first_offset < of.end and of.begin <= file.last_offset:
                paths.append(file.path)
    if not paths:
        return None
    assert job.archive is not None, "called for an archive only"
    is_wanted = sql.lit(False)
    for each in ranges:
        is_wanted = is_wanted | (
            (sql.col("topic") == each.topic)
            & (sql.col("partition") == each.partition)
            & sql.col("offset").between(each.begin, each.end - 1)
        )
    frame = read_archived(spark, job.archive.rstrip("/"), paths).where(is_wanted)
    return frame.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")


def _between(frame: DataFrame, bounds: dict[str, str]) -> DataFrame:
    """Filter records of an archive by timestamp."""
    for name, text in bounds.items():
        if not name.endswith("Timestamp"):
            if text in ("earliest", "latest"):
                continue
            raise InvalidArgumentError(
                "a replay from an archive supports only times as bounds; put offsets into the condition"
            )
        moment = sql.timestamp_millis(sql.lit(int(text)))
        frame = frame.where(sql.col("timestamp") >= moment if name.startswith("s") else sql.col("timestamp") < moment)
    return frame


def _logged(spark: SparkSession, job: ReplayJob, ranges: list[Range]) -> DataFrame:
    assert job.source is not None, "called for a log only"
    assigned: dict[str, list[int]] = {}
    begin: dict[str, dict[str, int]] = {}
    end: dict[str, dict[str, int]] = {}
    for each in ranges:
        assigned.setdefault(each.topic, []).append(each.partition)
        begin.setdefault(each.topic, {})[str(each.partition)] = each.begin
        end.setdefault(each.topic, {})[str(each.partition)] = each.end
    options = job.source | {
        "assign": json.dumps(assigned),
        "startingOffsets": json.dumps(begin),
        "endingOffsets": json.dumps(end),
        "includeHeaders": "true",
    }
    return spark.read.format("basalt").options(**options).load()
