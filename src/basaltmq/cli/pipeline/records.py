"""`basalt pipeline dedup`, `latest` and `profile`: records of topics, without the copies, the old, or at a glance."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from basaltmq.cli.output import show
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import on_spark, print_json, result_of
from basaltmq.errors import InvalidArgumentError

_target = flag.flags(
    click.option("--target-topic", metavar="TOPIC", help="Write them to this topic of the same store, exactly once."),
    click.option("--parquet", metavar="FOLDER", help="Write them to this folder, or URI Spark knows, as Parquet."),
)


def _check_target(target_topic: str | None, parquet: str | None, dry_run: bool) -> None:
    if not dry_run and (target_topic is None) == (parquet is None):
        raise InvalidArgumentError("say where records go: --target-topic or --parquet, or look first with --dry-run")


@click.command()
@flag.topics(required=True)
@click.option("--by", default="key", show_default=True, help="key, value, or an expression in SQL.")
@click.option("--window", type=float, metavar="SECONDS", help="Only what came so shortly before counts; default: ever.")
@_target
@flag.begin
@flag.end
@flag.checkpoint
@flag.skip_lost
@flag.dry_run
@flag.as_json
@flag.placed
def dedup(
    place: dict[str, str],
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
    """Records without those that came before, to a topic or to Parquet."""
    _check_target(target_topic, parquet, dry_run)
    source = flag.source_of(place, topics, begin, end, skip_lost=skip_lost)
    with on_spark("basalt-dedup", "dedup") as spark:
        from basaltmq.pipeline.dedup import DedupJob
        from basaltmq.pipeline.dedup import dedup as run
        from basaltmq.pipeline.sink import Outlet

        to = Outlet(parquet=parquet, topic=target_topic, place=place)
        job = DedupJob(source=source, to=to, by=by, window_s=window, checkpoint=checkpoint, dry_run=dry_run)
        result = run(spark, job)
    result_of(result, as_json)


@click.command()
@flag.topics(required=True)
@click.option("--keep-deleted", is_flag=True, help="Also keys whose newest record has no value.")
@_target
@flag.begin
@flag.end
@flag.checkpoint
@flag.skip_lost
@flag.dry_run
@flag.as_json
@flag.placed
def latest(
    place: dict[str, str],
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
    """The newest record of each key, to a topic or to Parquet."""
    _check_target(target_topic, parquet, dry_run)
    source = flag.source_of(place, topics, begin, end, skip_lost=skip_lost)
    with on_spark("basalt-latest", "latest") as spark:
        from basaltmq.pipeline.latest import LatestJob
        from basaltmq.pipeline.latest import latest as run
        from basaltmq.pipeline.sink import Outlet

        to = Outlet(parquet=parquet, topic=target_topic, place=place)
        job = LatestJob(source=source, to=to, keep_deleted=keep_deleted, checkpoint=checkpoint, dry_run=dry_run)
        result = run(spark, job)
    result_of(result, as_json)


@click.command()
@flag.topics(required=False, help="With commas between them; default: all but the system's.")
@click.option("--sample", type=float, default=1.0, show_default=True, help="The share of values to look into.")
@flag.begin
@flag.end
@flag.skip_lost
@flag.html_page
@flag.as_json
@flag.placed
def profile(
    place: dict[str, str],
    topics: list[str] | None,
    sample: float,
    begin: str | None,
    end: str | None,
    skip_lost: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """What topics hold: sizes, times, keys, and the fields of their values."""
    source = flag.source_of(place, topics, begin, end, skip_lost=skip_lost)
    with on_spark("basalt-profile", "profile") as spark:
        from basaltmq.pipeline.profile import ProfileJob
        from basaltmq.pipeline.profile import profile as run
        from basaltmq.pipeline.profile_page import flat_topic, profile_page

        result = run(spark, ProfileJob(source=source, sample=sample))
        if page is not None:
            page.write_text(profile_page(result))
    if as_json:
        print_json(result)
        return
    show([flat_topic(each) for each in result.topics], as_json=False, empty="there are no records")
    click.echo()
    show([msgspec.to_builtins(each) for each in result.fields], as_json=False, empty="no value parses as JSON")
