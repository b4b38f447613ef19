"""`basalt connection`: connections, channels and consumers of a running broker."""

from __future__ import annotations

from typing import Any

import click

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json
from basaltmq.cli.output import show
from basaltmq.http_client import HttpClient, path


@click.group()
def connection() -> None:
    """Manage connections, channels and consumers of a broker."""


@connection.command("list")
@as_json
@with_api
def list_connections(api: HttpClient, as_json: bool) -> None:
    """List connections."""
    found = list(api.pages(path("connections")))
    rows = [
        {
            "connection": each["name"],
            "user": each.get("user"),
            "vhost": each.get("vhost"),
            "protocol": each.get("protocol"),
            "state": each.get("state"),
            "channels": each.get("channels"),
            "client": (each.get("client_properties") or {}).get("product"),
        }
        for each in found
    ]
    show(found if as_json else rows, as_json=as_json, empty="no connections")


@connection.command()
@as_json
@with_api
def channels(api: HttpClient, as_json: bool) -> None:
    """List channels."""
    found = list(api.pages(path("channels")))
    wanted = ("name", "user", "vhost", "consumer_count", "messages_unacknowledged", "messages_unconfirmed")
    rows = [_some(each, (*wanted, "prefetch_count", "confirm", "transactional")) for each in found]
    show(found if as_json else rows, as_json=as_json, empty="no channels")


@connection.command()
@as_json
@with_api
def consumers(api: HttpClient, as_json: bool) -> None:
    """List consumers."""
    found = list(api.pages(path("consumers")))
    rows = [
        {
            "queue": each["queue"]["name"],
            "vhost": each["queue"]["vhost"],
            "tag": each["consumer_tag"],
            "channel": (each.get("channel_details") or {}).get("name"),
            **_some(each, ("ack_required", "exclusive", "active", "prefetch_count")),
        }
        for each in found
    ]
    show(found if as_json else rows, as_json=as_json, empty="no consumers")


def _some(each: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field.replace("_", " "): each.get(field) for field in fields}


@connection.command()
@click.argument("name")
@click.option("--reason", default="closed by the operator", show_default=True, help="Reason that the client receives.")
@with_api
def close(api: HttpClient, name: str, reason: str) -> None:
    """Close the connection NAME. `list` shows the names."""
    api.delete(path("connections", name), reason=reason)
    click.echo(f"connection {name} closed")
