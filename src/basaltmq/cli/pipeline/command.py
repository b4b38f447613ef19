"""`basalt pipeline JOB`: jobs on Spark.

Each job is a function of `basaltmq.pipeline`. This module defines the commands for archives; the other modules are
imported when their command runs. Spark and Java are checked when a job starts, so `--help` works without them.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

from basaltmq.cli.options import as_json
from basaltmq.cli.output import progress_line
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import on_spark, result_of
from basaltmq.errors import InvalidArgumentError

OTHER_MODULES: Final = {
    "audit": ("reports", "audit"),
    "dedup": ("records", "dedup"),
    "dlq": ("dlq", "dlq"),
    "lag": ("reports", "lag"),
    "latency": ("reports", "latency"),
    "latest": ("records", "latest"),
    "profile": ("records", "profile"),
    "rebuild-index": ("index", "rebuild_index"),
}
"""Job -> (module of this package, name of the command in it)."""


class _Jobs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *OTHER_MODULES})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in OTHER_MODULES:
            return super().get_command(ctx, cmd_name)
        module, name = OTHER_MODULES[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"basaltmq.cli.pipeline.{module}"), name)
        return command


@click.group(cls=_Jobs)
def pipeline() -> None:
    """Archive, replay, audit, repair and measure with Spark.

    Jobs read a data directory, even while a process uses it, or a broker with --server. Jobs that write to a topic with
    --data-dir need write access to the store for a moment, while no other process has it. Exit codes: 0 success, 1 the
    job failed, 2 inconsistencies found, 3 records are lost.
    """


@pipeline.command()
@flag.topics(required=True)
@click.option(
    "--to",
    "--archive",
    "target",
    required=True,
    help="Archive: a directory, or a URI that Spark supports.",
)
@click.option(
    "--from",
    "begin",
    help="Where the first run starts: earliest, latest, offsets as JSON, or a time.  [default: earliest]",
)
@click.option("--group", help="Commit the archived offsets to this consumer group.")
@click.option("--checkpoint", help="Checkpoint directory.  [default: in the archive]")
@click.option(
    "--continuous", type=float, metavar="SECONDS", help="Run continuously and check for new records at this interval."
)
@click.option("--once", is_flag=True, help="Stop after archiving the existing records. This is the default.")
@flag.max_offsets
@click.option(
    "--file-bytes", type=click.IntRange(min=1), help="Approximate maximum bytes of log per file.  [default: 128 MiB]"
)
@click.option(
    "--value-schema",
    help="Parse values as JSON with this schema (DDL). Values that do not match are stored separately.",
)
@flag.skip_lost
@flag.dry_run
@as_json
@flag.with_location
def archive(
    location: dict[str, str],
    topics: list[str],
    target: str,
    begin: str | None,
    group: str | None,
    checkpoint: str | None,
    continuous: float | None,
    once: bool,
    max_offsets: int | None,
    file_bytes: int | None,
    value_schema: str | None,
    skip_lost: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Archive topics to Parquet, exactly once.

    The files are grouped by topic and day.
    """
    if once and continuous is not None:
        raise InvalidArgumentError("give either --once or --continuous")
    source = flag.source_of(location, topics, begin, skip_lost=skip_lost) | ({"commitGroup": group} if group else {})
    given = {
        "offsets_max": max_offsets,
        "file_bytes": file_bytes,
        "value_schema": value_schema,
        "checkpoint": checkpoint,
        "continuous_s": continuous,
    }
    with on_spark("basalt-archive") as spark:
        from basaltmq.pipeline.archive.archive import ArchiveJob, Progress
        from basaltmq.pipeline.archive.archive import archive as run
        from basaltmq.pipeline.archive.pending import pending

        waiting = pending(spark, location, topics, target)
        if dry_run:
            result_of(waiting, as_json)
            return
        draw = progress_line("archive", "records")

        def report(progress: Progress) -> None:
            draw(progress.records, max(waiting.records, progress.records))

        job = ArchiveJob(
            source=source,
            target=target,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        result_of(run(spark, job, report), as_json)


@pipeline.command()
@click.argument("archive")
@click.option(
    "--small-bytes", type=click.IntRange(min=1), help="Merge files smaller than this, in bytes.  [default: 32 MiB]"
)
@flag.dry_run
@as_json
def compact(archive: str, small_bytes: int | None, dry_run: bool, as_json: bool) -> None:
    """Merge small files of an archive."""
    with on_spark("basalt-compact") as spark:
        from basaltmq.pipeline.archive.compact import SMALL_BYTES, CompactJob
        from basaltmq.pipeline.archive.compact import compact as run

        job = CompactJob(archive=archive, small_bytes=small_bytes or SMALL_BYTES, dry_run=dry_run)
        result_of(run(spark, job, progress_line("compact", "records")), as_json)


@pipeline.command()
@flag.topics(required=True, help="Topics to replay, separated by commas.")
@click.option("--archive", help="Archive to replay.  [default: the log of --data-dir or --server]")
@click.option("--target-dir", help="Data directory to write to.  [default: the source]")
@click.option("--target-topic", help="Topic to write to.  [default: the topic of the record]")
@click.option(
    "--checkpoint", required=True, help="Directory for the plan. Pass the same directory to resume an interrupted run."
)
@flag.begin
@flag.end
@click.option("--where", help="SQL condition on key, value, topic, partition, offset, timestamp and headers.")
@click.option("--rate", type=float, help="Maximum average rate in records per second.  [default: unlimited]")
@click.option("--max-offsets", type=click.IntRange(min=1), help="Maximum records per step.")
@click.option(
    "--keep-partitions", is_flag=True, help="Keep the partition of each record instead of partitioning by key."
)
@flag.skip_lost
@flag.dry_run
@as_json
@flag.with_location
def replay(
    location: dict[str, str],
    topics: list[str],
    archive: str | None,
    target_dir: str | None,
    target_topic: str | None,
    checkpoint: str,
    begin: str | None,
    end: str | None,
    where: str | None,
    rate: float | None,
    max_offsets: int | None,
    keep_partitions: bool,
    skip_lost: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Replay an archive or a log into a topic, exactly once.

    An interrupted run can be resumed.
    """
    if archive is None and target_topic is None and target_dir is None:
        raise InvalidArgumentError("a topic cannot be replayed into itself: give --target-topic or --target-dir")
    bounds = flag.bound("--from", "starting", begin) | flag.bound("--to", "ending", end)
    with on_spark("basalt-replay") as spark:
        from basaltmq.pipeline.archive.replay import STEP_RECORDS, ReplayJob
        from basaltmq.pipeline.archive.replay import replay as run

        job = ReplayJob(
            topics=topics,
            archive=archive,
            source=None if archive is not None else location | ({"failOnDataLoss": "false"} if skip_lost else {}),
            target={"path": target_dir, "vhost": location["vhost"]} if target_dir is not None else location,
            target_topic=target_topic,
            checkpoint=checkpoint,
            bounds=bounds,
            where=where,
            rate_per_s=rate,
            step_records=max_offsets or STEP_RECORDS,
            keep_partitions=keep_partitions,
            dry_run=dry_run,
        )
        result_of(run(spark, job, progress_line("replay", "steps")), as_json)
