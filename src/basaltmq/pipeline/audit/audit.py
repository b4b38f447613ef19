"""Audit job: checks that log, index, archive, groups, queues and imports are consistent, with independent counts.

    log        Spark reads every record: counts, distinct offsets and a checksum by block of offsets, counts by hour
    index      record counts of each partition against the log; on request row by row (`rebuild_index`)
    segments   files that the index names. If one is missing, the log cannot be read, and its records are not checked
    archive    every file of a manifest: existence, size, range and count; checksums by manifest; files without a
               manifest; and block by block against the log, where both have the offsets
    the rest   groups, queues, leases, imports, checksums of the log's frames (`audit/store.py`)

Blocks that differ are compared record by record, so a finding states how many records are on one side only and how many
differ. The audit changes nothing and works beside a writer: it checks the state at its start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from basaltmq.errors import InvalidArgumentError, NotFoundError, TopicNotFoundError
from basaltmq.pipeline.archive.archive import REJECTED
from basaltmq.pipeline.archive.data_files import path_within, read_archived
from basaltmq.pipeline.archive.manifest import CHECKSUM, ArchivedFile, Manifest, read_manifests
from basaltmq.pipeline.audit.store import MISSING_SEGMENT, audit_rows
from basaltmq.pipeline.files import Files
from basaltmq.pipeline.findings import Finding, Severity
from basaltmq.pipeline.index.rebuild import RebuildJob, rebuild_index
from basaltmq.pipeline.store_path import DEFAULT_VHOST, store_path
from basaltmq.pipeline.tasks import SparkTasks
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.shards import Engine
from basaltmq.streams.view import StreamView

COMPARED: Final = CHECKSUM.replace("value", "coalesce(value, X'')")
"""Checksum for log against archive. Archives of older versions have empty bytes where the log has null."""

BLOCK_OFFSETS: Final = 100_000
"""Offsets per compared block: a difference is located within this many records."""

DIFFERING_BLOCKS_MAX: Final = 1_000
"""Maximum number of blocks that are compared record by record."""


class AuditJob(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    vhost: str = DEFAULT_VHOST
    topics: list[str] | None = None
    """None means all topics on disk."""
    archive: str | None = None
    index: bool = False
    """Compare the index row by row with the log. No other process may have the store open for writing."""


class PartitionAudit(msgspec.Struct, frozen=True):
    """Counts of a partition."""

    topic: str
    partition: int
    start_offset: int
    end_offset: int
    indexed: int
    """Records according to the index."""
    read: int
    """Records read from the log."""
    archived: int | None


class Bucket(msgspec.Struct, frozen=True):
    """Records per hour, by record timestamp."""

    topic: str
    hour: str
    in_log: int
    in_archive: int


class Audited(msgspec.Struct, frozen=True):
    path: str
    archive: str | None
    findings: list[Finding]
    partitions: list[PartitionAudit]
    buckets: list[Bucket]
    seconds: float


class _Block(msgspec.Struct, frozen=True):
    count: int
    distinct: int
    checksum: int
    first: int
    last: int


Blocks = dict[tuple[str, int, int], _Block]


def audit(spark: SparkSession, job: AuditJob) -> Audited:
    """Run the audit."""
    began_s = time.monotonic()
    path = store_path(job.path, job.vhost)
    # Read the archive first, so that a growing archive is never ahead of the log.
    archive = None if job.archive is None else _Archive(spark, job.archive.rstrip("/"))
    with StreamView.open(path) as view:
        kept = [topic for topic in view.topics() if topic.config.engine is not Engine.MEMORY]
        if job.topics is not None:
            unknown = sorted(set(job.topics) - {topic.name for topic in kept})
            if unknown:
                raise InvalidArgumentError(f"topic {unknown[0]!r} does not exist on disk in {job.path}")
            kept = [topic for topic in kept if topic.name in job.topics]
        infos = {(topic.name, n): view.info(topic.name, n) for topic in kept for n in range(len(topic.shards))}
        findings = audit_rows(path, view)
    names = [topic.name for topic in kept]
    is_whole = all(each.kind != MISSING_SEGMENT for each in findings)
    if not is_whole:
        detail = "records not checked: restore the missing files, or rebuild the index, and audit again"
        findings.append(Finding(Severity.NOTE, "unread", "log", detail))
    log, blocks = _counts(spark, job, path, infos) if is_whole else (None, {})
    removed = _removed(path, infos)
    archived: Blocks = {}
    kept_archive: DataFrame | None = None
    if archive is not None:
        findings += archive.findings
        if archive.frame is not None:
            kept_archive = archive.frame.where(sql.col("topic").isin(names)) if job.topics else archive.frame
            archived = _blocks(kept_archive)
    partitions = []
    for (topic, number), info in sorted(infos.items()):
        own = [block for (t, n, _), block in blocks.items() if (t, n) == (topic, number)]
        there = [block for (t, n, _), block in archived.items() if (t, n) == (topic, number)]
        each = PartitionAudit(
            topic,
            number,
            info.start_offset,
            info.high_watermark,
            info.records,
            sum(block.count for block in own),
            None if archive is None else sum(block.count for block in there),
        )
        partitions.append(each)
        if log is not None:
            findings += _counted(each, own, "log", removed[topic, number])
        findings += _counted(each, there, "archive")
    if archive is not None and log is not None:
        ranges = {at: (info.start_offset, info.high_watermark) for at, info in infos.items()}
        findings += _compared(log, kept_archive, blocks, archived, ranges)
        if kept_archive is not None:
            findings += _gaps(kept_archive, archived, infos)
    if job.index:
        rebuild = RebuildJob(path=job.path, vhost=job.vhost, compare=True)
        findings += rebuild_index(SparkTasks(spark), rebuild).findings
    buckets = _buckets(log, kept_archive)
    return Audited(job.path, job.archive, findings, partitions, buckets, time.monotonic() - began_s)


def _log(spark: SparkSession, job: AuditJob, infos: Mapping[tuple[str, int], ShardInfo]) -> DataFrame:
    """Return the records up to the end offsets in `infos`."""
    ends: dict[str, dict[str, int]] = {}
    for (topic, number), info in infos.items():
        ends.setdefault(topic, {})[str(number)] = info.high_watermark
    options = {
        "path": job.path,
        "vhost": job.vhost,
        "assign": json.dumps({topic: sorted(map(int, of)) for topic, of in ends.items()}),
        "endingOffsets": json.dumps(ends),
        "failOnDataLoss": "false",
    }
    return spark.read.format("basalt").options(**options).load()


def _counts(
    spark: SparkSession, job: AuditJob, path: Path, infos: dict[tuple[str, int], ShardInfo]
) -> tuple[DataFrame | None, Blocks]:
    """Return the log and its blocks. Topics that are deleted meanwhile are removed from `infos`."""
    while infos:
        log = _log(spark, job, infos)
        try:
            return log, _blocks(log)
        except PySparkException as error:
            with StreamView.open(path) as view:
                names = {topic.name for topic in view.topics()}
            gone = [at for at in infos if at[0] not in names]
            if not gone or TopicNotFoundError.__name__ not in str(error):
                raise
            for at in gone:
                del infos[at]
    return None, {}


def _removed(path: Path, before: Mapping[tuple[str, int], ShardInfo]) -> dict[tuple[str, int], int]:
    """Return an upper bound of the records that deletes, retention and compaction removed since they were counted.

    It is the previous count plus the new offsets minus the present count. The bound is exact if every new offset became
    a record. It is 0 if nothing is removed or written. Records of aborted transactions, which no reader sees,
    count as removed.
    """
    removed: dict[tuple[str, int], int] = {}
    with StreamView.open(path) as view:
        for (topic, number), was in before.items():
            try:
                info = view.info(topic, number)
            except NotFoundError:
                removed[topic, number] = was.records
                continue
            came = info.high_watermark - was.high_watermark
            removed[topic, number] = max(0, was.records + came - info.records) + view.aborted_records(topic, number)
    return removed


def _blocks(frame: DataFrame) -> Blocks:
    block = sql.floor(sql.col("offset") / BLOCK_OFFSETS).cast("bigint").alias("block")
    rows = (
        frame.groupBy("topic", "partition", block)
        .agg(
            sql.count(sql.lit(1)).alias("count"),
            sql.countDistinct("offset").alias("distinct"),
            sql.expr(COMPARED).alias("checksum"),
            sql.min("offset").alias("first"),
            sql.max("offset").alias("last"),
        )
        .collect()
    )
    return {
        (row["topic"], row["partition"], row["block"]): _Block(
            row["count"], row["distinct"], row["checksum"], row["first"], row["last"]
        )
        for row in rows
    }


def _counted(each: PartitionAudit, blocks: Sequence[_Block], where: str, removed: int = 0) -> Iterator[Finding]:
    subject = f"{each.topic}[{each.partition}]"
    duplicates = sum(block.count - block.distinct for block in blocks)
    if duplicates:
        yield Finding(Severity.FAULT, "duplicate", subject, f"{duplicates} offsets occur more than once in the {where}")
    if where == "log" and each.read + removed < each.indexed:
        detail = f"the index counts {each.indexed} records, but {each.read} could be read"
        yield Finding(Severity.LOSS, "count", subject, detail)


def _compared(
    log: DataFrame,
    archive: DataFrame | None,
    blocks: Blocks,
    archived: Blocks,
    ranges: dict[tuple[str, int], tuple[int, int]],
) -> Iterator[Finding]:
    """Compare log and archive from the log's start to the archive's end."""
    ends: dict[tuple[str, int], int] = {}
    for (topic, number, _), found in archived.items():
        ends[topic, number] = max(ends.get((topic, number), 0), found.last + 1)
    for at, (start, end) in sorted(ranges.items()):
        if at not in ends:
            if start < end:
                yield Finding(Severity.NOTE, "behind", f"{at[0]}[{at[1]}]", "not archived yet")
            continue
        if ends[at] < end:
            yield Finding(
                Severity.NOTE, "behind", f"{at[0]}[{at[1]}]", f"{end - ends[at]} offsets are not archived yet"
            )
        if ends[at] > end:
            detail = f"the archive has offsets up to {ends[at] - 1}, but the log ends at {end}"
            yield Finding(Severity.LOSS, "ahead", f"{at[0]}[{at[1]}]", detail)
    if archive is None:
        return
    differing = sorted(
        key
        for key in {*blocks, *archived}
        if key[:2] in ranges and key[:2] in ends and blocks.get(key) != archived.get(key)
    )[:DIFFERING_BLOCKS_MAX]
    by_partition: dict[tuple[str, int], list[int]] = {}
    for topic, number, block in differing:
        by_partition.setdefault((topic, number), []).append(block)
    for (topic, number), numbers in by_partition.items():
        start = ranges[topic, number][0]
        yield from _differences(log, archive, topic, number, numbers, start, ends[topic, number])


def _differences(
    log: DataFrame, archive: DataFrame, topic: str, number: int, blocks: list[int], start: int, end: int
) -> Iterator[Finding]:
    def side(frame: DataFrame, name: str) -> DataFrame:
        own = frame.where((sql.col("topic") == topic) & (sql.col("partition") == number))
        own = own.where(sql.col("offset").between(start, end - 1))
        own = own.where(sql.floor(sql.col("offset") / BLOCK_OFFSETS).cast("bigint").isin(blocks))
        return own.selectExpr("offset", f"xxhash64(key, coalesce(value, X''), timestamp) AS {name}").dropDuplicates()

    row = (
        side(log, "logged")
        .join(side(archive, "archived"), "offset", "full_outer")
        .selectExpr(
            "count_if(archived IS NULL) AS only_log",
            "count_if(logged IS NULL) AS only_archive",
            "count_if(logged <> archived) AS unlike",
        )
        .collect()[0]
    )
    subject = f"{topic}[{number}]"
    if row["only_log"]:
        detail = f"{row['only_log']} records of the log below offset {end} are missing in the archive"
        yield Finding(Severity.LOSS, "missing", subject, detail)
    if row["only_archive"]:
        detail = f"{row['only_archive']} records are only in the archive: the log has deleted or compacted them"
        yield Finding(Severity.NOTE, "only archived", subject, detail)
    if row["unlike"]:
        yield Finding(Severity.LOSS, "differs", subject, f"{row['unlike']} records differ between log and archive")


def _gaps(archive: DataFrame, archived: Blocks, infos: Mapping[tuple[str, int], ShardInfo]) -> Iterator[Finding]:
    """Report offsets before the log's start that the archive does not contain."""
    spans: dict[tuple[str, int], _Span] = {}
    for (topic, number, _), block in sorted(archived.items()):
        info = infos.get((topic, number))
        if info is None or (block.first >= info.start_offset and (topic, number) not in spans):
            continue
        known = spans.get((topic, number), _Span(block.first, 0, 0))
        below = _below(archive, (topic, number), block, info.start_offset)
        spans[topic, number] = _Span(known.first, block.last + 1, known.records + below)
    for (topic, number), span in sorted(spans.items()):
        info = infos[topic, number]
        # A log with offsets without records now probably had such offsets before, too.
        is_expected = info.meta.config.compact or info.records < info.high_watermark - info.start_offset
        why = ", and this log has offsets without records: transactions, deletes, compaction" if is_expected else ""
        within = min(span.end, info.start_offset) - span.first - span.records
        if within:
            detail = f"{within} offsets within the archived range are neither in the archive nor in the log{why}"
            yield Finding(Severity.NOTE if is_expected else Severity.FAULT, "gap", f"{topic}[{number}]", detail)
        behind = info.start_offset - span.end
        if behind > 0:
            detail = f"{behind} offsets were removed from the log before they were archived{why}"
            yield Finding(Severity.NOTE if is_expected else Severity.LOSS, "gap", f"{topic}[{number}]", detail)


class _Span(msgspec.Struct, frozen=True):
    """The part of a partition in the archive."""

    first: int
    end: int
    records: int
    """Records below the log's start."""


def _below(archive: DataFrame, at: tuple[str, int], block: _Block, start: int) -> int:
    """Return the number of offsets of a block before the log's start."""
    if block.first >= start:
        return 0
    if block.last < start:
        return block.distinct
    if block.distinct == block.last - block.first + 1:
        return start - block.first
    own = archive.where((sql.col("topic") == at[0]) & (sql.col("partition") == at[1]))
    own = own.where(sql.col("offset").between(block.first, start - 1))
    return int(own.agg(sql.countDistinct("offset")).collect()[0][0])


def _buckets(log: DataFrame | None, archive: DataFrame | None) -> list[Bucket]:
    counts: dict[tuple[str, str], list[int]] = {}
    for side, frame in enumerate((log, archive)):
        if frame is not None:
            hour = sql.date_format("timestamp", "yyyy-MM-dd HH:00").alias("hour")
            for row in frame.groupBy("topic", hour).count().collect():
                counts.setdefault((row["topic"], row["hour"]), [0, 0])[side] = row["count"]
    return [Bucket(topic, hour, *both) for (topic, hour), both in sorted(counts.items())]


class _Archive:
    """Checks an archive by its manifests."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._spark = spark
        self._root = root
        self.findings: list[Finding] = []
        self.frame: DataFrame | None = None
        files = Files(spark, root)
        manifests = read_manifests(files, root)
        if not manifests:
            raise InvalidArgumentError(f"{root} is not an archive: it has no manifests")
        there = {path: size for path, size in files.walk(root) if path.startswith("topic=")}
        named = {file.path: file for manifest in manifests for file in manifest.files}
        for path in sorted(set(there) - set(named)):
            if path.endswith(".parquet"):
                self.findings.append(Finding(Severity.FAULT, "orphan", path, "no manifest names this file"))
        good = [file for file in named.values() if self._is_there(file, there)]
        if good:
            whole = read_archived(spark, root, [file.path for file in good], skip_damaged=True)
            self._check(manifests, {file.path for file in good}, whole)
            self.frame = whole

    def _is_there(self, file: ArchivedFile, there: dict[str, int]) -> bool:
        size_bytes = there.get(file.path)
        if size_bytes is None:
            detail = f"{file.records} records of {file.topic}[{file.partition}]: the file is missing"
            self.findings.append(Finding(Severity.LOSS, "missing file", file.path, detail))
        elif size_bytes != file.size_bytes:
            detail = f"has {size_bytes} bytes, but its manifest states {file.size_bytes}"
            self.findings.append(Finding(Severity.LOSS, "file size", file.path, detail))
        return size_bytes == file.size_bytes

    def _check(self, manifests: Sequence[Manifest], good: set[str], whole: DataFrame) -> None:
        rows = (
            whole.groupBy(sql.input_file_name().alias("file"))
            .agg(
                sql.count(sql.lit(1)).alias("records"),
                sql.min("offset").alias("first"),
                sql.max("offset").alias("last"),
                sql.expr(CHECKSUM).alias("checksum"),
            )
            .collect()
        )
        found = {path_within(row["file"], levels=3): row for row in rows}
        for manifest in manifests:
            checksum = 0
            for file in manifest.files:
                row = found.get(file.path)
                stated = (file.records, file.first_offset, file.last_offset)
                read = (0, None, None) if row is None else (row["records"], row["first"], row["last"])
                if file.path in good and stated != read:
                    detail = (
                        f"holds {read[0]} records from offset {read[1]} to {read[2]}, but its manifest states {stated}"
                    )
                    self.findings.append(Finding(Severity.LOSS, "count", file.path, detail))
                checksum ^= 0 if row is None else row["checksum"]
            if all(file.path in good for file in manifest.files):
                checksum ^= self._rejected(manifest)
                if checksum != manifest.checksum:
                    detail = "the checksum of its records differs from the manifest"
                    self.findings.append(Finding(Severity.LOSS, "checksum", f"batch {manifest.batch}", detail))

    def _rejected(self, manifest: Manifest) -> int:
        checksum = 0
        for batch in manifest.rejects_of():
            rejects = self._spark.read.parquet(f"{self._root}/{REJECTED}/batch={batch:06d}")
            checksum ^= rejects.selectExpr(CHECKSUM).collect()[0][0] or 0
        return checksum
