"""`basalt pipeline dlq`: dead letters looked at, and sent back."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from basaltmq.cli.output import progress_line, show
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import on_spark, print_json, result_of
from basaltmq.errors import InvalidArgumentError

FINDINGS = 2


@click.group()
def dlq() -> None:
    """Dead letters: what died of what, and back with it."""


@dlq.command()
@click.option("--queue", "queues", multiple=True, help="Default: all that other queues name for their dead letters.")
@flag.html_page
@flag.as_json
@flag.placed
def report(place: dict[str, str], queues: tuple[str, ...], page: Path | None, as_json: bool) -> None:
    """What died where, of what, since when. Exit code 2 if there are dead letters."""
    if not queues and "server" in place:
        raise InvalidArgumentError("with --server, name the queues of dead letters: --queue NAME")
    with on_spark("basalt-dlq", "dlq report") as spark:
        from basaltmq.pipeline.dlq import dead_letter_queues, dlq_report
        from basaltmq.pipeline.dlq_page import dlq_page

        named = list(queues) or dead_letter_queues(place["path"], place["vhost"])
        result = dlq_report(spark, place, named)
        if page is not None:
            page.write_text(dlq_page(result))
    if as_json:
        print_json(result)
    else:
        show([msgspec.to_builtins(each) for each in result.queues], as_json=False)
        click.echo()
        show([msgspec.to_builtins(each) for each in result.causes], as_json=False, empty="nothing is dead")
    if any(each.messages for each in result.queues):
        raise SystemExit(FINDINGS)


@dlq.command()
@click.option("--queue", required=True, help="The queue of dead letters.")
@click.option("--to", metavar="QUEUE", help="Default: where each came from.")
@click.option(
    "--where",
    help="A condition in SQL: origin, reason, error, died_at, value, key, headers, timestamp, attempts, redriven_by.",
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Messages per second.")
@click.option("--checkpoint", required=True, help="A folder for the snapshot and the plan; give it again to go on.")
@flag.dry_run
@flag.as_json
@flag.placed
def redrive(
    place: dict[str, str],
    queue: str,
    to: str | None,
    where: str | None,
    rate: float | None,
    checkpoint: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Dead letters back to where they came from, after a snapshot of all of them; started again it goes on.

    Exit code 2 if some that were wanted are still there: leased, delayed, or the queue they came from is gone.
    """
    broker = place if "server" in place else {}
    with on_spark("basalt-dlq") as spark:
        from basaltmq.pipeline.dlq import RedriveJob
        from basaltmq.pipeline.dlq import redrive as run

        job = RedriveJob(
            path=place.get("path", ""),
            broker=broker,
            vhost=place["vhost"],
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
