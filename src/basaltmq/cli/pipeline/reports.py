"""`basalt pipeline audit`, `lag` and `latency`: reports as tables, JSON and HTML pages."""

from __future__ import annotations

from pathlib import Path

import click

from basaltmq.cli.options import as_json
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import end_with, on_spark
from basaltmq.pipeline.lag import lag as lag_job
from basaltmq.pipeline.source import require_path


@click.command()
@flag.topics(required=False, help="Topics, separated by commas.  [default: all topics on disk]")
@click.option("--archive", help="Also compare the log with this archive.")
@click.option(
    "--index",
    "with_index",
    is_flag=True,
    help="Also compare the index row by row. No other process may have the store open for writing.",
)
@flag.html_page
@as_json
@flag.with_location
def audit(
    location: dict[str, str],
    topics: list[str] | None,
    archive: str | None,
    with_index: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """Check the consistency of a store and its archive.

    The audit compares log, index, archive, groups, queues and imports.

    The exit code is 2 if they are not, and 3 if records are missing or damaged.
    """
    path = require_path(location, "audit")
    with on_spark("basalt-audit", "audit") as spark:
        from basaltmq.pipeline.audit.audit import AuditJob
        from basaltmq.pipeline.audit.audit import audit as run
        from basaltmq.pipeline.reports.pages import audit_page

        job = AuditJob(path=path, vhost=location["vhost"], topics=topics, archive=archive, index=with_index)
        result = run(spark, job)
        if page is not None:
            page.write_text(audit_page(result))
    flag.report(result, as_json, (result.partitions, "no topics"), (result.findings, "no findings"))
    end_with(result.findings)


@click.command()
@click.option("--group", "groups", multiple=True, help="Consumer group; repeat for several.  [default: all]")
@click.option(
    "--pace",
    type=float,
    metavar="SECONDS",
    help="Measure twice, this long apart, and report rates and the time until the backlog is empty.",
)
@flag.html_page
@as_json
@flag.with_location
def lag(
    location: dict[str, str], groups: tuple[str, ...], pace: float | None, page: Path | None, as_json: bool
) -> None:
    """Report the lag of consumer groups and the backlog of queues. Does not use Spark. Queues require --data-dir."""
    result = lag_job(location, groups=list(groups) or None, pace_s=pace)
    if page is not None:
        from basaltmq.pipeline.reports.pages import lag_page

        page.write_text(lag_page(result))
    flag.report(result, as_json, (result.groups, "no group has committed an offset"), (result.queues, "no queues"))


@click.command()
@click.option("--from", "begin", help="First event: earliest, or a time.  [default: earliest]")
@click.option("--to", "end", help="Last event: latest, or a time.  [default: latest]")
@flag.html_page
@as_json
@flag.with_location
def latency(location: dict[str, str], begin: str | None, end: str | None, page: Path | None, as_json: bool) -> None:
    """Report wait and processing times of messages.

    The report has one row per queue and fairness key. It reads the topic `__events`.
    """
    options = flag.between(begin, end)
    with on_spark("basalt-latency", "latency") as spark:
        from basaltmq.pipeline.latency import latency as run
        from basaltmq.pipeline.reports.pages import latency_page, latency_row

        result = run(spark, location, options)
        if page is not None:
            page.write_text(latency_page(result))
    flag.report(result, as_json, ([latency_row(each) for each in result.queues], "no events"))
