"""What the commands of `basalt pipeline` share: flags, a session, progress, errors in one line, exit codes.

Exit codes: 0 done, 1 it could not be done, 2 something does not fit, 3 records are lost.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from basaltmq import errors
from basaltmq.cli.output import CommandError, progress_line, show
from basaltmq.errors import BasaltError, DataLossError, InvalidArgumentError, RemoteError
from basaltmq.pipeline.findings import Finding, exit_code
from basaltmq.pipeline.session import check_environment, quiet_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOST: Final = 3
TOLD_MAX: Final = 600
"""Characters of an error of Spark's that are shown: its first line, without the trace."""

SKIP_OPTION: Final = "failOnDataLoss=false"
"""What the source calls --skip-lost."""

LOOK_INTERVAL_S: Final = 0.5
"""Between two looks at how far Spark is."""

_OURS: Final = re.compile(r"basaltmq\.errors\.(\w+): (.+)")

Flag = Callable[[Callable[..., Any]], Callable[..., Any]]


def flags(*options: Flag) -> Flag:
    """Several flags as one, shown in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done.")
html_page = click.option(
    "--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with plots."
)
checkpoint = click.option("--checkpoint", help="A folder; given again, the job writes nothing twice.")
begin = click.option("--from", "begin", help="earliest (default), latest, offsets as JSON, or a time.")
end = click.option("--to", "end", help="latest (default), offsets as JSON, or a time: up to there.")
skip_lost = click.option(
    "--skip-lost", is_flag=True, help="Go on without records that are damaged, or were removed before they were read."
)
max_offsets = click.option("--max-offsets", type=click.IntRange(min=1), help="Records of one batch at most.")


def _names(ctx: click.Context, parameter: click.Parameter, text: str | None) -> list[str] | None:
    names = None if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if names == []:
        raise click.BadParameter("name one topic or several, with commas between them")
    return names


def topics(*, required: bool, help: str = "With commas between them.") -> Flag:  # noqa: A002 click's word
    return click.option("--topics", required=required, callback=_names, help=help)


_place_flags = (
    click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="The store; the same as before the command's name.",
    ),
    click.option("--server", metavar="URL", help="A broker's admin API instead; the password is in BASALT_PASSWORD."),
    click.option("--user", envvar="BASALT_USER", help="Of the broker.  [default: guest]"),
    click.option("--ca", type=click.Path(exists=True, dir_okay=False), help="PEM file of who signed its certificate."),
    click.option("--vhost", default="/", show_default=True, help="Of the broker, or in its directory."),
)


def placed(command: Callable[..., Any]) -> Callable[..., Any]:
    """--data-dir or --server; the command gets the options of the source as `place`."""

    @click.pass_obj
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
        return command(place=place_of(obj, data_dir, server, user, ca, vhost), **arguments)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    return flags(*_place_flags)(run)


def place_of(
    obj: Path, data_dir: Path | None, server: str | None, user: str | None, ca: str | None, vhost: str
) -> dict[str, str]:
    if server is None:
        return {"path": str(data_dir or obj), "vhost": vhost}
    if data_dir is not None:
        raise InvalidArgumentError("give --data-dir, for a directory, or --server, for a broker, not both")
    given = {"server": server, "vhost": vhost, "user": user, "ca": ca}
    return {name: value for name, value in given.items() if value}


@contextmanager
def on_spark(name: str, what: str | None = None) -> Iterator[SparkSession]:
    """A session for a job; its errors in one line. One that was running goes on. `what` draws Spark's own progress."""
    # Before anything of Spark's is imported, which may not be there.
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
    """Draw how many tasks of the jobs under way are done, on a terminal."""
    if what is None or not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    tracker: Any = spark.sparkContext.statusTracker()

    def look() -> None:
        draw = progress_line(what, "tasks")
        while not over.wait(LOOK_INTERVAL_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            total = sum(each.numTasks for each in stages if each is not None)
            done = sum(each.numCompletedTasks for each in stages if each is not None)
            if total and done < total:
                draw(done, total)
        click.echo("\r" + " " * 60 + "\r", nl=False, err=True)

    thread = threading.Thread(target=look, name="basalt-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def ours(text: str) -> click.ClickException:
    """The error of ours in one of Spark's, if there is one; else its first line."""
    found = None
    for found in _OURS.finditer(text):  # noqa: B007 the last one is wanted
        pass
    if found is None:
        first = next((line for line in text.splitlines() if line.strip()), "Spark failed without a word")
        return click.ClickException(first[:TOLD_MAX])
    said = found[2].strip()[:TOLD_MAX]
    kind = getattr(errors, found[1], BasaltError)
    if kind is DataLossError:
        return _Lost(said)
    # Some are made of more than a text; what is shown is the text, and which one it is.
    return CommandError(RemoteError(said, kind.code))


class _Lost(CommandError):
    """Records are lost; what the source tells to do about it is said in words of this command."""

    exit_code = LOST

    def __init__(self, said: str) -> None:
        super().__init__(DataLossError(said.replace(SKIP_OPTION, "--skip-lost")))


def bound(option: str, side: str, text: str | None) -> dict[str, str]:
    """Options of the source for `--from` and `--to`: a place, offsets as JSON, or a time."""
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
            f"{option} is earliest, latest, offsets as JSON, milliseconds or a time (2026-11-15T12:00), not {text!r}"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return {f"{side}Timestamp": str(int(moment.timestamp() * 1000))}


def source_of(
    place: dict[str, str],
    names: list[str] | None,
    begin: str | None = None,
    end: str | None = None,
    *,
    skip_lost: bool = False,
) -> dict[str, str]:
    """Options of the source: all topics but the system's if none is named."""
    which = {"subscribe": ",".join(names)} if names else {"subscribePattern": r"(?!__).*"}
    which |= {"failOnDataLoss": "false"} if skip_lost else {}
    return place | which | between(begin, end)


def between(begin: str | None, end: str | None) -> dict[str, str]:
    """Options of the source for `--from` and `--to`; of a partition that has nothing so late, nothing is read."""
    options = bound("--from", "starting", begin) | bound("--to", "ending", end)
    return options | ({"startingOffsetsByTimestampStrategy": "latest"} if "startingTimestamp" in options else {})


def result_of(result: Any, as_json: bool) -> None:
    show([msgspec.to_builtins(result)], as_json=as_json)


def print_json(result: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())


def end_with(findings: list[Finding]) -> None:
    """Leave with the code of the worst one."""
    code = exit_code(findings)
    if code:
        raise SystemExit(code)
