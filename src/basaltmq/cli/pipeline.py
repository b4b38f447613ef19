"""`basalt pipeline JOB`: what happens to messages after they were delivered, on Spark.

Each job is a function of `basaltmq.pipeline`; here are its flags, its progress and its result. Spark and Java are
looked for when a job starts, so that `--help` works without them. Exit codes: 0 done, 1 it could not be done, 2
something does not fit, 3 records are lost.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from basaltmq.cli.output import CommandError, progress_line, show
from basaltmq.errors import DataLossError, InvalidArgumentError
from basaltmq.pipeline.findings import Finding, exit_code
from basaltmq.pipeline.lag import lag as lag_job
from basaltmq.pipeline.session import check_environment, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOST: Final = 3
TOLD_MAX: Final = 600
"""Characters of an error of Spark's that are shown: its first line, without the trace."""

_OURS: Final = re.compile(r"basaltmq\.errors\.(\w+): (.+)")


@click.group()
def pipeline() -> None:
    """Archive, replay, audit and measure, on Spark.

    Jobs read beside a running process. Those that write to a topic need the store for a moment, when nobody else has
    it open for writing.
    """


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags every job has."""
    command = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
    command = click.option("--vhost", default="/", show_default=True, help="In the directory of a broker.")(command)
    return click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="The store; the same as before the command's name.",
    )(command)


def _topics(ctx: click.Context, parameter: click.Parameter, text: str | None) -> list[str] | None:
    names = None if text is None else [name.strip() for name in text.split(",") if name.strip()]
    if names == []:
        raise click.BadParameter("name one topic or several, with commas between them")
    return names


@contextmanager
def on_spark(name: str) -> Iterator[SparkSession]:
    """A session for a job; its errors in one line. One that was running goes on."""
    # Before anything of Spark's is imported, which may not be there.
    check_environment()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    was_running = SparkSession.getActiveSession() is not None
    spark = spark_session(name)
    try:
        yield spark
    except PySparkException as error:
        raise _ours(str(error)) from error
    finally:
        if not was_running:
            spark.stop()


def _ours(text: str) -> click.ClickException:
    """The error of ours in one of Spark's, if there is one; else its first line."""
    found = None
    for found in _OURS.finditer(text):  # noqa: B007 the last one is wanted
        pass
    if found is None:
        first = next((line for line in text.splitlines() if line.strip()), "Spark failed without a word")
        return click.ClickException(first[:TOLD_MAX])
    kind = _LostOnSpark if found[1] == DataLossError.__name__ else click.ClickException
    return kind(found[2].strip()[:TOLD_MAX])


class _LostOnSpark(click.ClickException):
    exit_code = LOST


class _Lost(CommandError):
    exit_code = LOST


@contextmanager
def told() -> Iterator[None]:
    """Data that is lost has an exit code of its own."""
    try:
        yield
    except DataLossError as error:
        raise _Lost(error) from error


def _bound(option: str, side: str, text: str | None) -> dict[str, str]:
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


def _result(result: Any, as_json: bool) -> None:
    show([msgspec.to_builtins(result)], as_json=as_json)


@pipeline.command()
@common
@click.option("--topics", required=True, callback=_topics, help="With commas between them.")
@click.option("--to", "target", required=True, help="Where the archive is or will be: a folder, or a URI Spark knows.")
@click.option("--from", "begin", help="earliest (default), latest, offsets as JSON, or a time; for the first run.")
@click.option("--checkpoint", help="Default: in the archive.")
@click.option("--continuous", type=float, metavar="SECONDS", help="Go on, looking for more every so often.")
@click.option("--once", is_flag=True, help="End when what was there is archived; the default.")
@click.option("--max-offsets", type=int, help="Records of one batch at most.")
@click.option("--file-bytes", type=int, help="What a file holds at most, about.")
@click.option("--value-schema", help="Parse values as JSON by this schema (DDL); rejects are kept apart.")
@click.pass_obj
def archive(
    obj: Path,
    data_dir: Path | None,
    vhost: str,
    as_json: bool,
    topics: list[str],
    target: str,
    begin: str | None,
    checkpoint: str | None,
    continuous: float | None,
    once: bool,
    max_offsets: int | None,
    file_bytes: int | None,
    value_schema: str | None,
) -> None:
    """Topics to Parquet, by topic and day, each record exactly once."""
    if once and continuous is not None:
        raise InvalidArgumentError("give --once or --continuous, not both")
    source = {"path": str(data_dir or obj), "vhost": vhost, "subscribe": ",".join(topics)}
    given = {
        "offsets_max": max_offsets,
        "file_bytes": file_bytes,
        "value_schema": value_schema,
        "checkpoint": checkpoint,
        "continuous_s": continuous,
    }
    with told(), on_spark("basalt-archive") as spark:
        from basaltmq.pipeline.archive import ArchiveJob, Progress
        from basaltmq.pipeline.archive import archive as run

        def tell(progress: Progress) -> None:
            if sys.stderr.isatty():
                said = f"batch {progress.batch}: {progress.records:,} records, {progress.rate_per_s:,.0f}/s"
                click.echo(f"\r{said} ", nl=False, err=True)

        job = ArchiveJob(
            source=source | _bound("--from", "starting", begin),
            target=target,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )
        _result(run(spark, job, tell), as_json)


@pipeline.command()
@click.argument("archive")
@click.option("--small-bytes", type=int, help="Files below this are put together; default 32 MiB.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compact(archive: str, small_bytes: int | None, dry_run: bool, as_json: bool) -> None:
    """Small files of an archive put together."""
    with told(), on_spark("basalt-compact") as spark:
        from basaltmq.pipeline.compact import SMALL_BYTES, CompactJob
        from basaltmq.pipeline.compact import compact as run

        job = CompactJob(archive=archive, small_bytes=small_bytes or SMALL_BYTES, dry_run=dry_run)
        _result(run(spark, job, progress_line("compact", "records")), as_json)


@pipeline.command()
@common
@click.option("--topics", required=True, callback=_topics, help="What to replay, with commas between them.")
@click.option("--archive", help="Replay from this archive; without it, from the log of --data-dir.")
@click.option("--target-dir", type=click.Path(path_type=Path), help="The store to write to; default: --data-dir.")
@click.option("--target-topic", help="Default: the topic the records are of.")
@click.option("--checkpoint", required=True, help="A folder for the plan; give it again to go on.")
@click.option("--where", help="A condition in SQL: key, value, topic, partition, offset, timestamp, headers.")
@click.option("--rate", type=float, help="Records per second at most, on average.")
@click.option("--keep-partitions", is_flag=True, help="Not by key, but to the partition they were in.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
@click.pass_obj
def replay(
    obj: Path,
    data_dir: Path | None,
    vhost: str,
    as_json: bool,
    topics: list[str],
    archive: str | None,
    target_dir: Path | None,
    target_topic: str | None,
    checkpoint: str,
    where: str | None,
    rate: float | None,
    keep_partitions: bool,
    dry_run: bool,
) -> None:
    """An archive or a log back to a topic, each record exactly once; started again it goes on."""
    here = str(data_dir or obj)
    if archive is None and target_topic is None and target_dir is None:
        raise InvalidArgumentError("a topic replayed into itself would double: give --target-topic or --target-dir")
    with told(), on_spark("basalt-replay") as spark:
        from basaltmq.pipeline.replay import ReplayJob
        from basaltmq.pipeline.replay import replay as run

        job = ReplayJob(
            topics=topics,
            archive=archive,
            source_path=None if archive is not None else here,
            source_vhost=vhost,
            target_path=str(target_dir or here),
            target_vhost=vhost,
            target_topic=target_topic,
            checkpoint=checkpoint,
            where=where,
            rate_per_s=rate,
            keep_partitions=keep_partitions,
            dry_run=dry_run,
        )
        _result(run(spark, job, progress_line("replay", "steps")), as_json)


@pipeline.command()
@common
@click.option("--topics", callback=_topics, help="Default: all that are kept on disk.")
@click.option("--archive", help="Compare with this archive.")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with plots.")
@click.pass_obj
def audit(
    obj: Path,
    data_dir: Path | None,
    vhost: str,
    as_json: bool,
    topics: list[str] | None,
    archive: str | None,
    page: Path | None,
) -> None:
    """Do log, index, archive, groups, queues and imports fit together?

    Exit code 2 if something does not, 3 if records are missing or damaged.
    """
    with told(), on_spark("basalt-audit") as spark:
        from basaltmq.pipeline.audit import AuditJob
        from basaltmq.pipeline.audit import audit as run
        from basaltmq.pipeline.reports import audit_page

        result = run(spark, AuditJob(path=str(data_dir or obj), vhost=vhost, topics=topics, archive=archive))
        if page is not None:
            page.write_text(audit_page(result))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        show([msgspec.to_builtins(each) for each in result.partitions], as_json=False, empty="there are no topics")
        click.echo()
        show([msgspec.to_builtins(each) for each in result.findings], as_json=False, empty="nothing was found")
    _end(result.findings)


def _end(findings: list[Finding]) -> None:
    code = exit_code(findings)
    if code:
        raise SystemExit(code)


@pipeline.command()
@common
@click.option("--group", "groups", multiple=True, help="Only this one; several times for several.")
@click.option("--pace", type=float, metavar="SECONDS", help="Look twice, so long apart, and tell how fast it drains.")
@click.pass_obj
def lag(
    obj: Path, data_dir: Path | None, vhost: str, as_json: bool, groups: tuple[str, ...], pace: float | None
) -> None:
    """How far groups are behind, and how full queues are. Needs no Spark."""
    result = lag_job(str(data_dir or obj), vhost, groups=list(groups) or None, pace_s=pace)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
        return
    show([msgspec.to_builtins(each) for each in result.groups], as_json=False, empty="no group has committed anything")
    click.echo()
    show([msgspec.to_builtins(each) for each in result.queues], as_json=False, empty="there are no queues")


@pipeline.command()
@common
@click.option("--from", "begin", help="Events from here on: earliest, or a time.")
@click.option("--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with plots.")
@click.pass_obj
def latency(obj: Path, data_dir: Path | None, vhost: str, as_json: bool, begin: str | None, page: Path | None) -> None:
    """How long messages waited and took, by queue and fairness key, from the events of `__events`."""
    with told(), on_spark("basalt-latency") as spark:
        from basaltmq.pipeline.latency import latency as run
        from basaltmq.pipeline.reports import flat, latency_page

        result = run(spark, str(data_dir or obj), vhost, _bound("--from", "starting", begin))
        if page is not None:
            page.write_text(latency_page(result))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
        return
    show([flat(each) for each in result.queues], as_json=False, empty="there are no events")
