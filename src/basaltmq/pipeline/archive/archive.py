"""Archive job: writes topics to Parquet, each record exactly once.

    Spark fixes the offsets of a batch in its checkpoint
      -> tasks write files below _staging/BATCH (a task reads one range of one partition, so a file is a range)
      -> footers are read: ranges, counts           -> files are renamed to their final path
      -> the manifest is written: the batch is committed  -> Spark marks the batch as done

If the job is killed before the manifest is written, the batch is repeated from the start, and its files are deleted
first. If it is killed afterwards, the repeated batch finds the manifest and does nothing. Spark's checkpoint numbers
the batches. So the checkpoint belongs to the archive and is stored in it by default.

With a value schema, values are parsed as JSON into the column `parsed`. Values that do not parse go unchanged to
`_rejected/batch=BATCH` and are counted in the manifest. A batch without records leaves no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql

from basaltmq.errors import InvalidArgumentError, StorageError
from basaltmq.pipeline.archive.data_files import delete_orphans, move_into_place
from basaltmq.pipeline.archive.manifest import (
    CHECKSUM,
    STAGING,
    Manifest,
    offsets_of,
    path_of,
    write_manifest,
)
from basaltmq.pipeline.files import Files

CHECKPOINT: Final = "_checkpoint"
REJECTED: Final = "_rejected"
COMPRESSIONS: Final = ("zstd", "snappy", "gzip", "lz4", "none")

WRITERS_MAX: Final = 32
"""Files that a task writes at once, one per day in its offset range. Below this limit Spark does not sort."""

_CORRUPT: Final = "_corrupt_record"

BATCH_OFFSETS: Final = 5_000_000
"""Default of records per batch: about one gigabyte. Each batch has a manifest."""

FILE_BYTES: Final = 128 << 20
"""Approximate maximum bytes of log that a task reads into one file. Parquet compresses them."""


class ArchiveJob(msgspec.Struct, frozen=True, kw_only=True):
    source: dict[str, str]
    """Options of the basalt source: location and subscription."""
    target: str
    checkpoint: str | None = None
    offsets_max: int = BATCH_OFFSETS
    file_bytes: int = FILE_BYTES
    compression: str = "zstd"
    value_schema: str | None = None
    """Schema (DDL) of JSON values. Values that do not parse go to the rejects."""
    continuous_s: float | None = None
    """Interval of a continuous run. None stops after the existing records."""


class Progress(msgspec.Struct, frozen=True):
    batch: int
    records: int
    """Total of this run."""
    rate_per_s: float


class Archived(msgspec.Struct, frozen=True):
    batches: int
    records: int
    files: int
    rejected: int
    seconds: float


def archive(spark: SparkSession, job: ArchiveJob, on_progress: Callable[[Progress], None] | None = None) -> Archived:
    """Run the job. It returns when the existing records are archived, or never if it is continuous."""
    run = _Run(spark, job, on_progress)
    run.clean()
    stream = spark.readStream.format("basalt").options(
        **job.source
        | {
            "includeHeaders": "true",
            "maxOffsetsPerTrigger": str(job.offsets_max),
            "maxBytesPerPartition": str(job.file_bytes),
        }
    )
    if "startingOffsets" not in job.source and "startingTimestamp" not in job.source:
        stream = stream.option("startingOffsets", "earliest")
    writer = (
        stream.load()
        .writeStream.foreachBatch(run.write)
        .option("checkpointLocation", job.checkpoint or f"{job.target}/{CHECKPOINT}")
        .queryName("basalt-archive")
    )
    if job.continuous_s is None:
        query = writer.trigger(availableNow=True).start()
    else:
        query = writer.trigger(processingTime=f"{int(job.continuous_s * 1000)} milliseconds").start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return run.done()


class _Run:
    def __init__(self, spark: SparkSession, job: ArchiveJob, on_progress: Callable[[Progress], None] | None) -> None:
        if job.compression not in COMPRESSIONS:
            raise InvalidArgumentError(
                f"unknown compression {job.compression!r:.40}: expected one of {', '.join(COMPRESSIONS)}"
            )
        self._spark = spark
        self._job = job
        self._root = job.target.rstrip("/")
        self._files = Files(spark, self._root)
        self._on_progress = on_progress
        self._begin_s = time.monotonic()
        self._batches = self._records = self._file_count = self._rejected = 0
        spark.conf.set("spark.sql.maxConcurrentOutputFileWriters", WRITERS_MAX)

    def clean(self) -> None:
        """Delete what a killed run left: staged files, and files that no manifest names."""
        self._files.delete(f"{self._root}/{STAGING}")
        delete_orphans(self._files, self._root)

    def write(self, frame: DataFrame, batch: int) -> None:
        """Write one batch. Spark calls this again with the same records if the batch did not finish."""
        if self._files.exists(path_of(self._root, batch)):
            return
        staged = f"{self._root}/{STAGING}/{batch:06d}"
        self._files.delete(staged)
        seen = Observation()
        observed = frame.observe(seen, sql.count(sql.lit(1)).alias("records"), sql.expr(CHECKSUM).alias("checksum"))
        good, rejects = self._parsed(observed)
        (
            # Spark formats a date partition as yyyy-MM-dd. A string column would cost a conversion per record.
            good.withColumn("day", sql.to_date("timestamp"))
            .withColumn("shard", sql.col("partition"))
            .write.mode("overwrite")
            .option("compression", self._job.compression)
            .partitionBy("topic", "day", "shard")
            .parquet(staged)
        )
        rejected = 0 if rejects is None else self._write_rejects(rejects, batch)
        archived = move_into_place(self._files, self._root, staged, batch)
        records = sum(file.records for file in archived)
        if not seen.get["records"]:
            return
        if records + rejected != seen.get["records"]:
            raise StorageError(
                f"batch {batch} had {seen.get['records']} records, but its files contain {records} and its rejects "
                f"{rejected}; the batch was not committed: run the job again"
            )
        manifest = Manifest(
            batch=batch,
            records=records,
            checksum=seen.get["checksum"] or 0,
            files=archived,
            offsets=offsets_of(archived),
            rejected=rejected,
        )
        write_manifest(self._files, self._root, manifest)
        self._files.delete(staged)
        self._report(manifest)

    def _parsed(self, frame: DataFrame) -> tuple[DataFrame, DataFrame | None]:
        """Split records into those whose value parses, with the parsed value, and the rest."""
        schema = self._job.value_schema
        if schema is None:
            return frame, None
        text = sql.col("value").cast("string")
        options = {"columnNameOfCorruptRecord": _CORRUPT}
        typed = frame.withColumn("parsed", sql.from_json(text, f"{schema}, {_CORRUPT} STRING", options))
        is_bad = sql.col("parsed").isNull() | sql.col(f"parsed.{_CORRUPT}").isNotNull()
        good = typed.where(~is_bad).withColumn("parsed", sql.col("parsed").dropFields(_CORRUPT))
        return good, typed.where(is_bad).drop("parsed")

    def _write_rejects(self, rejects: DataFrame, batch: int) -> int:
        path = f"{self._root}/{REJECTED}/batch={batch:06d}"
        rejects.write.mode("overwrite").parquet(path)
        return self._spark.read.parquet(path).count()

    def _report(self, manifest: Manifest) -> None:
        self._batches += 1
        self._records += manifest.records + manifest.rejected
        self._file_count += len(manifest.files)
        self._rejected += manifest.rejected
        if self._on_progress is not None:
            self._on_progress(Progress(manifest.batch, self._records, self._records / self._seconds()))

    def _seconds(self) -> float:
        return max(time.monotonic() - self._begin_s, 1e-9)

    def done(self) -> Archived:
        return Archived(self._batches, self._records, self._file_count, self._rejected, self._seconds())
