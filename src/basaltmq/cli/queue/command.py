"""`basalt queue`: queues from the command line.

`list`, `stats`, `peek` and `transactions` open a view and work beside a running process; the others need the store for
themselves. Messages go in as JSON lines (or raw ones), and out as a table or, with `--json`, as JSON lines of the same
shape. A lease outlives the command that made it: answer for it with `ack`, `nack` or `release` and its token, or let it
expire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final
from uuid import UUID

import click
import msgspec

import basaltmq
from basaltmq.cli.line_batches import portions
from basaltmq.cli.local_or_remote import either_group
from basaltmq.cli.output import show
from basaltmq.cli.quarantine import quarantine_group
from basaltmq.cli.queue.message_lines import decode_draft, encode_message, message_row
from basaltmq.cli.queue.remote import server_queue
from basaltmq.errors import BasaltError
from basaltmq.messages.branches import Xid
from basaltmq.queues.config import Durability, Overflow, QueueConfig, new_config
from basaltmq.queues.draft import Draft
from basaltmq.queues.message import Message
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.xa import parse_xid
from basaltmq.store.open import open_view
from basaltmq.store.overlay import OverlayStore
from basaltmq.store.sync.group_commit import GroupCommit

ENQUEUE_MESSAGES: Final = 1_000
ENQUEUE_BYTES: Final = 4 << 20
"""Lines, and bytes of lines, read from stdin before they are enqueued as one batch."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
json_lines = click.option("--json", "as_json", is_flag=True, help="Print a JSON line per message, all of it.")
no_question = click.option("--yes", is_flag=True, help="Do not ask.")
one_or_more = click.IntRange(min=1)


@click.group(cls=either_group(server_queue))
def queue() -> None:
    """Create, fill, look into and look after queues.

    Of the data directory, or of a running broker with --server: then `basalt queue COMMAND --server URL --help`.
    """


@contextmanager
def _view(data_dir: Path) -> Iterator[QueuePlane]:
    """The queues of this moment, to be read only: what opening them writes stays in memory."""
    with (
        closing(OverlayStore(open_view(data_dir))) as store,
        closing(GroupCommit(store)) as commit,
        QueuePlane(store, commit) as plane,
    ):
        yield plane


@queue.command()
@click.argument("name")
@click.option("--visibility-timeout-ms", type=int, help="How long a lease lasts. Default: 30 s.")
@click.option("--attempts-max", type=int, help="Deliveries before a message is given up. Default: 20. 0: no limit.")
@click.option("--dead-letter-queue", metavar="NAME", help="Where failed messages go. Default: NAME.dlq.")
@click.option("--ttl-ms", type=int, help="Messages older than this expire.")
@click.option("--length-max", type=int, help="Messages kept.")
@click.option("--bytes-max", type=int, help="Bytes kept.")
@click.option("--overflow", type=click.Choice([each.value for each in Overflow]), help="Default: drop-head.")
@click.option("--expires-ms", type=int, help="The queue goes when it is unused for so long.")
@click.option("--priorities-max", type=int, help="Priorities 0 to this one are told apart.")
@click.option("--durability", type=click.Choice([each.value for each in Durability]), help="Default: synced.")
@click.option("--dedup-window-ms", type=int, help="How long deduplication ids are remembered.")
@click.option("--on-enqueue", "on_enqueue_script", type=click.File("r"), help="A Lua script.")
@click.option("--on-failure", "on_failure_script", type=click.File("r"), help="A Lua script.")
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
    click.echo(f"queue {name} created; fill it with: basalt queue enqueue {name}")


@queue.command("list")
@click.option("--after", default="", help="Begin after this name.")
@click.option("--limit", type=one_or_more, default=100, show_default=True)
@as_json
@click.pass_obj
def list_queues(data_dir: Path, after: str, limit: int, as_json: bool) -> None:
    """List queues with what they hold. Works beside a running process."""
    with _view(data_dir) as plane:
        rows = [_queue_row(plane, config) for config in plane.configs(after=after, count=limit)]
        show(rows, as_json=as_json, empty="no queues; make one with: basalt queue create NAME")


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
@as_json
@click.pass_obj
def transactions(data_dir: Path, as_json: bool) -> None:
    """List branches of distributed transactions that wait for their outcome. Works beside a running process."""
    with _view(data_dir) as plane:
        rows = [
            {
                "xid": str(doubt.xid),
                "state": doubt.state,
                "since": datetime.fromtimestamp(doubt.since_ms / 1000, UTC).isoformat(timespec="seconds"),
                "held": doubt.held,
                "to_enqueue": doubt.enqueues,
                "queues": doubt.queues if as_json else ", ".join(doubt.queues),
            }
            for doubt in plane.xa.in_doubt()
        ]
    show(rows, as_json=as_json, empty="no branch is in doubt")


def _deciding(name: str, summary: str, done: str, decide: Callable[[QueuePlane, Xid], None], warning: str) -> None:
    """A command by which an operator settles a branch."""

    @queue.command(name, help=summary)
    @click.argument("xid")
    @no_question
    @click.pass_obj
    def run(data_dir: Path, xid: str, yes: bool) -> None:
        chosen = parse_xid(xid)
        with basaltmq.open(data_dir, create=False) as db:
            if not yes:
                click.confirm(f"{warning} Go on with branch {chosen}?", abort=True)
            decide(db.queue_plane, chosen)
        click.echo(f"branch {chosen} {done}")


_deciding(
    "commit",
    "Commit a prepared branch whose coordinator does not come. The decision is remembered.",
    "committed; its coordinator is told so when it comes, or forget it with: basalt queue forget",
    lambda plane, xid: plane.xa.decide(xid, commit=True),
    "Its coordinator may decide otherwise, and other resources with it.",
)
_deciding(
    "rollback",
    "Roll back a prepared branch whose coordinator does not come. The decision is remembered.",
    "rolled back; its coordinator is told so when it comes, or forget it with: basalt queue forget",
    lambda plane, xid: plane.xa.decide(xid, commit=False),
    "Its coordinator may decide otherwise, and other resources with it.",
)
_deciding(
    "forget",
    "Forget what was decided for a branch, once its coordinator knows.",
    "forgotten",
    lambda plane, xid: plane.xa.forget(xid),
    "Its coordinator will not hear of the decision any more.",
)


@queue.command()
@click.argument("name")
@as_json
@click.pass_obj
def stats(data_dir: Path, name: str, as_json: bool) -> None:
    """Settings and counts of a queue. Works beside a running process."""
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
@click.option("--raw", is_flag=True, help="Each line is a payload as it is, not JSON.")
@click.option("--fairness-key", help="Of every message that has none of its own.")
@click.option("--priority", type=int, help="Of every message that has none of its own.")
@click.option("--ttl-ms", type=int, help="Of every message that has none of its own.")
@click.option("--delay-ms", type=int, help="Of every message that has none of its own.")
@click.option("--durability", type=click.Choice([each.value for each in Durability]), help="Default: the queue's.")
@click.option("--file", "source", type=click.File("rb"), default="-", help="Read from a file instead of stdin.")
@click.pass_obj
def enqueue(
    data_dir: Path, /, name: str, raw: bool, durability: str | None, source: BinaryIO, **defaults: str | int | None
) -> None:
    """Enqueue messages, one per line of stdin: {"payload": ..., "headers": {...}, "delay_ms": ...} or raw.

    A line that is refused ends it; what was enqueued until then stays, and is said.
    """
    given = {field: value for field, value in defaults.items() if value is not None}
    level = None if durability is None else Durability(durability)
    done = 0
    with basaltmq.open(data_dir, create=False) as db:
        db.queue(name, create=False)
        try:
            for portion in portions(source, ENQUEUE_MESSAGES, ENQUEUE_BYTES):
                batch: list[Draft | bytes] = [
                    decode_draft(number, line, given, raw=raw) for number, line in portion if raw or line.strip()
                ]
                done += len(db.queue_plane.enqueue(name, batch, durability=level))
        except (BasaltError, KeyboardInterrupt):
            click.echo(f"{_messages(done)} enqueued before this:", err=True)
            raise
    click.echo(f"{_messages(done)} enqueued in {name}")


@queue.command()
@click.argument("name")
@click.option("--count", type=one_or_more, default=1, show_default=True)
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, help="Seconds to wait for the first.")
@click.option("--visibility-ms", type=one_or_more, help="How long they are leased. Default: the queue's.")
@click.option("--ack", "is_done", is_flag=True, help="Ack them as soon as they are printed.")
@json_lines
@click.pass_obj
def lease(
    data_dir: Path, name: str, count: int, wait: float, visibility_ms: int | None, is_done: bool, as_json: bool
) -> None:
    """Lease messages and print them. Unless acked, they are nobody else's until the lease expires."""
    with basaltmq.open(data_dir, create=False) as db:
        found = db.queue(name, create=False)
        messages = found.lease(count, wait=wait, consumer="basalt queue lease", visibility_ms=visibility_ms)
        _print([(each.message, each.token) for each in messages], as_json, f"nothing is ready in queue {name}")
        if not messages:
            return
        if is_done:
            found.ack(messages)
        elif not as_json:
            click.echo(f"\nleased; answer with: basalt queue ack {name} {messages[0].token}")


@queue.command()
@click.argument("name")
@click.option("--count", type=one_or_more, default=10, show_default=True)
@json_lines
@click.pass_obj
def peek(data_dir: Path, name: str, count: int, as_json: bool) -> None:
    """Show ready messages, by fairness key and age, and leave them. Works beside a running process."""
    with _view(data_dir) as plane:
        messages = plane.browse(name, count)
        _print([(each, None) for each in messages], as_json, f"nothing is ready in queue {name}")


def _print(messages: list[tuple[Message, int | None]], as_json: bool, empty: str) -> None:
    if as_json:
        for message, token in messages:
            click.echo(encode_message(message, token))
    else:
        now_ns = time.time_ns()
        show([message_row(message, now_ns) for message, _ in messages], as_json=False, empty=empty)


def _settling(done: str, settle: Callable[..., int]) -> Callable[..., None]:
    """A command that settles messages of a lease."""

    def run(data_dir: Path, name: str, token: int, ids: tuple[UUID, ...], **options: Any) -> None:
        with basaltmq.open(data_dir, create=False) as db:
            chosen = [each.bytes for each in ids] or None
            count = settle(db.queue_plane, name, token, chosen, **options)
        click.echo(f"{_messages(count)} of queue {name} {done}")

    return run


def _lease_arguments(command: Callable[..., None]) -> Callable[..., None]:
    ids = click.argument("ids", nargs=-1, type=click.UUID)
    return click.argument("name")(click.argument("token", type=int)(ids(click.pass_obj(command))))


queue.command("ack", help="Messages of a lease (all, or those of IDS) are done.")(
    _lease_arguments(_settling("acked", QueuePlane.ack))
)
queue.command("release", help="Messages of a lease go back to their places; no attempt is counted.")(
    _lease_arguments(_settling("released", QueuePlane.release))
)
queue.command("nack", help="Messages of a lease failed; they are tried again, or dead-lettered.")(
    click.option("--error", default="", help="What went wrong; kept with the message.")(
        click.option("--delay-ms", type=click.IntRange(min=0), default=0, help="Before they are tried again.")(
            click.option("--reject", is_flag=True, help="Do not try again.")(
                _lease_arguments(_settling("nacked", QueuePlane.nack))
            )
        )
    )
)


@queue.command()
@click.argument("name")
@no_question
@click.pass_obj
def purge(data_dir: Path, name: str, yes: bool) -> None:
    """Delete everything that is ready. Leased and delayed messages stay."""
    with basaltmq.open(data_dir, create=False) as db:
        found = db.queue(name, create=False)
        if not yes:
            click.confirm(f"Delete {_messages(found.stats()['ready'])} of queue {name}?", abort=True)
        click.echo(f"{_messages(found.purge())} of queue {name} deleted")


@queue.command()
@click.argument("name")
@click.option("--to", metavar="QUEUE", help="Default: where each came from.")
@click.option("--count", type=one_or_more, help="At most so many.")
@click.option("--rate", "rate_per_s", type=click.FloatRange(min=0, min_open=True), help="Messages per second.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Only those with this header.")
@click.pass_obj
def redrive(
    data_dir: Path, name: str, to: str | None, count: int | None, rate_per_s: float | None, headers: tuple[str, ...]
) -> None:
    """Return the dead letters in queue NAME to where they came from, attempts reset."""
    asked = dict(_header(each) for each in headers)

    def wanted(message: Message) -> bool:
        return asked.items() <= message.headers.items()

    with basaltmq.open(data_dir, create=False) as db:
        found = db.queue(name, create=False)
        moved = found.redrive(to, count=count, rate_per_s=rate_per_s, wanted=wanted if asked else None)
        left = found.stats()["ready"]
    click.echo(f"{_messages(moved)} redriven from {name}; {left:,} left")


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"


def _header(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--header takes NAME=VALUE, not {given!r}")
    return name, value


queue.add_command(quarantine_group(_view), "quarantine")


@queue.command()
@click.argument("name")
@click.pass_obj
def restart(data_dir: Path, name: str) -> None:
    """Read a queue again from disk and count its messages anew."""
    with basaltmq.open(data_dir, create=False) as db:
        db.queue_plane.damage.restart(name)
        counts = db.queue_plane.stats(name)
    click.echo(f"queue {name} read again: {counts['ready']:,} ready, {counts['quarantined']:,} rows in quarantine")


@queue.command()
@click.argument("name")
@no_question
@click.pass_obj
def delete(data_dir: Path, name: str, yes: bool) -> None:
    """Delete a queue with all its messages. There is no way back."""
    with basaltmq.open(data_dir, create=False) as db:
        db.queue(name, create=False)
        if not yes:
            click.confirm(f"Delete queue {name} and all it holds?", abort=True)
        db.delete_queue(name)
    click.echo(f"queue {name} deleted")
