"""`basalt pipeline dlq`: report and redrive dead letters."""

from __future__ import annotations

from pathlib import Path

import click

from basaltmq.cli.options import as_json
from basaltmq.cli.output import FINDINGS, progress_line
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import on_spark, result_of
from basaltmq.errors import InvalidArgumentError


@click.group()
def dlq() -> None:
    """Report and redrive dead letters."""


@dlq.command()
@click.option(
    "--queue",
    "queues",
    multiple=True,
    help="Dead-letter queue; repeat for several.  [default: all that queues refer to]",
)
@flag.html_page
@as_json
@flag.with_location
def report(location: dict[str, str], queues: tuple[str, ...], page: Path | None, as_json: bool) -> None:
    """Report dead letters by queue, cause and time. The exit code is 2 if there are any."""
    if not queues and "server" in location:
        raise InvalidArgumentError("--server requires the names of the dead-letter queues: --queue NAME")
    with on_spark("basalt-dlq", "dlq report") as spark:
        from basaltmq.pipeline.dlq import dead_letter_queues, dlq_report
        from basaltmq.pipeline.reports.pages import dlq_page

        named = list(queues) or dead_letter_queues(location["path"], location["vhost"])
        result = dlq_report(spark, location, named)
        if page is not None:
            page.write_text(dlq_page(result))
    flag.report(result, as_json, (result.queues, "no results"), (result.causes, "no dead letters"))
    if any(each.messages for each in result.queues):
        raise SystemExit(FINDINGS)


@dlq.command()
@click.option("--queue", required=True, help="Dead-letter queue.")
@click.option("--to", metavar="QUEUE", help="Target queue.  [default: the queue each message came from]")
@click.option(
    "--where",
    help="SQL condition on origin, reason, error, died_at, value, key, headers, timestamp, attempts and redriven_by.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Maximum rate in messages per second.  [default: unlimited]",
)
@click.option(
    "--checkpoint",
    required=True,
    help="Directory for the snapshot and the plan. Pass the same directory to resume an interrupted run.",
)
@flag.dry_run
@as_json
@flag.with_location
def redrive(
    location: dict[str, str],
    queue: str,
    to: str | None,
    where: str | None,
    rate: float | None,
    checkpoint: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Move dead letters back to their origin.

    A snapshot of all of them is taken first. An interrupted run can be resumed.

    The exit code is 2 if selected messages remain: leased or delayed ones, or those whose original queue does not
    exist.
    """
    broker = location if "server" in location else {}
    with on_spark("basalt-dlq") as spark:
        from basaltmq.pipeline.dlq import RedriveJob
        from basaltmq.pipeline.dlq import redrive as run

        job = RedriveJob(
            path=location.get("path", ""),
            broker=broker,
            vhost=location["vhost"],
            queue=queue,
            to=to,
            where=where,
            rate_per_s=rate,
            checkpoint=checkpoint,
            dry_run=dry_run,
        )
        result = run(spark, job, progress_line("redrive", "messages"))
    result_of(result, as_json)
    if result.stayed and not dry_run:
        raise SystemExit(FINDINGS)
