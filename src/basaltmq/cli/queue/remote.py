"""`basalt queue ... --server URL`: queues of a running broker."""

from __future__ import annotations

from shlex import quote
from typing import Any

import click
import msgspec

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.exchange import json_object
from basaltmq.cli.options import as_json, confirm, vhost_option, yes_option
from basaltmq.cli.output import Column, Row, show, show_objects, titled
from basaltmq.cli.quarantine import server_quarantine
from basaltmq.cli.queue.branches import add_to_server
from basaltmq.cli.queue.message_lines import preview
from basaltmq.http_client import HttpClient, path


@click.group()
def server_queue() -> None:
    """Manage queues of a running broker."""


@server_queue.command("list")
@vhost_option
@click.option("--all", "everywhere", is_flag=True, help="List queues of all virtual hosts that this user may access.")
@as_json
@with_api
def list_queues(api: HttpClient, vhost: str, everywhere: bool, as_json: bool) -> None:
    """List queues with message counts."""
    found = list(api.pages(path("queues") if everywhere else path("queues", vhost)))
    columns: dict[str, Column] = {
        **(titled("vhost") if everywhere else {}),
        "queue": "name",
        "type": "type",
        "ready": "messages_ready",
        "unacked": "messages_unacknowledged",
        "bytes": "message_bytes",
        **titled("consumers", "durable", "policy", "state"),
        "quarantined": lambda each: each.get("quarantined", 0),
    }
    empty = "no queues; create one with: basalt queue create NAME --server URL"
    show_objects(found, columns, as_json=as_json, empty=empty)


@server_queue.command()
@click.argument("name")
@vhost_option
@as_json
@with_api
def stats(api: HttpClient, name: str, vhost: str, as_json: bool) -> None:
    """Show settings and counters of a queue."""
    found: dict[str, Any] = api.get(path("queues", vhost, name))
    if as_json:
        show([found], as_json=True)
        return
    click.echo(f"queue {name} in vhost {vhost}")
    for field, value in found.items():
        if field not in {"name", "vhost", "message_stats"}:
            shown = value if isinstance(value, str | int | float | bool | None) else msgspec.json.encode(value).decode()
            click.echo(f"  {field}: {'-' if shown is None else shown}")
    counts = found.get("message_stats") or {}
    if counts:
        click.echo()
        show(
            [
                {
                    "count": count.replace("_", " "),
                    "value": value,
                    "per second": counts.get(f"{count}_details", {}).get("rate"),
                }
                for count, value in counts.items()
                if not count.endswith("_details")
            ],
            as_json=False,
        )


@server_queue.command("create")
@click.argument("name")
@click.option("--transient", is_flag=True, help="Delete it at the next restart.")
@click.option("--auto-delete", is_flag=True, help="Delete it with its last consumer.")
@click.option(
    "--arguments", default="{}", metavar="JSON", help='Arguments as a JSON object, such as {"x-message-ttl": 60000}.'
)
@vhost_option
@with_api
def create(api: HttpClient, name: str, transient: bool, auto_delete: bool, arguments: str, vhost: str) -> None:
    """Create a queue. Fails if one with this name and other settings exists."""
    body = {"durable": not transient, "auto_delete": auto_delete, "arguments": json_object("--arguments", arguments)}
    api.put(path("queues", vhost, name), body)
    click.echo(f"queue {name} created; publish to it with: basalt exchange publish '' --key {quote(name)} 'hello'")


@server_queue.command()
@click.argument("name")
@click.option(
    "--count", type=click.IntRange(1, 1000), default=10, show_default=True, help="Maximum number of messages."
)
@vhost_option
@as_json
@with_api
def peek(api: HttpClient, name: str, count: int, vhost: str, as_json: bool) -> None:
    """Show ready messages without changing them."""
    body = {"count": count, "ackmode": "peek", "encoding": "auto"}
    found = api.post(path("queues", vhost, name, "get"), body)
    if as_json:
        for each in found:
            click.echo(msgspec.json.encode(each))
        return
    columns: dict[str, Column] = {
        "exchange": lambda each: each["exchange"] or "(default)",
        "key": "routing_key",
        "redelivered": "redelivered",
        "bytes": "payload_bytes",
        "payload": _payload,
    }
    show_objects(found, columns, as_json=False, empty=f"no ready messages in queue {name}")


def _payload(message: Row) -> str:
    return preview(message["payload"].encode()) if message["payload_encoding"] == "string" else "(base64)"


@server_queue.command()
@click.argument("name")
@yes_option
@vhost_option
@with_api
def purge(api: HttpClient, name: str, yes: bool, vhost: str) -> None:
    """Delete all ready messages. Messages that consumers hold stay."""
    ready = api.get(path("queues", vhost, name))["messages_ready"]
    confirm(yes, f"Delete {ready:,} messages of queue {name}?")
    api.delete(path("queues", vhost, name, "contents"))
    click.echo(f"queue {name} purged")


@server_queue.command()
@click.argument("name")
@click.argument("target")
@click.option("--count", type=click.IntRange(min=1), help="Maximum number of messages.  [default: all]")
@vhost_option
@with_api
def move(api: HttpClient, name: str, target: str, count: int | None, vhost: str) -> None:
    """Move ready messages to queue TARGET of the same virtual host. A crash neither loses nor duplicates one."""
    moved = api.post(path("queues", vhost, name, "move"), {"destination": target, "count": count}, long=True)["moved"]
    click.echo(f"{moved:,} {'message' if moved == 1 else 'messages'} moved from {name} to {target}")


server_queue.add_command(server_quarantine)
add_to_server(server_queue)


@server_queue.command()
@click.argument("name")
@vhost_option
@with_api
def restart(api: HttpClient, name: str, vhost: str) -> None:
    """Reload a queue from disk, and start it if it is down. Transient messages are lost."""
    api.post(path("queues", vhost, name, "restart"), long=True)
    click.echo(f"queue {name} restarted")


@server_queue.command()
@click.argument("name")
@click.option("--if-unused", is_flag=True, help="Fail if it has consumers.")
@click.option("--if-empty", is_flag=True, help="Fail if it has messages.")
@yes_option
@vhost_option
@with_api
def delete(api: HttpClient, name: str, if_unused: bool, if_empty: bool, yes: bool, vhost: str) -> None:
    """Delete a queue with all its messages. This cannot be undone."""
    confirm(yes, f"Delete queue {name} and all its messages?")
    api.delete(
        path("queues", vhost, name),
        **{"if-unused": "true" if if_unused else None, "if-empty": "true" if if_empty else None},
    )
    click.echo(f"queue {name} deleted")
