"""`basalt pipeline rebuild-index`: rebuilds the index of a store's log in parallel."""

from __future__ import annotations

import click
import msgspec

from basaltmq.cli.options import as_json
from basaltmq.cli.output import progress_line
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import end_with, on_spark
from basaltmq.pipeline.source import require_path


@click.command()
@click.option("--compare", is_flag=True, help="Compare the index with the log, and change nothing.")
@flag.dry_run
@as_json
@flag.with_location
def rebuild_index(location: dict[str, str], compare: bool, dry_run: bool, as_json: bool) -> None:
    """Rebuild the index of the log in parallel.

    The new index replaces the old one at the end.

    No other process may have the store open for writing. After an interruption, either the old index is in place or
    none; without one, the next process that opens the store rebuilds it. The exit code is 2 if --compare finds
    differences, and 3 if the log is damaged.
    """
    path = require_path(location, "rebuild-index")
    with on_spark("basalt-rebuild-index") as spark:
        from basaltmq.pipeline.index.rebuild import RebuildJob
        from basaltmq.pipeline.index.rebuild import rebuild_index as run
        from basaltmq.pipeline.tasks import SparkTasks

        job = RebuildJob(path=path, vhost=location["vhost"], compare=compare, dry_run=dry_run)
        result = run(SparkTasks(spark), job, lambda phase: progress_line(phase, "tasks"))
    row = msgspec.to_builtins(result)
    del row["findings"]
    flag.report(result, as_json, ([row], ""), (result.findings, "no findings"))
    end_with(result.findings)
