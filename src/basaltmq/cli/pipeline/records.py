"""`basalt pipeline dedup`, `latest` and `profile`: jobs on the records of topics."""

from __future__ import annotations

from pathlib import Path

import click

from basaltmq.cli.options import as_json, combine
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import on_spark, result_of
from basaltmq.errors import InvalidArgumentError

_target = combine(
    click.option(
        "--target-topic", metavar="TOPIC", help="Write the result to this topic of the same store, exactly once."
    ),
    click.option("--parquet", metavar="FOLDER", help="Write the result as Parquet to this directory or URI."),
)


def _check_target(target_topic: str | None, parquet: str | None, dry_run: bool) -> None:
    if not dry_run and (target_topic is None) == (parquet is None):
        raise InvalidArgumentError("choose a target: --target-topic or --parquet, or use --dry-run")


@click.command()
@flag.topics(required=True)
@click.option("--by", default="key", show_default=True, help="Identity of a record: key, value, or a SQL expression.")
@click.option(
    "--window", type=float, metavar="SECONDS", help="Remove only repetitions within this time.  [default: unlimited]"
)
@_target
@flag.begin
@flag.end
@flag.checkpoint
@flag.skip_lost
@flag.dry_run
@as_json
@flag.with_location
def dedup(
    location: dict[str, str],
    topics: list[str],
    by: str,
    window: float | None,
    target_topic: str | None,
    parquet: str | None,
    begin: str | None,
    end: str | None,
    checkpoint: str | None,
    skip_lost: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy a topic without duplicate records.

    The result goes to a topic or to Parquet.
    """
    _check_target(target_topic, parquet, dry_run)
    source = flag.source_of(location, topics, begin, end, skip_lost=skip_lost)
    with on_spark("basalt-dedup", "dedup") as spark:
        from basaltmq.pipeline.dedup import DedupJob
        from basaltmq.pipeline.dedup import dedup as run
        from basaltmq.pipeline.sink import Sink

        to = Sink(parquet=parquet, topic=target_topic, location=location)
        job = DedupJob(source=source, to=to, by=by, window_s=window, checkpoint=checkpoint, dry_run=dry_run)
        result = run(spark, job)
    result_of(result, as_json)


@click.command()
@flag.topics(required=True)
@click.option("--keep-deleted", is_flag=True, help="Keep keys whose latest record has no value.")
@_target
@flag.begin
@flag.end
@flag.checkpoint
@flag.skip_lost
@flag.dry_run
@as_json
@flag.with_location
def latest(
    location: dict[str, str],
    topics: list[str],
    keep_deleted: bool,
    target_topic: str | None,
    parquet: str | None,
    begin: str | None,
    end: str | None,
    checkpoint: str | None,
    skip_lost: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the latest record of each key to a topic or to Parquet."""
    _check_target(target_topic, parquet, dry_run)
    source = flag.source_of(location, topics, begin, end, skip_lost=skip_lost)
    with on_spark("basalt-latest", "latest") as spark:
        from basaltmq.pipeline.latest import LatestJob
        from basaltmq.pipeline.latest import latest as run
        from basaltmq.pipeline.sink import Sink

        to = Sink(parquet=parquet, topic=target_topic, location=location)
        job = LatestJob(source=source, to=to, keep_deleted=keep_deleted, checkpoint=checkpoint, dry_run=dry_run)
        result = run(spark, job)
    result_of(result, as_json)


@click.command()
@flag.topics(required=False, help="Topics, separated by commas.  [default: all except internal topics]")
@click.option(
    "--sample", type=float, default=1.0, show_default=True, help="Fraction of values to parse, above 0 and up to 1."
)
@flag.begin
@flag.end
@flag.skip_lost
@flag.html_page
@as_json
@flag.with_location
def profile(
    location: dict[str, str],
    topics: list[str] | None,
    sample: float,
    begin: str | None,
    end: str | None,
    skip_lost: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """Report sizes, times, keys and JSON fields of topics."""
    source = flag.source_of(location, topics, begin, end, skip_lost=skip_lost)
    with on_spark("basalt-profile", "profile") as spark:
        from basaltmq.pipeline.profile import ProfileJob
        from basaltmq.pipeline.profile import profile as run
        from basaltmq.pipeline.reports.pages import profile_page, topic_row

        result = run(spark, ProfileJob(source=source, sample=sample))
        if page is not None:
            page.write_text(profile_page(result))
    topics_found = [topic_row(each) for each in result.topics]
    flag.report(result, as_json, (topics_found, "no records"), (result.fields, "no value is a JSON object"))
