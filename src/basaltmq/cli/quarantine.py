"""`basalt queue quarantine`: damaged rows of queues, in a data directory or a running broker.

In a data directory, `list`, `show` and `export` also work while another process has it open.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import click
import msgspec

import basaltmq
from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json, confirm, vhost_option, yes_option
from basaltmq.cli.output import Column, show_object, show_objects, titled
from basaltmq.http_client import HttpClient, path
from basaltmq.queues.entries.quarantine import Record
from basaltmq.queues.plane import QueuePlane

PAGE: Final = 500
"""Records per page."""

of_queue = click.option("--queue", "name", help="Queue name.  [default: all queues]")
EMPTY: Final = "the quarantine is empty"
COLUMNS: Final[dict[str, Column]] = {
    **titled("id", "queue", "family"),
    "message": "message_id",
    "found": lambda each: datetime.fromtimestamp(each["found_ns"] / 1e9, UTC).isoformat(timespec="seconds"),
    "bytes": "value_bytes",
    "reason": "reason",
}

View = Callable[[Path], AbstractContextManager[QueuePlane]]


def quarantine_group(view: View) -> click.Group:
    """Return the commands for a data directory. `view` opens its queues read-only."""

    @click.group()
    def quarantine() -> None:
        """List, show, export and delete damaged rows of queues."""

    @quarantine.command("list")
    @of_queue
    @as_json
    @click.pass_obj
    def list_rows(data_dir: Path, name: str | None, as_json: bool) -> None:
        """List rows in quarantine. Works while another process has the store open."""
        with view(data_dir) as plane:
            found = [record.summary() for record in _all(plane, name)]
        show_objects(found, COLUMNS, as_json=as_json, empty=EMPTY)

    @quarantine.command("show")
    @click.argument("record_id", metavar="ID")
    @click.pass_obj
    def show_row(data_dir: Path, record_id: str) -> None:
        """Show a row with its bytes as JSON. Works while another process has the store open."""
        with view(data_dir) as plane:
            show_object(_with_bytes(plane.damage.record(record_id)))

    @quarantine.command()
    @of_queue
    @click.option("--file", "target", type=click.File("wb"), default="-", help="Output file.  [default: stdout]")
    @click.pass_obj
    def export(data_dir: Path, name: str | None, target: BinaryIO) -> None:
        """Export rows with their bytes as JSON lines. Works while another process has the store open."""
        with view(data_dir) as plane:
            for record in _all(plane, name):
                target.write(msgspec.json.encode(_with_bytes(record)) + b"\n")

    @quarantine.command()
    @click.argument("record_ids", metavar="ID...", nargs=-1, required=True)
    @yes_option
    @click.pass_obj
    def delete(data_dir: Path, record_ids: tuple[str, ...], yes: bool) -> None:
        """Delete rows permanently. Export them first if you may need them."""
        confirm(yes, f"Delete {len(record_ids)} quarantined rows permanently?")
        with basaltmq.open(data_dir, create=False) as db:
            for record_id in record_ids:
                click.echo(f"deleted: {db.queue_plane.damage.delete(record_id).line()}")

    return quarantine


def _all(plane: QueuePlane, queue: str | None) -> Iterator[Record]:
    after = ""
    while page := plane.damage.records(queue, after=after, count=PAGE):
        yield from page
        after = page[-1].id


def _with_bytes(record: Record) -> dict[str, Any]:
    return record.summary() | {"key": b64encode(record.key).decode(), "value": b64encode(record.value).decode()}


@click.group("quarantine")
def server_quarantine() -> None:
    """List, show and delete damaged rows of queues of a running broker."""


@server_quarantine.command("list")
@of_queue
@vhost_option
@as_json
@with_api
def list_of_server(api: HttpClient, name: str | None, vhost: str, as_json: bool) -> None:
    """List rows in quarantine."""
    found = api.get(path("quarantine", vhost), queue=name)
    show_objects(found, COLUMNS, as_json=as_json, empty=EMPTY)


@server_quarantine.command("show")
@click.argument("record_id", metavar="ID")
@vhost_option
@with_api
def show_of_server(api: HttpClient, record_id: str, vhost: str) -> None:
    """Show a row with its bytes as JSON."""
    show_object(api.get(path("quarantine", vhost, record_id)))


@server_quarantine.command("delete")
@click.argument("record_ids", metavar="ID...", nargs=-1, required=True)
@yes_option
@vhost_option
@with_api
def delete_of_server(api: HttpClient, record_ids: tuple[str, ...], yes: bool, vhost: str) -> None:
    """Delete rows permanently."""
    confirm(yes, f"Delete {len(record_ids)} quarantined rows permanently?")
    for record_id in record_ids:
        api.delete(path("quarantine", vhost, record_id))
    click.echo(f"{len(record_ids)} rows deleted")
