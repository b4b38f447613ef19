"""`basalt policy`: settings for every queue or exchange whose name fits a pattern."""

from __future__ import annotations

import click
import msgspec

from basaltmq.cli.exchange import json_object
from basaltmq.cli.output import show
from basaltmq.http_client import ApiClient, path, with_api

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
vhost_option = click.option("--vhost", default="/", show_default=True)


@click.group()
def policy() -> None:
    """Policies of a running broker."""


@policy.command("list")
@vhost_option
@as_json
@with_api
def list_policies(api: ApiClient, vhost: str, as_json: bool) -> None:
    """List policies; of several that fit a name the one of the highest priority holds."""
    found = list(api.pages(path("policies", vhost)))
    rows = [
        {
            "policy": each["name"],
            "pattern": each["pattern"],
            "applies to": each["apply-to"],
            "priority": each["priority"],
            "definition": msgspec.json.encode(each["definition"]).decode(),
        }
        for each in found
    ]
    show(found if as_json else rows, as_json=as_json, empty=f"no policies in vhost {vhost}")


@policy.command("set")
@click.argument("name")
@click.argument("pattern")
@click.argument("definition", metavar="JSON")
@click.option("--priority", type=int, default=0, show_default=True)
@click.option(
    "--apply-to", type=click.Choice(["all", "queues", "exchanges", "classic_queues", "streams"]), default="all"
)
@vhost_option
@with_api
def set_policy(
    api: ApiClient, name: str, pattern: str, definition: str, priority: int, apply_to: str, vhost: str
) -> None:
    """Make or change a policy: basalt policy set short '^tmp[.]' '{"message-ttl": 60000}'"""
    body = {"pattern": pattern, "definition": json_object("JSON", definition), "priority": priority}
    api.put(path("policies", vhost, name), {**body, "apply-to": apply_to})
    click.echo(f"policy {name} holds for names that fit {pattern}")


@policy.command()
@click.argument("name")
@vhost_option
@with_api
def delete(api: ApiClient, name: str, vhost: str) -> None:
    """Delete a policy."""
    api.delete(path("policies", vhost, name))
    click.echo(f"policy {name} deleted")
