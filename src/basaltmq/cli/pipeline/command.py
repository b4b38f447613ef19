"""`basalt pipeline JOB`: what happens to messages after they were delivered, on Spark.

Each job is a function of `basaltmq.pipeline`; here are the flags of those about archives, their progress and results.
Others are in modules of their own, loaded when they are asked for. Spark and Java are looked for when a job starts, so
that `--help` works without them.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

from basaltmq.cli.output import progress_line
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import on_spark, result_of
from basaltmq.errors import InvalidArgumentError

ELSEWHERE: Final = {
    "audit": ("pipeline_reports", "audit"),
    "dedup": ("pipeline_records", "dedup"),
    "dlq": ("pipeline_dlq", "dlq"),
    "lag": ("pipeline_reports", "lag"),
    "latency": ("pipeline_reports", "latency"),
    "latest": ("pipeline_records", "latest"),
    "profile": ("pipeline_records", "profile"),
    "rebuild-index": ("pipeline_index", "rebuild_index"),
}
"""Job -> the module of this package that has it, and its name there."""


class _Jobs(click.Group):
    """All jobs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, name = ELSEWHERE[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"basaltmq.cli.{module}"), name)
        return command


@click.group(cls=_Jobs)
def pipeline() -> None:
    """Archive, replay, audit, repair and measure, on Spark.

    Jobs read beside a running process, or from a broker with --server. Those that write to a topic by --data-dir need
    the store for a moment, when nobody else has it open for writing. Exit codes: 0 done, 1 it could not be done, 2
    something does not fit, 3 records are lost.
    """


@pipeline.command()
@flag.topics(required=True)
@click.option(
    "--to",
    "--archive",
    "target",
    required=True,
    help="Where the archive is or will be: a folder, or a URI Spark knows.",
)
@click.option("--from", "begin", help="earliest (default), latest, offsets as JSON, or a time; for the first run.")
@click.option("--group", help="Tell this consumer group how far the archive is.")
@click.option("--checkpoint", help="Default: in the archive.")
@click.option("--continuous", type=float, metavar="SECONDS", help="Go on, looking for more every so often.")
@click.option("--once", is_flag=True, help="End when what was there is archived; the default.")
@flag.max_offsets
@click.option("--file-bytes", type=click.IntRange(min=1), help="What a file holds at most, about.")
@click.option("--value-schema", help="Parse values as JSON by this schema (DDL); rejects are kept apart.")
@flag.skip_lost
@flag.dry_run
@flag.as_json
@flag.placed
def archive(
    place: dict[str, str],
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
    """Topics to Parquet, by topic and day, each record exactly once."""
    if once and continuous is not None:
        raise InvalidArgumentError("give --once or --continuous, not both")
    source = flag.source_of(place, topics, begin, skip_lost=skip_lost) | ({"commitGroup": group} if group else {})
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

        waiting = pending(spark, place, topics, target)
        if dry_run:
            result_of(waiting, as_json)
            return
        draw = progress_line("archive", "records")

        def tell(progress: Progress) -> None:
            draw(progress.records, max(waiting.records, progress.records))

        job = ArchiveJob(
            source=source,
            target=target,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        result_of(run(spark, job, tell), as_json)


@pipeline.command()
@click.argument("archive")
@click.option("--small-bytes", type=click.IntRange(min=1), help="Files below this are put together; default 32 MiB.")
@flag.dry_run
@flag.as_json
def compact(archive: str, small_bytes: int | None, dry_run: bool, as_json: bool) -> None:
    """Small files of an archive put together."""
    with on_spark("basalt-compact") as spark:
        from basaltmq.pipeline.archive.compact import SMALL_BYTES, CompactJob
        from basaltmq.pipeline.archive.compact import compact as run

        job = CompactJob(archive=archive, small_bytes=small_bytes or SMALL_BYTES, dry_run=dry_run)
        result_of(run(spark, job, progress_line("compact", "records")), as_json)


@pipeline.command()
@flag.topics(required=True, help="What to replay, with commas between them.")
@click.option("--archive", help="Replay from this archive; without it, from the log of --data-dir or --server.")
@click.option("--target-dir", help="The store to write to; default: where the log is.")
@click.option("--target-topic", help="Default: the topic the records are of.")
@click.option("--checkpoint", required=True, help="A folder for the plan; give it again to go on.")
@flag.begin
@flag.end
@click.option("--where", help="A condition in SQL: key, value, topic, partition, offset, timestamp, headers.")
@click.option("--rate", type=float, help="Records per second at most, on average.")
@click.option("--max-offsets", type=click.IntRange(min=1), help="Records of one step at most.")
@click.option("--keep-partitions", is_flag=True, help="Not by key, but to the partition they were in.")
@flag.skip_lost
@flag.dry_run
@flag.as_json
@flag.placed
def replay(
    place: dict[str, str],
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
    """An archive or a log back to a topic, each record exactly once; started again it goes on."""
    if archive is None and target_topic is None and target_dir is None:
        raise InvalidArgumentError("a topic replayed into itself would double: give --target-topic or --target-dir")
    bounds = flag.bound("--from", "starting", begin) | flag.bound("--to", "ending", end)
    with on_spark("basalt-replay") as spark:
        from basaltmq.pipeline.archive.replay import STEP_RECORDS, ReplayJob
        from basaltmq.pipeline.archive.replay import replay as run

        job = ReplayJob(
            topics=topics,
            archive=archive,
            source=None if archive is not None else place | ({"failOnDataLoss": "false"} if skip_lost else {}),
            target={"path": target_dir, "vhost": place["vhost"]} if target_dir is not None else place,
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
