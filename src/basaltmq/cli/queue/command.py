"""`basalt queue`: queues in a data directory.

`list`, `stats`, `peek`, `transactions` and parts of `quarantine` open a read-only view and work beside a running
process. The other commands need exclusive access to the store. Messages are read as JSON lines or raw lines. They are
printed as a table, or with `--json` as JSON lines of the same format. A lease outlives the command that made it: settle
it with `ack`, `nack` or `release` and its token, or let it expire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, Final
from uuid import UUID

import click
import msgspec

import basaltmq
from basaltmq.cli.line_batches import line_batches
from basaltmq.cli.local_or_remote import local_or_remote_group
from basaltmq.cli.options import Decorator, as_json, combine, confirm, yes_option
from basaltmq.cli.output import show
from basaltmq.cli.quarantine import quarantine_group
from basaltmq.cli.queue.branches import add_to_directory
from basaltmq.cli.queue.message_lines import decode_draft, encode_message, message_row
from basaltmq.cli.queue.remote import server_queue
from basaltmq.durability import Durability
from basaltmq.errors import BasaltError
from basaltmq.queues.config import Overflow, QueueConfig, new_config
from basaltmq.queues.draft import Draft
from basaltmq.queues.message import Message
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.open import open_view
from basaltmq.store.overlay import OverlayStore
from basaltmq.store.sync.group_commit import GroupCommit

ENQUEUE_MESSAGES: Final = 1_000
ENQUEUE_BYTES: Final = 4 << 20
"""Limits of a batch: lines and bytes read from stdin before they are enqueued."""

json_lines = click.option("--json", "as_json", is_flag=True, help="Print each message completely, as a JSON line.")
one_or_more = click.IntRange(min=1)


@click.group(cls=local_or_remote_group(server_queue))
def queue() -> None:
    """Manage queues, and enqueue, lease and inspect messages.

    Commands work on the data directory, or with --server on a running broker; see `basalt queue COMMAND --server URL
    --help`.
    """


@contextmanager
def _view(data_dir: Path) -> Iterator[QueuePlane]:
    """Open the queues read-only. Rows that recovery writes stay in memory."""
    with (
        closing(OverlayStore(open_view(data_dir))) as store,
        closing(GroupCommit(store)) as commit,
        QueuePlane(store, commit) as plane,
    ):
        yield plane


@queue.command()
@click.argument("name")
@click.option("--visibility-timeout-ms", type=int, help="Duration of a lease, in ms.  [default: 30000]")
@click.option("--attempts-max", type=int, help="Maximum deliveries of a message; 0 means no limit.  [default: 20]")
@click.option("--dead-letter-queue", metavar="NAME", help="Queue for dead letters.  [default: NAME.dlq]")
@click.option("--ttl-ms", type=int, help="Time to live of messages, in ms.  [default: unlimited]")
@click.option("--length-max", type=int, help="Maximum number of messages.  [default: unlimited]")
@click.option("--bytes-max", type=int, help="Maximum size of all messages, in bytes.  [default: unlimited]")
@click.option(
    "--overflow",
    type=click.Choice([each.value for each in Overflow]),
    help="What to do when a maximum is reached.  [default: drop-head]",
)
@click.option(
    "--expires-ms", type=int, help="Delete the queue when it is unused for this time, in ms.  [default: never]"
)
@click.option("--priorities-max", type=int, help="Highest priority; 0 means no priorities.  [default: 0]")
@click.option(
    "--durability",
    type=click.Choice([each.value for each in Durability]),
    help="When a message is confirmed.  [default: synced]",
)
@click.option("--dedup-window-ms", type=int, help="How long deduplication ids are kept, in ms.")
@click.option(
    "--on-enqueue", "on_enqueue_script", type=click.File("r"), help="Lua script that runs for each enqueued message."
)
@click.option(
    "--on-failure", "on_failure_script", type=click.File("r"), help="Lua script that runs for each failed message."
)
@click.pass_obj
def create(data_dir: Path, /, name: str, **settings: Any) -> None:
    """Create a queue, and the store if there is none."""
    given = {key: value for key, value in settings.items() if value is not None}
    for script in ("on_enqueue_script", "on_failure_script"):
        if script in given:
            given[script] = given[script].read()
    config = new_config(name, given)
    with basaltmq.open(data_dir) as db:
        db.queue_plane.create(config)
    click.echo(f"queue {name} created; fill it with: basalt queue enqueue {quote(name)}")


@queue.command("list")
@click.option("--after", default="", help="List only names after this one.")
@click.option("--limit", type=one_or_more, default=100, show_default=True, help="Maximum number of queues.")
@as_json
@click.pass_obj
def list_queues(data_dir: Path, after: str, limit: int, as_json: bool) -> None:
    """List queues with message counts. Works while another process has the store open."""
    with _view(data_dir) as plane:
        rows = [_queue_row(plane, config) for config in plane.configs(after=after, count=limit)]
        show(rows, as_json=as_json, empty="no queues; create one with: basalt queue create NAME")


def _queue_row(plane: QueuePlane, config: QueueConfig) -> dict[str, object]:
    counts = plane.stats(config.name)
    return {
        "queue": config.name,
        "ready": counts["ready"],
        "leased": counts["leased"],
        "delayed": counts["delayed"],
        "bytes": counts["size_bytes"] + counts["delayed_bytes"],
        "enqueued": counts["enqueued"],
        "acked": counts["acked"],
        "failed": counts["failed"],
        "quarantined": counts["quarantined"],
        "dead_letter_queue": config.dead_letter_queue,
    }


@queue.command()
@click.argument("name")
@as_json
@click.pass_obj
def stats(data_dir: Path, name: str, as_json: bool) -> None:
    """Show settings and counters of a queue. Works while another process has the store open."""
    with _view(data_dir) as plane:
        settings = msgspec.to_builtins(msgspec.structs.asdict(plane.get(name)))
        counts = plane.stats(name)
    del settings["name"]
    if as_json:
        show([{"queue": name, "settings": settings, "counts": counts}], as_json=True)
        return
    click.echo(f"queue {name}")
    for setting, value in sorted(settings.items()):
        click.echo(f"  {setting}: {'-' if value is None else value}")
    click.echo()
    show([{"count": count.replace("_", " "), "value": value} for count, value in counts.items()], as_json=False)


@queue.command()
@click.argument("name")
@click.option("--raw", is_flag=True, help="Treat each line as a payload instead of JSON.")
@click.option("--fairness-key", help="Fairness key of messages without one.")
@click.option("--priority", type=int, help="Priority of messages without one.")
@click.option("--ttl-ms", type=int, help="Time to live of messages without one, in ms.")
@click.option("--delay-ms", type=int, help="Delivery delay of messages without one, in ms.")
@click.option(
    "--durability",
    type=click.Choice([each.value for each in Durability]),
    help="When messages are confirmed.  [default: the queue's setting]",
)
@click.option("--file", "source", type=click.File("rb"), default="-", help="Input file.  [default: stdin]")
@click.pass_obj
def enqueue(
    data_dir: Path, /, name: str, raw: bool, durability: str | None, source: BinaryIO, **defaults: str | int | None
) -> None:
    """Enqueue one message per line of stdin.

    A line is {"payload": ..., "headers": {...}, "delay_ms": ...}, or the payload with --raw.

    An invalid line ends the command. Messages enqueued before it stay, and their number is reported.
    """
    given = {field: value for field, value in defaults.items() if value is not None}
    level = None if durability is None else Durability(durability)
    done = 0
    with basaltmq.open(data_dir, create=False) as db:
        db.queue(name, create=False)
        try:
            for lines in line_batches(source, ENQUEUE_MESSAGES, ENQUEUE_BYTES):
                batch: list[Draft | bytes] = [
                    decode_draft(number, line, given, raw=raw) for number, line in lines if raw or line.strip()
                ]
                done += len(db.queue_plane.enqueue(name, batch, durability=level))
        except (BasaltError, KeyboardInterrupt):
            click.echo(f"{_messages(done)} enqueued before this error:", err=True)
            raise
    click.echo(f"{_messages(done)} enqueued in {name}")


@queue.command()
@click.argument("name")
@click.option("--count", type=one_or_more, default=1, show_default=True, help="Maximum number of messages.")
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, help="Seconds to wait for the first message.")
@click.option("--visibility-ms", type=one_or_more, help="Duration of the lease, in ms.  [default: the queue's setting]")
@click.option("--ack", "is_done", is_flag=True, help="Acknowledge the messages after printing them.")
@json_lines
@click.pass_obj
def lease(
    data_dir: Path, name: str, count: int, wait: float, visibility_ms: int | None, is_done: bool, as_json: bool
) -> None:
    """Lease messages and print them. No other consumer gets them until the lease expires."""
    with basaltmq.open(data_dir, create=False) as db:
        found = db.queue(name, create=False)
        messages = found.lease(count, wait=wait, consumer="basalt queue lease", visibility_ms=visibility_ms)
        _print([(each.message, each.token) for each in messages], as_json, f"no ready messages in queue {name}")
        if not messages:
            return
        if is_done:
            found.ack(messages)
        elif not as_json:
            click.echo(f"\nleased; acknowledge with: basalt queue ack {name} {messages[0].token}")


@queue.command()
@click.argument("name")
@click.option("--count", type=one_or_more, default=10, show_default=True, help="Maximum number of messages.")
@json_lines
@click.pass_obj
def peek(data_dir: Path, name: str, count: int, as_json: bool) -> None:
    """Show ready messages by fairness key and age, without leases. Works while another process has the store open."""
    with _view(data_dir) as plane:
        messages = plane.browse(name, count)
        _print([(each, None) for each in messages], as_json, f"no ready messages in queue {name}")


def _print(messages: list[tuple[Message, int | None]], as_json: bool, empty: str) -> None:
    if as_json:
        for message, token in messages:
            click.echo(encode_message(message, token))
    else:
        now_ns = time.time_ns()
        show([message_row(message, now_ns) for message, _ in messages], as_json=False, empty=empty)


def _add_settle_command(command: str, summary: str, settle: Callable[..., int], *options: Decorator) -> None:
    """Add a command that settles messages of a lease."""
    done = "released" if command == "release" else command + "ed"

    @queue.command(command, help=summary)
    @click.argument("name")
    @click.argument("token", type=int)
    @click.argument("ids", nargs=-1, type=click.UUID)
    @combine(*options)
    @click.pass_obj
    def run(data_dir: Path, /, name: str, token: int, ids: tuple[UUID, ...], **given: Any) -> None:
        with basaltmq.open(data_dir, create=False) as db:
            chosen = [each.bytes for each in ids] or None
            count = settle(db.queue_plane, name, token, chosen, **given)
        click.echo(f"{_messages(count)} of queue {name} {done}")


_add_settle_command("ack", "Acknowledge messages of a lease: all, or those in IDS.", QueuePlane.ack)
_add_settle_command(
    "release", "Return messages of a lease to their position. The attempt is not counted.", QueuePlane.release
)
_add_settle_command(
    "nack",
    "Report messages of a lease as failed. They are redelivered or dead-lettered.",
    QueuePlane.nack,
    click.option("--error", default="", help="Error text, stored with the message."),
    click.option("--delay-ms", type=click.IntRange(min=0), default=0, help="Delay before the redelivery, in ms."),
    click.option("--reject", is_flag=True, help="Dead-letter the messages instead of redelivering them."),
)


@queue.command()
@click.argument("name")
@yes_option
@click.pass_obj
def purge(data_dir: Path, name: str, yes: bool) -> None:
    """Delete all ready messages. Leased and delayed messages stay."""
    with basaltmq.open(data_dir, create=False) as db:
        found = db.queue(name, create=False)
        confirm(yes, f"Delete {_messages(found.stats()['ready'])} of queue {name}?")
        click.echo(f"{_messages(found.purge())} of queue {name} deleted")


@queue.command()
@click.argument("name")
@click.option("--to", metavar="QUEUE", help="Target queue.  [default: the queue each message came from]")
@click.option("--count", type=one_or_more, help="Maximum number of messages.  [default: all]")
@click.option(
    "--rate",
    "rate_per_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Maximum rate in messages per second.  [default: unlimited]",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="Select messages with this header. Repeat for several.",
)
@click.pass_obj
def redrive(
    data_dir: Path, name: str, to: str | None, count: int | None, rate_per_s: float | None, headers: tuple[str, ...]
) -> None:
    """Move the dead letters in NAME back to their origin.

    NAME is the dead-letter queue. Attempts start at 0 again.
    """
    required = dict(_header(each) for each in headers)

    def wanted(message: Message) -> bool:
        return required.items() <= message.headers.items()

    with basaltmq.open(data_dir, create=False) as db:
        found = db.queue(name, create=False)
        moved = found.redrive(to, count=count, rate_per_s=rate_per_s, wanted=wanted if required else None)
        left = found.stats()["ready"]
    click.echo(f"{_messages(moved)} redriven from {name}; {left:,} left")


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"


def _header(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--header: expected NAME=VALUE, not {given!r}")
    return name, value


queue.add_command(quarantine_group(_view), "quarantine")
add_to_directory(queue, _view)


@queue.command()
@click.argument("name")
@click.pass_obj
def restart(data_dir: Path, name: str) -> None:
    """Reload a queue from disk and recount its messages."""
    with basaltmq.open(data_dir, create=False) as db:
        db.queue_plane.damage.restart(name)
        counts = db.queue_plane.stats(name)
    click.echo(f"queue {name} reloaded: {counts['ready']:,} ready, {counts['quarantined']:,} rows in quarantine")


@queue.command()
@click.argument("name")
@yes_option
@click.pass_obj
def delete(data_dir: Path, name: str, yes: bool) -> None:
    """Delete a queue with all its messages. This cannot be undone."""
    with basaltmq.open(data_dir, create=False) as db:
        db.queue(name, create=False)
        confirm(yes, f"Delete queue {name} and all its messages?")
        db.delete_queue(name)
    click.echo(f"queue {name} deleted")
