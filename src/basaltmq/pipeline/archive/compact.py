"""Compact: small files of an archive put together, with manifests that stay true.

    manifests with small files are gathered, oldest first, up to BATCH_BYTES
      -> their records are written anew below _staging, a file per topic, day and partition, in the order of offsets
      -> counts and checksum must be those of what was read         -> files are renamed to where they belong
      -> one manifest is written that replaces the others            -> the files it replaces are removed

Readers go by the manifests, so they see the one or the other. Killed before the manifest, nothing happened; killed
after it, the files that were replaced are no data, and the next run removes them. Archive and compact take turns: both
remove files that no manifest names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sql

from basaltmq.errors import StorageError
from basaltmq.pipeline.archive.data_files import read_archived, settle
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
"""A file below this is worth putting together with others."""

BATCH_BYTES: Final = 1 << 30
"""What one manifest brings together at most: some minutes of work that a kill may cost."""


class CompactJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to compact."""

    archive: str
    small_bytes: int = SMALL_BYTES
    batch_bytes: int = BATCH_BYTES
    compression: str = "zstd"
    dry_run: bool = False


class Compacted(msgspec.Struct, frozen=True):
    """What a run did, or would do."""

    manifests: int
    """Replaced."""
    files_before: int
    files_after: int
    records: int
    seconds: float


def compact(spark: SparkSession, job: CompactJob, on_progress: Callable[[int, int], None] | None = None) -> Compacted:
    """Put small files together; `on_progress` hears of records done and to do."""
    root = job.archive.rstrip("/")
    files = Files(spark, root)
    began_s = time.monotonic()
    groups = _groups(read_manifests(files, root), job)
    total = sum(manifest.records for group in groups for manifest in group)
    before = sum(len(manifest.files) for group in groups for manifest in group)
    after = done = 0
    for group in groups:
        if not job.dry_run:
            after += len(_put_together(spark, files, root, group, job.compression).files)
        done += sum(manifest.records for manifest in group)
        if on_progress is not None:
            on_progress(done, total)
    if not job.dry_run:
        _sweep(files, root)
    return Compacted(sum(map(len, groups)), before, after, total, time.monotonic() - began_s)


def _groups(manifests: list[Manifest], job: CompactJob) -> list[list[Manifest]]:
    """Manifests to put together, in groups of a bounded size; groups of one have nothing to gain."""
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


def _put_together(spark: SparkSession, files: Files, root: str, group: list[Manifest], compression: str) -> Manifest:
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
        raise StorageError(f"what was written to {staged} is not what was read; the archive is as it was: run it again")
    settled = settle(files, root, staged, batch)
    checksum = 0
    for each in group:
        checksum ^= each.checksum
    manifest = Manifest(
        batch=batch,
        records=sum(file.records for file in settled),
        checksum=checksum,
        files=settled,
        offsets=offsets_of(settled),
        # What those replaced themselves stays replaced.
        replaces=sorted({batch for each in group for batch in (each.batch, *each.replaces)}),
        rejected=sum(each.rejected for each in group),
        rejected_in=sorted({batch for each in group for batch in each.rejects_of()}),
    )
    write_manifest(files, root, manifest)
    files.delete(staged)
    return manifest


def _sums(frame: DataFrame) -> Row:
    return frame.selectExpr("count(1)", CHECKSUM).collect()[0]


def _sweep(files: Files, root: str) -> None:
    """Remove files that no manifest names."""
    named = {file.path for manifest in read_manifests(files, root) for file in manifest.files}
    for path, _ in list(files.walk(root)):
        if path.startswith("topic=") and path.endswith(".parquet") and path not in named:
            files.delete(f"{root}/{path}")
