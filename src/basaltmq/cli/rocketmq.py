"""`basalt rocketmq`: subscription groups and access keys of a running broker."""

from __future__ import annotations

from typing import Any

import click

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json, confirm, vhost_option, yes_option
from basaltmq.cli.output import show_objects, titled
from basaltmq.http_client import HttpClient, path


@click.group()
def rocketmq() -> None:
    """Manage groups and access keys of RocketMQ clients.

    `basalt topic` manages topics; `basalt topic create --message-type FIFO` sets what clients may send.
    """


@rocketmq.command("access-key")
@click.argument("name", metavar="USER")
@as_json
@with_api
def access_key(api: HttpClient, name: str, as_json: bool) -> None:
    """Show the access key and the secret of USER. A new password changes the secret."""
    found = api.get(path("users", name, "access-key"))
    show_objects([found], titled("access_key", "secret"), as_json=as_json)


@rocketmq.group()
def group() -> None:
    """Manage subscription groups."""


@group.command("list")
@vhost_option
@as_json
@with_api
def list_groups(api: HttpClient, vhost: str, as_json: bool) -> None:
    """List subscription groups."""
    found = []
    after = ""
    while page := api.get(path("subscription-groups", vhost), after=after):
        found += page
        after = page[-1]["name"]
    show_objects(found, titled("name", "ordered", "max_attempts"), as_json=as_json, empty="no subscription groups")


@group.command("set")
@click.argument("name")
@click.option("--ordered/--concurrent", default=False, show_default=True, help="Process message groups in order.")
@click.option(
    "--max-attempts", type=int, default=17, show_default=True, help="Deliveries before the dead-letter topic."
)
@click.option(
    "--backoff-s", type=int, multiple=True, help="Delay before a redelivery, in seconds; once for each attempt."
)
@vhost_option
@with_api
def set_group(
    api: HttpClient, name: str, ordered: bool, max_attempts: int, backoff_s: tuple[int, ...], vhost: str
) -> None:
    """Create a subscription group, or replace its settings."""
    config: dict[str, Any] = {"ordered": ordered, "max_attempts": max_attempts}
    if backoff_s:
        config["backoff_s"] = backoff_s
    api.put(path("subscription-groups", vhost, name), config)
    click.echo(f"subscription group {name} is set")


@group.command("delete")
@click.argument("name")
@yes_option
@vhost_option
@with_api
def delete_group(api: HttpClient, name: str, yes: bool, vhost: str) -> None:
    """Delete the settings of a subscription group. Its offsets stay."""
    confirm(yes, f"Delete the settings of subscription group {name}?")
    api.delete(path("subscription-groups", vhost, name))
    click.echo(f"subscription group {name} deleted")
