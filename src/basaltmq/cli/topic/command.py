"""`basalt topic`: topics in a data directory.

Commands that read open a view and work beside a running process. Commands that write need exclusive access to the
store. Records are read and printed as JSON lines (`streams/imports/record_lines.py`): `append` accepts what `read`
prints.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, Final

import click
import msgspec

import basaltmq
from basaltmq.cli.local_or_remote import local_or_remote_group
from basaltmq.cli.options import as_json, confirm, yes_option
from basaltmq.cli.output import progress_line, show
from basaltmq.cli.topic import input as topic_input
from basaltmq.cli.topic.input import APPEND_RECORDS, batches, reset_to
from basaltmq.cli.topic.remote import server_topic
from basaltmq.errors import BasaltError
from basaltmq.streams.imports.record_lines import encode_record
from basaltmq.streams.metadata_json import export_metadata, import_metadata
from basaltmq.streams.migration import Progress
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import NewTopic, Topic, in_batches, topic_config
from basaltmq.streams.view import StreamView

FOLLOW_WAIT_S: Final = 1.0
"""Maximum duration of one wait for new records, so that Ctrl-C works."""

SKIPPED_SHOWN_MAX: Final = 10
"""Skipped topics that an import names."""

engine_choice = click.Choice([each.value for each in Engine])


@click.group(cls=local_or_remote_group(server_topic))
def topic() -> None:
    """Manage topics and groups, and append and read records.

    Commands work on the data directory, or with --server on a running broker; see `basalt topic COMMAND --server URL
    --help`.
    """


@topic.command()
@topic_input.names
@topic_input.settings
@click.option("--engine", type=engine_choice, default=Engine.SEGMENT.value, show_default=True, help="Storage engine.")
@click.pass_obj
def create(data_dir: Path, /, names: tuple[str, ...], **settings: Any) -> None:
    """Create topics, and the store if there is none. Topics that exist are named, and the others are created."""
    config = topic_config({key: value for key, value in settings.items() if value is not None})
    with basaltmq.open(data_dir) as db:
        refused = [
            made
            for batch in in_batches(NewTopic(name, config) for name in names)
            for made in db.streams.topics.create_many(batch)
            if isinstance(made, BasaltError)
        ]
    topic_input.report_created(names, refused, f"basalt topic append {quote(names[0])}")


@topic.command("list")
@topic_input.page
@click.pass_obj
def list_topics(data_dir: Path, after: str | None, limit: int, as_json: bool) -> None:
    """List topics with record counts and sizes."""
    with StreamView.open(data_dir) as view:
        rows = [_topic_row(view, each) for each in islice(view.topics(after), limit)]
        show(rows, as_json=as_json, empty="no topics; create one with: basalt topic create NAME")


def _topic_row(view: StreamView, each: Topic) -> dict[str, object]:
    infos = [view.info(each.name, partition) for partition in range(each.config.partitions)]
    return {
        "topic": each.name,
        "engine": each.config.engine.value,
        "partitions": each.config.partitions,
        "records": sum(info.records for info in infos),
        "bytes": sum(info.size_bytes for info in infos),
        "durability": each.config.level.value,
    }


@topic.command()
@click.argument("name")
@as_json
@click.pass_obj
def describe(data_dir: Path, name: str, as_json: bool) -> None:
    """Show settings and partitions of a topic."""
    with StreamView.open(data_dir) as view:
        found = view.topic(name)
        partitions = []
        for partition in range(found.config.partitions):
            info = view.info(name, partition)
            partitions.append(
                {
                    "partition": partition,
                    "first": info.start_offset,
                    "end": info.high_watermark,
                    "records": info.records,
                    "bytes": info.size_bytes,
                }
            )
        settings = msgspec.to_builtins(found.config) | {
            "engine": found.config.engine.value,
            "durability": found.config.level.value,
            "partitions": found.config.partitions,
        }
        if as_json:
            show([{"topic": name, "settings": settings, "partitions": partitions}], as_json=True)
            return
        click.echo(f"topic {name} ({found.id})")
        for setting, value in sorted(settings.items()):
            click.echo(f"  {setting}: {value}")
        click.echo()
        show(partitions, as_json=False)


@topic.command()
@click.argument("name")
@topic_input.source
@click.pass_obj
def append(
    data_dir: Path,
    name: str,
    partition: int | None,
    key: str | None,
    raw: bool,
    durability: str | None,
    source: BinaryIO,
) -> None:
    """Append one record per line of stdin.

    A line is a JSON object {"value": "...", "key": "..."}, or the value with --raw.
    """
    done = 0
    with basaltmq.open(data_dir, create=False) as db:
        target = db.topic(name, create=False)
        try:
            for batch in batches(source, raw, key):
                target.append(batch, partition=partition, durability=durability)
                done += len(batch)
        finally:
            click.echo(f"{done:,} records appended to {name}", err=True)


@topic.command()
@click.argument("name")
@topic_input.search
@click.pass_obj
def read(
    data_dir: Path,
    name: str,
    partition: int | None,
    start: str,
    since_ms: int | None,
    limit: int | None,
    key: str | None,
    tag: str | None,
    follow: bool,
    raw: bool,
) -> None:
    """Print records as JSON lines. Read-only; works while another process has the store open."""
    with StreamView.open(data_dir) as view:
        found = view.topic(name)
        chosen = range(found.config.partitions) if partition is None else [partition]
        at = {each: _begin(view, name, each, start, since_ms) for each in chosen}
        topic_input.print_records(_ViewSource(view, name, key, tag, raw), at, limit, follow=follow)


class _ViewSource:
    """Reads a topic of a data directory."""

    def __init__(self, view: StreamView, name: str, key: str | None, tag: str | None, raw: bool) -> None:
        self._view = view
        self._name = name
        self._key = None if key is None else key.encode()
        self._tag = None if tag is None else tag.encode()
        self._raw = raw

    def read(self, partition: int, offset: int, limit: int) -> tuple[list[bytes], int]:
        batch = self._view.read(
            self._name, partition, offset, max_records=min(limit, APPEND_RECORDS), key=self._key, tag=self._tag
        )
        lines = [
            (record.value or b"") if self._raw else encode_record(self._name, partition, record)
            for record in batch.records()
        ]
        return lines, batch.next_offset

    def first_offset(self, partition: int) -> int:
        return self._view.info(self._name, partition).start_offset

    def wait(self) -> None:
        self._view.wait(FOLLOW_WAIT_S)


def _begin(view: StreamView, name: str, partition: int, start: str, since_ms: int | None) -> int:
    if since_ms is not None:
        return view.offset_at(name, partition, since_ms)
    info = view.info(name, partition)
    return topic_input.begin(start, info.start_offset, info.high_watermark)


@topic.command()
@click.argument("name")
@yes_option
@click.pass_obj
def delete(data_dir: Path, name: str, yes: bool) -> None:
    """Delete a topic with all its records and offsets. This cannot be undone."""
    with basaltmq.open(data_dir, create=False) as db:
        db.topic(name, create=False)
        confirm(yes, f"Delete topic {name} and all its records?")
        db.delete_topic(name)
    click.echo(f"topic {name} deleted")


@topic.command()
@topic_input.group
@click.option("--delete", "is_deleted", is_flag=True, help="Delete the group.")
@click.pass_obj
def groups(
    data_dir: Path,
    group: str | None,
    reset: str | None,
    name: str | None,
    partition: int | None,
    is_deleted: bool,
    as_json: bool,
) -> None:
    """List consumer groups, or show the lag of one, reset or delete it."""
    if (reset is not None or is_deleted) and group is None:
        raise click.UsageError("GROUP is required with --reset and --delete")
    if reset is not None:
        if name is None:
            raise click.UsageError("--reset requires --topic")
        to, time_ms = reset_to(reset)
        with basaltmq.open(data_dir, create=False) as db:
            moved = db.streams.groups.reset(str(group), name, to, partition=partition, timestamp_ms=time_ms)
        show([{"partition": each, "offset": offset} for each, offset in moved.items()], as_json=as_json)
    elif is_deleted:
        with basaltmq.open(data_dir, create=False) as db:
            db.streams.groups.delete(str(group))
        click.echo(f"group {group} deleted")
    else:
        with StreamView.open(data_dir) as view:
            if group is None:
                rows: list[dict[str, object]] = [{"group": each} for each in view.groups()]
            else:
                rows = [msgspec.structs.asdict(each) for each in view.lag(group)]
            show(rows, as_json=as_json, empty="no group has committed an offset")


@topic.command()
@click.argument("name")
@click.argument("engine", type=engine_choice)
@click.pass_obj
def migrate(data_dir: Path, name: str, engine: str) -> None:
    """Move a topic to another storage engine. Offsets and groups do not change. An interrupted migration can be
    repeated."""
    with basaltmq.open(data_dir, create=False) as db:
        line = progress_line(f"migrate {name}", "records")

        def draw(at: Progress) -> None:
            line(at.copied, at.copied + at.left)

        db.streams.migration.run(name, Engine(engine), progress=draw)
    click.echo(f"topic {name} now uses the {engine} engine")


@topic.command("export")
@click.argument("target", type=click.File("wb"), default="-")
@click.pass_obj
def export_topics(data_dir: Path, target: BinaryIO) -> None:
    """Export topics, groups and offsets as JSON lines.

    Records are not exported. The default target is stdout.
    """
    with basaltmq.open(data_dir, create=False) as db:
        for line in export_metadata(db.streams.topics, db.streams.drivers, db.streams.offsets):
            target.write(line)


@topic.command("import")
@click.argument("source", type=click.File("rb"), default="-")
@click.pass_obj
def import_topics(data_dir: Path, source: BinaryIO) -> None:
    """Create topics and set offsets from the JSON lines of an export."""
    with basaltmq.open(data_dir) as db:
        done = import_metadata(source, db.streams.topics, db.streams.offsets)
    click.echo(f"{done.topics:,} topics created, {done.offsets:,} offsets of groups set")
    if done.topics_skipped:
        shown = ", ".join(done.topics_skipped[:SKIPPED_SHOWN_MAX])
        more = len(done.topics_skipped) - SKIPPED_SHOWN_MAX
        click.echo(f"skipped existing topics: {shown}{f' and {more:,} more' if more > 0 else ''}", err=True)
    if done.offsets_skipped:
        click.echo(f"{done.offsets_skipped:,} offsets skipped: their topic or partition does not exist", err=True)
