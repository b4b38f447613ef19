"""`basalt definitions`: everything a broker is told to have, as one JSON file; RabbitMQ's files are taken too."""

from __future__ import annotations

from typing import Any, BinaryIO, Final

import click
import msgspec

from basaltmq.cli.api_client import ApiClient, path, with_api
from basaltmq.cli.output import show

LEFT_OUT: Final = 2
"""The exit code of an import that did not take everything."""

vhost_option = click.option("--vhost", help="Of one virtual host; else of the whole broker.")


@click.group()
def definitions() -> None:
    """Export and import users, virtual hosts, exchanges, queues, bindings and policies."""


def _where(vhost: str | None) -> str:
    return path("definitions") if vhost is None else path("definitions", vhost)


@definitions.command("export")
@click.argument("target", type=click.File("wb"), default="-")
@vhost_option
@with_api
def export_definitions(api: ApiClient, target: BinaryIO, vhost: str | None) -> None:
    """Write definitions as JSON to TARGET (default: stdout). Passwords are in it as hashes."""
    found = api.get(_where(vhost))
    target.write(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


@definitions.command("import")
@click.argument("source", type=click.File("rb"), default="-")
@vhost_option
@with_api
def import_definitions(api: ApiClient, source: BinaryIO, vhost: str | None) -> None:
    """Make what SOURCE (default: stdin) says, as exported here or by `rabbitmqctl export_definitions`.

    Exit code 2 if something was left out.
    """
    done: dict[str, Any] = api.call("POST", _where(vhost), source.read(), long=True)
    rows = [{"kind": kind, "taken": count} for kind, count in done["imported"].items()]
    show(rows, as_json=False, empty="nothing was taken")
    for line in done["skipped"]:
        click.echo(f"left out: {line}", err=True)
    if done["skipped"]:
        raise SystemExit(LEFT_OUT)
