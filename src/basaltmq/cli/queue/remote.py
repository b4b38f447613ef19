"""`basalt queue ... --server URL`: the same words for queues of a running broker.

`either` chooses between these and those of `queue`.
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from basaltmq.cli.exchange import json_object
from basaltmq.cli.output import show
from basaltmq.cli.quarantine import server_quarantine
from basaltmq.cli.queue.message_lines import preview
from basaltmq.http_client import ApiClient, path, with_api

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
no_question = click.option("--yes", is_flag=True, help="Do not ask.")
vhost_option = click.option("--vhost", default="/", show_default=True)


@click.group()
def server_queue() -> None:
    """Queues of a running broker."""


@server_queue.command("list")
@vhost_option
@click.option("--all", "everywhere", is_flag=True, help="Of every virtual host you may see.")
@as_json
@with_api
def list_queues(api: ApiClient, vhost: str, everywhere: bool, as_json: bool) -> None:
    """List queues of a broker with what they hold."""
    found = list(api.pages(path("queues") if everywhere else path("queues", vhost)))
    rows = [
        {
            **({"vhost": each["vhost"]} if everywhere else {}),
            "queue": each["name"],
            "type": each["type"],
            "ready": each["messages_ready"],
            "unacked": each["messages_unacknowledged"],
            "bytes": each.get("message_bytes"),
            "consumers": each["consumers"],
            "durable": each["durable"],
            "policy": each.get("policy"),
            "state": each.get("state"),
            "quarantined": each.get("quarantined", 0),
        }
        for each in found
    ]
    show(
        found if as_json else rows,
        as_json=as_json,
        empty="no queues; make one with: basalt queue create NAME --server",
    )


@server_queue.command()
@click.argument("name")
@vhost_option
@as_json
@with_api
def stats(api: ApiClient, name: str, vhost: str, as_json: bool) -> None:
    """Settings and counts of a queue."""
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
@click.option("--transient", is_flag=True, help="Gone at the next restart.")
@click.option("--auto-delete", is_flag=True, help="Goes with its last consumer.")
@click.option("--arguments", default="{}", metavar="JSON", help='Such as {"x-message-ttl": 60000}.')
@vhost_option
@with_api
def create(api: ApiClient, name: str, transient: bool, auto_delete: bool, arguments: str, vhost: str) -> None:
    """Make a queue at a broker; fails if there is another one of the name."""
    body = {"durable": not transient, "auto_delete": auto_delete, "arguments": json_object("--arguments", arguments)}
    api.put(path("queues", vhost, name), body)
    click.echo(f"queue {name} is there; publish to it with: basalt exchange publish '' --key {name} 'hello'")


@server_queue.command()
@click.argument("name")
@click.option("--count", type=click.IntRange(1, 1000), default=10, show_default=True)
@vhost_option
@as_json
@with_api
def peek(api: ApiClient, name: str, count: int, vhost: str, as_json: bool) -> None:
    """Show messages that are ready, and leave them exactly as they are."""
    body = {"count": count, "ackmode": "ack_requeue_true", "encoding": "auto"}
    found = api.post(path("queues", vhost, name, "get"), body)
    if as_json:
        for each in found:
            click.echo(msgspec.json.encode(each))
        return
    rows = [
        {
            "exchange": each["exchange"] or "(default)",
            "key": each["routing_key"],
            "redelivered": each["redelivered"],
            "bytes": each["payload_bytes"],
            "payload": preview(each["payload"].encode()) if each["payload_encoding"] == "string" else "(base64)",
        }
        for each in found
    ]
    show(rows, as_json=False, empty=f"nothing is ready in queue {name}")


@server_queue.command()
@click.argument("name")
@no_question
@vhost_option
@with_api
def purge(api: ApiClient, name: str, yes: bool, vhost: str) -> None:
    """Delete everything that is ready. What consumers hold stays."""
    ready = api.get(path("queues", vhost, name))["messages_ready"]
    if not yes:
        click.confirm(f"Delete {ready:,} messages of queue {name}?", abort=True)
    api.delete(path("queues", vhost, name, "contents"))
    click.echo(f"queue {name} purged")


@server_queue.command()
@click.argument("name")
@click.argument("target")
@click.option("--count", type=click.IntRange(min=1), help="At most so many.")
@vhost_option
@with_api
def move(api: ApiClient, name: str, target: str, count: int | None, vhost: str) -> None:
    """Move ready messages to queue TARGET of the same virtual host; none is lost or doubled by a crash."""
    moved = api.post(path("queues", vhost, name, "move"), {"destination": target, "count": count}, long=True)["moved"]
    click.echo(f"{moved:,} {'message' if moved == 1 else 'messages'} moved from {name} to {target}")


server_queue.add_command(server_quarantine)


@server_queue.command()
@click.argument("name")
@vhost_option
@with_api
def restart(api: ApiClient, name: str, vhost: str) -> None:
    """Read a queue again from disk, and serve it if it was down. Transient messages are lost."""
    api.post(path("queues", vhost, name, "restart"), long=True)
    click.echo(f"queue {name} restarted")


@server_queue.command()
@click.argument("name")
@click.option("--if-unused", is_flag=True)
@click.option("--if-empty", is_flag=True)
@no_question
@vhost_option
@with_api
def delete(api: ApiClient, name: str, if_unused: bool, if_empty: bool, yes: bool, vhost: str) -> None:
    """Delete a queue with all its messages. There is no way back."""
    if not yes:
        click.confirm(f"Delete queue {name} and all it holds?", abort=True)
    api.delete(
        path("queues", vhost, name),
        **{"if-unused": "true" if if_unused else None, "if-empty": "true" if if_empty else None},
    )
    click.echo(f"queue {name} deleted")
