"""Compact job: merges small files of an archive.

    manifests with small files are grouped, oldest first, up to BATCH_BYTES
      -> their records are written below _staging, one file per topic, day and partition, in offset order
      -> counts and checksum must equal those of the input          -> files are renamed to their final path
      -> one manifest is written that replaces the others            -> the replaced files are deleted

Readers follow the manifests, so they see either the old or the new files. If the job is killed before the manifest is
written, nothing has changed. If it is killed afterwards, the next run deletes the replaced files. Archive and compact
jobs must not run at the same time: both delete files that no manifest names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sql

from basaltmq.errors import StorageError
from basaltmq.pipeline.archive.data_files import delete_orphans, move_into_place, read_archived
from basaltmq.pipeline.archive.manifest import (
    CHECKSUM,
    COMPACTED,
    STAGING,
    Manifest,
    offsets_of,
    read_manifests,
    write_manifest,
)
from basaltmq.pipeline.files import Files

SMALL_BYTES: Final = 32 << 20
"""Files below this size are merged."""

BATCH_BYTES: Final = 1 << 30
"""Maximum bytes that one manifest merges: some minutes of work, which a kill may lose."""


class CompactJob(msgspec.Struct, frozen=True, kw_only=True):
    archive: str
    small_bytes: int = SMALL_BYTES
    batch_bytes: int = BATCH_BYTES
    compression: str = "zstd"
    dry_run: bool = False


class Compacted(msgspec.Struct, frozen=True):
    manifests: int
    """Manifests that were replaced."""
    files_before: int
    files_after: int
    records: int
    seconds: float


def compact(spark: SparkSession, job: CompactJob, on_progress: Callable[[int, int], None] | None = None) -> Compacted:
    """Merge small files. `on_progress` gets the records done and the total."""
    root = job.archive.rstrip("/")
    files = Files(spark, root)
    began_s = time.monotonic()
    groups = _groups(read_manifests(files, root), job)
    total = sum(manifest.records for group in groups for manifest in group)
    before = sum(len(manifest.files) for group in groups for manifest in group)
    after = done = 0
    for group in groups:
        if not job.dry_run:
            after += len(_merge(spark, files, root, group, job.compression).files)
        done += sum(manifest.records for manifest in group)
        if on_progress is not None:
            on_progress(done, total)
    if not job.dry_run:
        delete_orphans(files, root)
    return Compacted(sum(map(len, groups)), before, after, total, time.monotonic() - began_s)


def _groups(manifests: list[Manifest], job: CompactJob) -> list[list[Manifest]]:
    """Return manifests to merge, in groups of limited size. Groups of one are left out."""
    groups: list[list[Manifest]] = []
    size_bytes = 0
    for manifest in manifests:
        if not any(file.size_bytes < job.small_bytes for file in manifest.files):
            continue
        own_bytes = sum(file.size_bytes for file in manifest.files)
        if not groups or size_bytes + own_bytes > job.batch_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(manifest)
        size_bytes += own_bytes
    return [group for group in groups if len(group) > 1]


def _merge(spark: SparkSession, files: Files, root: str, group: list[Manifest], compression: str) -> Manifest:
    batch = max([COMPACTED - 1, *(each.batch for each in read_manifests(files, root))]) + 1
    staged = f"{root}/{STAGING}/{batch:06d}"
    files.delete(staged)
    frame = read_archived(spark, root, [file.path for manifest in group for file in manifest.files])
    (
        frame.withColumn("shard", sql.col("partition"))
        .repartition("topic", "day", "partition")
        .sortWithinPartitions("topic", "day", "partition", "offset")
        .write.mode("overwrite")
        .option("compression", compression)
        .partitionBy("topic", "day", "shard")
        .parquet(staged)
    )
    written = read_archived(spark, staged, [""])
    if _sums(frame) != _sums(written):
        raise StorageError(
            f"the files in {staged} differ from their input; the archive is unchanged: run the job again"
        )
    moved = move_into_place(files, root, staged, batch)
    checksum = 0
    for each in group:
        checksum ^= each.checksum
    manifest = Manifest(
        batch=batch,
        records=sum(file.records for file in moved),
        checksum=checksum,
        files=moved,
        offsets=offsets_of(moved),
        # Include manifests that an earlier compaction replaced.
        replaces=sorted({batch for each in group for batch in (each.batch, *each.replaces)}),
        rejected=sum(each.rejected for each in group),
        rejected_in=sorted({batch for each in group for batch in each.rejects_of()}),
    )
    write_manifest(files, root, manifest)
    files.delete(staged)
    return manifest


def _sums(frame: DataFrame) -> Row:
    return frame.selectExpr("count(1)", CHECKSUM).collect()[0]
