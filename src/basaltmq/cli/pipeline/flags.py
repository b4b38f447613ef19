"""Shared parts of the `basalt pipeline` commands: options, Spark session, progress, errors and exit codes.

Exit codes: 0 success, 1 the job failed, 2 inconsistencies found, 3 records are lost.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from basaltmq import errors
from basaltmq.cli.options import Decorator, combine
from basaltmq.cli.output import CommandError, Row, progress_line, show, show_object
from basaltmq.errors import BasaltError, DataLossError, InvalidArgumentError, RemoteError
from basaltmq.pipeline.findings import Finding, exit_code
from basaltmq.pipeline.session import check_environment, quiet_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOST: Final = 3
ERROR_CHARACTERS_MAX: Final = 600
"""Maximum characters of a Spark error that are shown. It is the first line, without the trace."""

SKIP_OPTION: Final = "failOnDataLoss=false"
"""The option of the Spark source that --skip-lost sets."""

POLL_INTERVAL_S: Final = 0.5
"""Poll interval of Spark's progress."""

_BASALT_ERROR: Final = re.compile(r"basaltmq\.errors\.(\w+): (.+)")


dry_run = click.option("--dry-run", is_flag=True, help="Report what would be done, without doing it.")
html_page = click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report as an HTML page to this file.",
)
checkpoint = click.option(
    "--checkpoint", help="Checkpoint directory. A rerun with the same directory writes no record twice."
)
begin = click.option(
    "--from", "begin", help="First records to read: earliest, latest, offsets as JSON, or a time.  [default: earliest]"
)
end = click.option("--to", "end", help="Where to stop: latest, offsets as JSON, or a time.  [default: latest]")
skip_lost = click.option(
    "--skip-lost", is_flag=True, help="Skip records that are damaged, or that were deleted before they were read."
)
max_offsets = click.option("--max-offsets", type=click.IntRange(min=1), help="Maximum records per batch.")


def _names(ctx: click.Context, parameter: click.Parameter, text: str | None) -> list[str] | None:
    names = None if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if names == []:
        raise click.BadParameter("expected one or more topic names, separated by commas")
    return names


def topics(*, required: bool, help: str = "Topics, separated by commas.") -> Decorator:  # noqa: A002 click's word
    return click.option("--topics", required=required, callback=_names, help=help)


_location_options = combine(
    click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Data directory. It may also precede the command.",
    ),
    click.option(
        "--server",
        metavar="URL",
        help="Admin API of a broker, instead of --data-dir. The password comes from BASALT_PASSWORD.",
    ),
    click.option("--user", envvar="BASALT_USER", help="User name at the broker.  [default: guest]"),
    click.option(
        "--ca", type=click.Path(exists=True, dir_okay=False), help="PEM file with the CA of the broker's certificate."
    ),
    click.option(
        "--vhost", default="/", show_default=True, help="Virtual host of the broker, or in its data directory."
    ),
)


def with_location(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --data-dir and --server. The command gets the options of the Spark source as `location`."""

    @_location_options
    @click.pass_obj
    @functools.wraps(command)
    def run(
        obj: Path,
        /,
        data_dir: Path | None,
        server: str | None,
        user: str | None,
        ca: str | None,
        vhost: str,
        **arguments: Any,
    ) -> Any:
        return command(location=location_of(obj, data_dir, server, user, ca, vhost), **arguments)

    return run


def location_of(
    obj: Path, data_dir: Path | None, server: str | None, user: str | None, ca: str | None, vhost: str
) -> dict[str, str]:
    if server is None:
        return {"path": str(data_dir or obj), "vhost": vhost}
    if data_dir is not None:
        raise InvalidArgumentError("give either --data-dir or --server")
    given = {"server": server, "vhost": vhost, "user": user, "ca": ca}
    return {name: value for name, value in given.items() if value}


@contextmanager
def on_spark(name: str, what: str | None = None) -> Iterator[SparkSession]:
    """Provide a Spark session for a job, and show Spark's errors in one line.

    A session that is already running is used and kept. `what` is the title of Spark's task progress.
    """
    # PySpark may be missing, so check before importing it.
    check_environment()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    was_running = SparkSession.getActiveSession() is not None
    spark = quiet_session(name)
    try:
        with watching(spark, what):
            yield spark
    except PySparkException as error:
        raise ours(str(error)) from error
    except DataLossError as error:
        raise _Lost(str(error)) from error
    finally:
        if not was_running:
            spark.stop()


@contextmanager
def watching(spark: SparkSession, what: str | None) -> Iterator[None]:
    """Draw the number of completed tasks on a terminal."""
    if what is None or not sys.stderr.isatty():
        yield
        return
    finished = threading.Event()
    tracker: Any = spark.sparkContext.statusTracker()

    def poll() -> None:
        draw = progress_line(what, "tasks")
        while not finished.wait(POLL_INTERVAL_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            total = sum(each.numTasks for each in stages if each is not None)
            done = sum(each.numCompletedTasks for each in stages if each is not None)
            if total and done < total:
                draw(done, total)
        click.echo("\r" + " " * 60 + "\r", nl=False, err=True)

    thread = threading.Thread(target=poll, name="basalt-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def ours(text: str) -> click.ClickException:
    """Return the Basalt error inside a Spark error, or the first line of the Spark error."""
    found = None
    for found in _BASALT_ERROR.finditer(text):  # noqa: B007 the last one is wanted
        pass
    if found is None:
        first = next((line for line in text.splitlines() if line.strip()), "Spark failed without a message")
        return click.ClickException(first[:ERROR_CHARACTERS_MAX])
    message = found[2].strip()[:ERROR_CHARACTERS_MAX]
    kind = getattr(errors, found[1], BasaltError)
    if kind is DataLossError:
        return _Lost(message)
    # Some error classes take more than a message. The message and the code are enough to show.
    return CommandError(RemoteError(message, kind.code))


class _Lost(CommandError):
    """Records are lost. The message names --skip-lost instead of the option of the Spark source."""

    exit_code = LOST

    def __init__(self, message: str) -> None:
        super().__init__(DataLossError(message.replace(SKIP_OPTION, "--skip-lost")))


def bound(option: str, side: str, text: str | None) -> dict[str, str]:
    """Return source options for `--from` or `--to`: earliest, latest, offsets as JSON, or a time."""
    if text is None:
        return {}
    if text.lower() in ("earliest", "latest") or text.startswith("{"):
        return {f"{side}Offsets": text}
    if text.isdecimal():
        return {f"{side}Timestamp": text}
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgumentError(
            f"{option}: expected earliest, latest, offsets as JSON, milliseconds or a time "
            f"(2026-11-15T12:00), not {text!r}"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return {f"{side}Timestamp": str(int(moment.timestamp() * 1000))}


def source_of(
    location: dict[str, str],
    names: list[str] | None,
    begin: str | None = None,
    end: str | None = None,
    *,
    skip_lost: bool = False,
) -> dict[str, str]:
    """Return source options. Without names, all topics except internal ones are read."""
    which = {"subscribe": ",".join(names)} if names else {"subscribePattern": r"(?!__).*"}
    which |= {"failOnDataLoss": "false"} if skip_lost else {}
    return location | which | between(begin, end)


def between(begin: str | None, end: str | None) -> dict[str, str]:
    """Return source options for `--from` and `--to`. A partition without records after `--from` is skipped."""
    options = bound("--from", "starting", begin) | bound("--to", "ending", end)
    return options | ({"startingOffsetsByTimestampStrategy": "latest"} if "startingTimestamp" in options else {})


def result_of(result: Any, as_json: bool) -> None:
    show([msgspec.to_builtins(result)], as_json=as_json)


def report(result: Any, as_json: bool, *tables: tuple[Sequence[msgspec.Struct | Row], str]) -> None:
    """Print a result as JSON, or as tables. A table has rows, and a text that is shown if it is empty."""
    if as_json:
        show_object(result)
        return
    for number, (rows, empty) in enumerate(tables):
        if number:
            click.echo()
        show([msgspec.to_builtins(each) for each in rows], as_json=False, empty=empty)


def end_with(findings: list[Finding]) -> None:
    """Exit with the code of the most severe finding."""
    code = exit_code(findings)
    if code:
        raise SystemExit(code)
