"""`basalt connection`: connections, channels and consumers of a running broker."""

from __future__ import annotations

import click

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json
from basaltmq.cli.output import Column, show_objects, titled
from basaltmq.http_client import HttpClient, path


@click.group()
def connection() -> None:
    """Manage connections, channels and consumers of a broker."""


@connection.command("list")
@as_json
@with_api
def list_connections(api: HttpClient, as_json: bool) -> None:
    """List connections."""
    columns: dict[str, Column] = {
        "connection": "name",
        **titled("user", "vhost", "protocol", "state", "channels"),
        "client": lambda each: (each.get("client_properties") or {}).get("product"),
    }
    show_objects(list(api.pages(path("connections"))), columns, as_json=as_json, empty="no connections")


@connection.command()
@as_json
@with_api
def channels(api: HttpClient, as_json: bool) -> None:
    """List channels."""
    columns = titled("name", "user", "vhost", "consumer_count", "messages_unacknowledged", "messages_unconfirmed")
    columns |= titled("prefetch_count", "confirm", "transactional")
    show_objects(list(api.pages(path("channels"))), columns, as_json=as_json, empty="no channels")


@connection.command()
@as_json
@with_api
def consumers(api: HttpClient, as_json: bool) -> None:
    """List consumers."""
    columns: dict[str, Column] = {
        "queue": lambda each: each["queue"]["name"],
        "vhost": lambda each: each["queue"]["vhost"],
        "tag": "consumer_tag",
        "channel": lambda each: (each.get("channel_details") or {}).get("name"),
        **titled("ack_required", "exclusive", "active", "prefetch_count"),
    }
    show_objects(list(api.pages(path("consumers"))), columns, as_json=as_json, empty="no consumers")


@connection.command()
@click.argument("name")
@click.option("--reason", default="closed by the operator", show_default=True, help="Reason that the client receives.")
@with_api
def close(api: HttpClient, name: str, reason: str) -> None:
    """Close the connection NAME. `list` shows the names."""
    api.delete(path("connections", name), reason=reason)
    click.echo(f"connection {name} closed")
