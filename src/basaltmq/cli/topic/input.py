"""Options and input of `basalt topic`, shared by the commands for a data directory and for a broker."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO, Final, Protocol

import click

from basaltmq.cli.line_batches import line_batches
from basaltmq.cli.options import as_json, combine
from basaltmq.durability import Durability
from basaltmq.errors import BasaltError, OffsetOutOfRangeError
from basaltmq.log.batches.record import Record
from basaltmq.streams.groups import Reset
from basaltmq.streams.imports.record_lines import decode_record
from basaltmq.streams.shards import MessageType

APPEND_RECORDS: Final = 1_000
APPEND_BYTES: Final = 4 << 20
"""Limits of a batch: lines and bytes read from stdin before they are appended."""

REFUSED_SHOWN_MAX: Final = 10
"""Refused topics that `create` names."""


_LEVELS: Final = click.Choice([each.value for each in Durability])


_TYPES: Final = click.Choice([each.value for each in MessageType])
names: Final = click.argument("names", nargs=-1, required=True, metavar="NAME...")
settings: Final = combine(
    click.option("--partitions", type=int, default=1, show_default=True, help="Number of partitions."),
    click.option("--durability", type=_LEVELS, help="When a record is confirmed.  [default: synced]"),
    click.option("--retention-ms", type=int, help="Delete records older than this, in ms.  [default: unlimited]"),
    click.option("--retention-bytes", type=int, help="Maximum bytes per partition; the oldest records are deleted."),
    click.option("--retention-records", type=int, help="Maximum records per partition; the oldest are deleted."),
    click.option("--message-type", type=_TYPES, help="What RocketMQ clients may send.  [default: every type]"),
    click.option("--compact", is_flag=True, help="Compact: keep the latest record per key."),
)
page: Final = combine(
    click.option("--after", help="List only names after this one."),
    click.option(
        "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Maximum number of topics."
    ),
    as_json,
)
source: Final = combine(
    click.option("--partition", type=int, help="Partition of all records.  [default: by key, or round-robin]"),
    click.option("--key", help="Key of records without one."),
    click.option("--raw", is_flag=True, help="Treat each line as a value instead of JSON."),
    click.option("--durability", type=_LEVELS, help="When records are confirmed.  [default: the topic's setting]"),
    click.option("--file", "source", type=click.File("rb"), default="-", help="Input file.  [default: stdin]"),
)
search: Final = combine(
    click.option("--partition", type=int, help="Partition.  [default: all]"),
    click.option(
        "--from", "start", default="earliest", show_default=True, help="First offset: a number, earliest or latest."
    ),
    click.option("--since-ms", type=int, help="Start at this time instead, in milliseconds since 1970."),
    click.option("--limit", type=click.IntRange(min=0), help="Maximum number of records.  [default: all]"),
    click.option("--key", help="Only records with this key."),
    click.option("--tag", help="Only records with this tag."),
    click.option("--follow", is_flag=True, help="Wait for new records; stop with Ctrl-C."),
    click.option("--raw", is_flag=True, help="Print only the values, one per line."),
)
group: Final = combine(
    click.argument("group", required=False),
    click.option(
        "--reset",
        metavar="TO",
        help="Set the group's offsets: earliest, latest, a number, or time:MS, the first record at or after a time in "
        "milliseconds since 1970. Requires --topic.",
    ),
    click.option("--topic", "name", help="Topic to reset the group in."),
    click.option("--partition", type=int, help="Partition.  [default: all]"),
    as_json,
)


def batches(source: BinaryIO, raw: bool, key: str | None) -> Iterator[list[Record]]:
    """Yield the records of a source in batches. Empty lines are skipped."""
    for lines in line_batches(source, APPEND_RECORDS, APPEND_BYTES):
        stripped = ((number, line.rstrip(b"\r")) for number, line in lines)
        batch = [decode_record(number, line, raw=raw, key=key) for number, line in stripped if line]
        if batch:
            yield batch


def begin(start: str, first: int, end: int) -> int:
    """Return the offset that `--from` selects in a partition."""
    if start == "earliest":
        return first
    if start == "latest":
        return end
    if not start.isdigit():
        raise click.UsageError(f"--from: expected an offset, earliest or latest, not {start!r}")
    return int(start)


class RecordSource(Protocol):
    """Reads one topic, from a data directory or a broker."""

    def read(self, partition: int, offset: int, limit: int) -> tuple[list[bytes], int]:
        """Return at most `limit` records as lines of output, and the next offset."""

    def first_offset(self, partition: int) -> int: ...

    def wait(self) -> None:
        """Wait for new records, for a limited time."""


def print_records(source: RecordSource, at: dict[int, int], limit: int | None, *, follow: bool) -> None:
    """Print the records of partitions from the offsets `at`. With `follow`, wait for new records until Ctrl-C."""
    left = sys.maxsize if limit is None else limit
    has_waited = False
    with suppress(KeyboardInterrupt):
        while left > 0:
            has_moved = False
            for partition, offset in at.items():
                try:
                    lines, at[partition] = source.read(partition, offset, left)
                except BasaltError as error:
                    if not has_waited or error.code != OffsetOutOfRangeError.code:
                        raise
                    lines, at[partition] = [], source.first_offset(partition)
                    lost = f"offsets {offset} to {at[partition] - 1} of partition {partition}"
                    click.echo(f"{lost} were deleted by retention before they were read", err=True)
                for line in lines:
                    click.echo(line)
                left -= len(lines)
                has_moved |= at[partition] > offset
                if left <= 0:
                    return
            if not has_moved:
                if not follow:
                    return
                source.wait()
                has_waited = True


def reset_to(text: str) -> tuple[Reset | int, int | None]:
    """Return where to reset a group to, and a time in milliseconds which decides instead if there is one."""
    if text.isdigit():
        return int(text), None
    if text in (Reset.EARLIEST, Reset.LATEST):
        return Reset(text), None
    kind, _, time_ms = text.partition(":")
    if kind == "time" and time_ms.isdigit():
        return Reset.LATEST, int(time_ms)
    raise click.UsageError(f"--reset: expected earliest, latest, an offset or time:MS, not {text!r}")


def report_created(names: Sequence[str], refused: Sequence[BasaltError], append: str) -> None:
    """Print what `topic create` did. Raise the error of the first topic that was refused."""
    for each in refused[1:REFUSED_SHOWN_MAX]:
        click.echo(f"not created: {each}", err=True)
    if len(refused) > REFUSED_SHOWN_MAX:
        click.echo(f"not created: {len(refused) - REFUSED_SHOWN_MAX:,} more", err=True)
    if len(names) == 1 and not refused:
        click.echo(f"topic {names[0]} created; append records with: {append}")
    elif len(names) > 1:
        click.echo(f"{len(names) - len(refused):,} topics created")
    if refused:
        raise refused[0]
