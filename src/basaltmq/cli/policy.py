"""`basalt policy`: settings for all queues or exchanges whose name matches a pattern."""

from __future__ import annotations

import click

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.exchange import json_object
from basaltmq.cli.options import as_json, vhost_option
from basaltmq.cli.output import Column, compact_json, show_objects
from basaltmq.http_client import HttpClient, path


@click.group()
def policy() -> None:
    """Manage policies of a running broker."""


@policy.command("list")
@vhost_option
@as_json
@with_api
def list_policies(api: HttpClient, vhost: str, as_json: bool) -> None:
    """List policies. If several match a name, the one with the highest priority applies."""
    columns: dict[str, Column] = {
        "policy": "name",
        "pattern": "pattern",
        "applies to": "apply-to",
        "priority": "priority",
        "definition": lambda each: compact_json(each["definition"]),
    }
    found = list(api.pages(path("policies", vhost)))
    show_objects(found, columns, as_json=as_json, empty=f"no policies in vhost {vhost}")


@policy.command("set")
@click.argument("name")
@click.argument("pattern")
@click.argument("definition", metavar="JSON")
@click.option("--priority", type=int, default=0, show_default=True, help="The highest priority wins.")
@click.option(
    "--apply-to",
    type=click.Choice(["all", "queues", "exchanges", "classic_queues", "streams"]),
    default="all",
    show_default=True,
    help="Kind of objects.",
)
@vhost_option
@with_api
def set_policy(
    api: HttpClient, name: str, pattern: str, definition: str, priority: int, apply_to: str, vhost: str
) -> None:
    """Create or change a policy.

    Example: basalt policy set short '^tmp[.]' '{"message-ttl": 60000}'
    """
    body = {"pattern": pattern, "definition": json_object("JSON", definition), "priority": priority}
    api.put(path("policies", vhost, name), {**body, "apply-to": apply_to})
    click.echo(f"policy {name} applies to names that match {pattern}")


@policy.command()
@click.argument("name")
@vhost_option
@with_api
def delete(api: HttpClient, name: str, vhost: str) -> None:
    """Delete a policy."""
    api.delete(path("policies", vhost, name))
    click.echo(f"policy {name} deleted")
