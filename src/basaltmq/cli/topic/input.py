"""What people type and pipe into `basalt topic`, of a store or of a broker: flags, lines of records, places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final, TypeAlias

import click

from basaltmq.cli.line_batches import portions
from basaltmq.durability import Durability
from basaltmq.log.batches.record import Record
from basaltmq.streams.groups import Reset
from basaltmq.streams.imports.record_lines import decode_record

APPEND_RECORDS: Final = 1_000
APPEND_BYTES: Final = 4 << 20
"""Lines, and bytes of lines, read from stdin before they are appended as one batch."""

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def _together(*options: Decorator) -> Decorator:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_LEVELS: Final = click.Choice([each.value for each in Durability])

as_json: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

settings: Final = _together(
    click.option("--partitions", type=int, default=1, show_default=True),
    click.option("--durability", type=_LEVELS, help="Default: synced."),
    click.option("--retention-ms", type=int, help="Records older than this go."),
    click.option("--retention-bytes", type=int, help="Per partition; the oldest go."),
    click.option("--retention-records", type=int, help="Per partition; the oldest go."),
    click.option("--compact", is_flag=True, help="Keep the latest record per key."),
)
page: Final = _together(
    click.option("--after", help="Begin after this name."),
    click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True),
    as_json,
)
source: Final = _together(
    click.option("--partition", type=int, help="Default: by key, or in turn."),
    click.option("--key", help="The key of every record that has none of its own."),
    click.option("--raw", is_flag=True, help="Each line is a value as it is, not JSON."),
    click.option("--durability", type=_LEVELS, help="Default: the topic's."),
    click.option("--file", "source", type=click.File("rb"), default="-", help="Read from a file instead of stdin."),
)
search: Final = _together(
    click.option("--partition", type=int, help="One partition; all of them in turn if not given."),
    click.option("--from", "start", default="earliest", show_default=True, help="An offset, earliest or latest."),
    click.option("--since-ms", type=int, help="Begin at this time (milliseconds since 1970) instead."),
    click.option("--limit", type=click.IntRange(min=0), help="Stop after this many records."),
    click.option("--key", help="Only records of this key."),
    click.option("--tag", help="Only records with this tag."),
    click.option("--follow", is_flag=True, help="Go on as records come, from anybody; stop with Ctrl-C."),
    click.option("--raw", is_flag=True, help="Print values only, one per line."),
)
group: Final = _together(
    click.argument("group", required=False),
    click.option("--reset", metavar="TO", help="Move the group: earliest, latest or an offset. Needs --topic."),
    click.option("--topic", "name", help="The topic to reset the group in."),
    click.option("--partition", type=int, help="One partition; all if not given."),
    as_json,
)


def batches(source: BinaryIO, raw: bool, key: str | None) -> Iterator[list[Record]]:
    """The records of a source, a batch at a time; empty lines are none."""
    for portion in portions(source, APPEND_RECORDS, APPEND_BYTES):
        stripped = ((number, line.rstrip(b"\r")) for number, line in portion)
        batch = [decode_record(number, line, raw=raw, key=key) for number, line in stripped if line]
        if batch:
            yield batch


def begin(start: str, first: int, end: int) -> int:
    """The offset that `--from` means in a partition."""
    if start == "earliest":
        return first
    if start == "latest":
        return end
    if not start.isdigit():
        raise click.UsageError(f"--from takes an offset, earliest or latest, not {start!r}")
    return int(start)


def tell_lost(at: int, earliest: int, partition: int) -> None:
    """Tell one that follows what it missed."""
    lost = f"offsets {at} to {earliest - 1} of partition {partition}"
    click.echo(f"{lost} went by retention before they were read", err=True)


def reset_to(text: str) -> Reset | int:
    if text.isdigit():
        return int(text)
    if text in (Reset.EARLIEST, Reset.LATEST):
        return Reset(text)
    raise click.UsageError(f"--reset takes earliest, latest or an offset, not {text!r}")
