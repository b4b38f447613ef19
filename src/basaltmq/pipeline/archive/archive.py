"""Archive: topics to Parquet, each record exactly once.

    Spark fixes the offsets of a batch in its checkpoint
      -> tasks write files below _staging/BATCH (one task reads one range of one partition, so a file is a range)
      -> footers are read: ranges, counts          -> files are renamed to where they belong
      -> the manifest is written: the batch counts  -> Spark marks the batch as done

Killed anywhere before the manifest, the batch is done again from the start, and what it left is removed first. Killed
after it, the batch is found done and left alone. Batches are numbered by Spark's checkpoint, which therefore belongs to
the archive: by default it is kept in it.

In a typed mode values are parsed as JSON by a schema into the column `parsed`; those that do not parse go to
`_rejected/batch=BATCH` as they are, and are counted in the manifest. A batch without records leaves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as sql

from basaltmq.errors import InvalidArgumentError, StorageError
from basaltmq.pipeline.archive.data_files import settle
from basaltmq.pipeline.archive.manifest import (
    CHECKSUM,
    STAGING,
    Manifest,
    offsets_of,
    path_of,
    read_manifests,
    write_manifest,
)
from basaltmq.pipeline.files import Files

CHECKPOINT: Final = "_checkpoint"
REJECTED: Final = "_rejected"
COMPRESSIONS: Final = ("zstd", "snappy", "gzip", "lz4", "none")

WRITERS_MAX: Final = 32
"""Files a task has open at once: the days its range of offsets spans. With as many, nothing needs to be sorted."""

_CORRUPT: Final = "_corrupt_record"

BATCH_OFFSETS: Final = 5_000_000
"""Records of one batch unless told: a gigabyte or so, a manifest each."""

FILE_BYTES: Final = 128 << 20
"""What a file holds at most, about: the size of a task's range of the log, which Parquet makes smaller."""


class ArchiveJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to archive and how."""

    source: dict[str, str]
    """Options of the basalt source that say where the data is and what is subscribed to."""
    target: str
    checkpoint: str | None = None
    offsets_max: int = BATCH_OFFSETS
    file_bytes: int = FILE_BYTES
    compression: str = "zstd"
    value_schema: str | None = None
    """A schema (DDL) that values are parsed by as JSON; those that do not parse go to the table of rejects."""
    continuous_s: float | None = None
    """Go on for ever, looking for more every so many seconds; None ends when all that was there is archived."""


class Progress(msgspec.Struct, frozen=True):
    """How far a job is."""

    batch: int
    records: int
    """In all batches of this run."""
    rate_per_s: float


class Archived(msgspec.Struct, frozen=True):
    """What a run did."""

    batches: int
    records: int
    files: int
    rejected: int
    seconds: float


def archive(spark: SparkSession, job: ArchiveJob, on_progress: Callable[[Progress], None] | None = None) -> Archived:
    """Run the job; returns when everything that was there is archived, or never if it is continuous."""
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
    """One run of a job."""

    def __init__(self, spark: SparkSession, job: ArchiveJob, on_progress: Callable[[Progress], None] | None) -> None:
        if job.compression not in COMPRESSIONS:
            raise InvalidArgumentError(f"compression is one of {', '.join(COMPRESSIONS)}, not {job.compression!r:.40}")
        self._spark = spark
        self._job = job
        self._root = job.target.rstrip("/")
        self._files = Files(spark, self._root)
        self._on_progress = on_progress
        self._begin_s = time.monotonic()
        self._batches = self._records = self._file_count = self._rejected = 0
        spark.conf.set("spark.sql.maxConcurrentOutputFileWriters", WRITERS_MAX)

    def clean(self) -> None:
        """Remove what a killed run left: staged files, and files of a batch that has no manifest."""
        self._files.delete(f"{self._root}/{STAGING}")
        named = {file.path for manifest in read_manifests(self._files, self._root) for file in manifest.files}
        for path, _ in list(self._files.walk(self._root)):
            if path.startswith("topic=") and path.endswith(".parquet") and path not in named:
                self._files.delete(f"{self._root}/{path}")

    def write(self, frame: DataFrame, batch: int) -> None:
        """One batch; called by Spark, again with the same records if it was killed."""
        if self._files.exists(path_of(self._root, batch)):
            return
        staged = f"{self._root}/{STAGING}/{batch:06d}"
        self._files.delete(staged)
        seen = Observation()
        observed = frame.observe(seen, sql.count(sql.lit(1)).alias("records"), sql.expr(CHECKSUM).alias("checksum"))
        good, rejects = self._parsed(observed)
        (
            # A date names its folder as yyyy-MM-dd; a text would have to be made for every record.
            good.withColumn("day", sql.to_date("timestamp"))
            .withColumn("shard", sql.col("partition"))
            .write.mode("overwrite")
            .option("compression", self._job.compression)
            .partitionBy("topic", "day", "shard")
            .parquet(staged)
        )
        rejected = 0 if rejects is None else self._write_rejects(rejects, batch)
        archived = settle(self._files, self._root, staged, batch)
        records = sum(file.records for file in archived)
        if not seen.get["records"]:
            return
        if records + rejected != seen.get["records"]:
            raise StorageError(
                f"batch {batch} had {seen.get['records']} records, but its files have {records} and its rejects "
                f"{rejected}; nothing of it counts: run the job again"
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
        self._tell(manifest)

    def _parsed(self, frame: DataFrame) -> tuple[DataFrame, DataFrame | None]:
        """Records whose values parse, with them parsed, and the others."""
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

    def _tell(self, manifest: Manifest) -> None:
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
