"""`basalt pipeline audit`, `lag` and `latency`: how things are, as tables, JSON and pages."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from basaltmq.cli.output import show
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import end_with, on_spark, print_json
from basaltmq.pipeline.lag import lag as lag_job
from basaltmq.pipeline.source import require_path


@click.command()
@flag.topics(required=False, help="Default: all that are kept on disk.")
@click.option("--archive", help="Compare with this archive.")
@click.option("--index", "with_index", is_flag=True, help="Compare the index row by row; nobody may write meanwhile.")
@flag.html_page
@flag.as_json
@flag.placed
def audit(
    place: dict[str, str],
    topics: list[str] | None,
    archive: str | None,
    with_index: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """Do log, index, archive, groups, queues and imports fit together?

    Exit code 2 if something does not, 3 if records are missing or damaged.
    """
    path = require_path(place, "audit")
    with on_spark("basalt-audit", "audit") as spark:
        from basaltmq.pipeline.audit.audit import AuditJob
        from basaltmq.pipeline.audit.audit import audit as run
        from basaltmq.pipeline.reports import audit_page

        job = AuditJob(path=path, vhost=place["vhost"], topics=topics, archive=archive, index=with_index)
        result = run(spark, job)
        if page is not None:
            page.write_text(audit_page(result))
    if as_json:
        print_json(result)
    else:
        show([msgspec.to_builtins(each) for each in result.partitions], as_json=False, empty="there are no topics")
        click.echo()
        show([msgspec.to_builtins(each) for each in result.findings], as_json=False, empty="nothing was found")
    end_with(result.findings)


@click.command()
@click.option("--group", "groups", multiple=True, help="Only this one; several times for several.")
@click.option("--pace", type=float, metavar="SECONDS", help="Look twice, so long apart, and tell how fast it drains.")
@flag.html_page
@flag.as_json
@flag.placed
def lag(place: dict[str, str], groups: tuple[str, ...], pace: float | None, page: Path | None, as_json: bool) -> None:
    """How far groups are behind, and how full queues are. Needs no Spark; queues only with --data-dir."""
    result = lag_job(place, groups=list(groups) or None, pace_s=pace)
    if page is not None:
        from basaltmq.pipeline.lag_page import lag_page

        page.write_text(lag_page(result))
    if as_json:
        print_json(result)
        return
    show([msgspec.to_builtins(each) for each in result.groups], as_json=False, empty="no group has committed anything")
    click.echo()
    show([msgspec.to_builtins(each) for each in result.queues], as_json=False, empty="there are no queues")


@click.command()
@click.option("--from", "begin", help="Events from here on: earliest, or a time.")
@click.option("--to", "end", help="Events up to here: latest, or a time.")
@flag.html_page
@flag.as_json
@flag.placed
def latency(place: dict[str, str], begin: str | None, end: str | None, page: Path | None, as_json: bool) -> None:
    """How long messages waited and took, by queue and fairness key, from the events of `__events`."""
    options = flag.between(begin, end)
    with on_spark("basalt-latency", "latency") as spark:
        from basaltmq.pipeline.latency import latency as run
        from basaltmq.pipeline.reports import flat, latency_page

        result = run(spark, place, options)
        if page is not None:
            page.write_text(latency_page(result))
    if as_json:
        print_json(result)
        return
    show([flat(each) for each in result.queues], as_json=False, empty="there are no events")
