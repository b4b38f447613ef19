"""`basalt topic`: streams from the command line.

Commands that read open a view and work beside a running process; commands that write need the store for themselves.
Those of a broker's are in `server_topic`. Records go in and out as JSON lines (`record_lines`): what `read` prints,
`append` takes.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import click
import msgspec

import basaltmq
from basaltmq.cli.local_or_remote import either_group
from basaltmq.cli.output import progress_line, show
from basaltmq.cli.topic import input as topic_input
from basaltmq.cli.topic.input import APPEND_RECORDS, as_json, batches, reset_to
from basaltmq.cli.topic.remote import server_topic
from basaltmq.errors import OffsetOutOfRangeError
from basaltmq.streams.imports.record_lines import encode_record
from basaltmq.streams.metadata_json import export_metadata, import_metadata
from basaltmq.streams.migration import Progress
from basaltmq.streams.shards import Engine
from basaltmq.streams.topics import Topic, topic_config
from basaltmq.streams.view import StreamView

FOLLOW_WAIT_S: Final = 1.0
"""How long one wait for another process's records takes at most; Ctrl-C works meanwhile."""

SKIPPED_SHOWN_MAX: Final = 10
"""Topics named one by one when an import leaves them as they are."""

engine_choice = click.Choice([each.value for each in Engine])


@click.group(cls=either_group(server_topic))
def topic() -> None:
    """Create, fill, read and look after topics.

    Of the data directory, or of a running broker with --server: then `basalt topic COMMAND --server URL --help`.
    """


@topic.command()
@click.argument("name")
@topic_input.settings
@click.option("--engine", type=engine_choice, default=Engine.SEGMENT.value, show_default=True)
@click.pass_obj
def create(data_dir: Path, /, name: str, **settings: Any) -> None:
    """Create a topic."""
    given = {key: value for key, value in settings.items() if value is not None}
    with basaltmq.open(data_dir) as db:
        db.streams.topics.create(name, topic_config(given))
    click.echo(f"topic {name} created; fill it with: basalt topic append {name}")


@topic.command("list")
@topic_input.page
@click.pass_obj
def list_topics(data_dir: Path, after: str | None, limit: int, as_json: bool) -> None:
    """List topics with what they hold."""
    with StreamView.open(data_dir) as view:
        rows = [_topic_row(view, each) for each in islice(view.topics(after), limit)]
        show(rows, as_json=as_json, empty="no topics; make one with: basalt topic create NAME")


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
    """Settings and partitions of a topic."""
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
    """Append a record per line of stdin: JSON objects ({"value": "...", "key": "..."}), or raw values."""
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
    """Print records as JSON lines. Changes nothing, and works beside a running process."""
    with StreamView.open(data_dir) as view:
        found = view.topic(name)
        chosen = range(found.config.partitions) if partition is None else [partition]
        at = {each: _begin(view, name, each, start, since_ms) for each in chosen}
        left = sys.maxsize if limit is None else limit
        followed = False
        try:
            while left > 0:
                printed = 0
                for each in chosen:
                    try:
                        batch = view.read(
                            name,
                            each,
                            at[each],
                            max_records=min(left, APPEND_RECORDS),
                            key=None if key is None else key.encode(),
                            tag=None if tag is None else tag.encode(),
                        )
                    except OffsetOutOfRangeError as error:
                        if not followed:
                            raise
                        topic_input.tell_lost(at[each], error.earliest, each)
                        at[each] = error.earliest
                        printed = 1
                        continue
                    for record in batch.records():
                        click.echo((record.value or b"") if raw else encode_record(name, each, record))
                    left -= len(batch)
                    printed += batch.next_offset - at[each]
                    at[each] = batch.next_offset
                    if left <= 0:
                        break
                if not printed:
                    if not follow:
                        return
                    view.wait(FOLLOW_WAIT_S)
                    followed = True
        except KeyboardInterrupt:
            return


def _begin(view: StreamView, name: str, partition: int, start: str, since_ms: int | None) -> int:
    if since_ms is not None:
        return view.offset_at(name, partition, since_ms)
    info = view.info(name, partition)
    return topic_input.begin(start, info.start_offset, info.high_watermark)


@topic.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def delete(data_dir: Path, name: str, yes: bool) -> None:
    """Delete a topic with all its records and offsets. There is no way back."""
    with basaltmq.open(data_dir, create=False) as db:
        db.topic(name, create=False)
        if not yes:
            click.confirm(f"Delete topic {name} and all it holds?", abort=True)
        db.delete_topic(name)
    click.echo(f"topic {name} deleted")


@topic.command()
@topic_input.group
@click.option("--delete", "forget", is_flag=True, help="Forget the group.")
@click.pass_obj
def groups(
    data_dir: Path,
    group: str | None,
    reset: str | None,
    name: str | None,
    partition: int | None,
    forget: bool,
    as_json: bool,
) -> None:
    """Consumer groups: list them, or show one with its lag, move it, forget it."""
    if (reset is not None or forget) and group is None:
        raise click.UsageError("name the group to change")
    if reset is not None:
        if name is None:
            raise click.UsageError("--reset needs --topic")
        to = reset_to(reset)
        with basaltmq.open(data_dir, create=False) as db:
            moved = db.streams.groups.reset(str(group), name, to, partition=partition)
        show([{"partition": each, "offset": offset} for each, offset in moved.items()], as_json=as_json)
    elif forget:
        with basaltmq.open(data_dir, create=False) as db:
            db.streams.groups.delete(str(group))
        click.echo(f"group {group} forgotten")
    else:
        with StreamView.open(data_dir) as view:
            if group is None:
                rows: list[dict[str, object]] = [{"group": each} for each in view.groups()]
            else:
                rows = [msgspec.structs.asdict(each) for each in view.lag(group)]
            show(rows, as_json=as_json, empty="no groups have committed anything")


@topic.command()
@click.argument("name")
@click.argument("engine", type=engine_choice)
@click.pass_obj
def migrate(data_dir: Path, name: str, engine: str) -> None:
    """Move a topic to another engine. Offsets and groups stay as they are; can be interrupted and run again."""
    with basaltmq.open(data_dir, create=False) as db:
        line = progress_line(f"migrate {name}", "records")

        def draw(at: Progress) -> None:
            line(at.copied, at.copied + at.left)

        db.streams.migration.run(name, Engine(engine), progress=draw)
    click.echo(f"topic {name} is kept by the {engine} engine")


@topic.command("export")
@click.argument("target", type=click.File("wb"), default="-")
@click.pass_obj
def export_topics(data_dir: Path, target: BinaryIO) -> None:
    """Write topics, groups and offsets as JSON lines to TARGET (default: stdout)."""
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
        click.echo(
            f"left as they are, because they exist: {shown}{f' and {more:,} more' if more > 0 else ''}", err=True
        )
    if done.offsets_skipped:
        click.echo(f"{done.offsets_skipped:,} offsets of topics or partitions that are not here left out", err=True)
