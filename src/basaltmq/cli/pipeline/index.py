"""`basalt pipeline rebuild-index`: the index of a store's log, made anew by all cores there are."""

from __future__ import annotations

import click
import msgspec

from basaltmq.cli.output import progress_line, show
from basaltmq.cli.pipeline import flags as flag
from basaltmq.cli.pipeline.flags import end_with, on_spark, print_json
from basaltmq.pipeline.source import require_path


@click.command()
@click.option("--compare", is_flag=True, help="Change nothing; say where the index differs from what it should be.")
@flag.dry_run
@flag.as_json
@flag.placed
def rebuild_index(place: dict[str, str], compare: bool, dry_run: bool, as_json: bool) -> None:
    """The index of the log, from the log, in parallel; it takes the old one's place at the end.

    Nobody else may have the store open for writing. Interrupted, the old index is still there, or there is none, and
    the next process that opens the store makes it. Exit code 2 if --compare finds differences, 3 if the log is damaged.
    """
    path = require_path(place, "rebuild-index")
    with on_spark("basalt-rebuild-index") as spark:
        from basaltmq.pipeline.index.rebuild import RebuildJob
        from basaltmq.pipeline.index.rebuild import rebuild_index as run
        from basaltmq.pipeline.tasks import SparkTasks

        job = RebuildJob(path=path, vhost=place["vhost"], compare=compare, dry_run=dry_run)
        result = run(SparkTasks(spark), job, lambda phase: progress_line(phase, "tasks"))
    if as_json:
        print_json(result)
    else:
        told = msgspec.to_builtins(result)
        del told["findings"]
        show([told], as_json=False)
        click.echo()
        show([msgspec.to_builtins(each) for each in result.findings], as_json=False, empty="nothing was found")
    end_with(result.findings)
