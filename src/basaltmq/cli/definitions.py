"""`basalt definitions`: everything a broker is told to have, as one JSON file; RabbitMQ's files are taken too."""

from __future__ import annotations

import os
import stat
from typing import Any, BinaryIO, Final

import click
import msgspec

from basaltmq.cli.output import show
from basaltmq.http_client import ApiClient, path, with_api

LEFT_OUT: Final = 2
"""The exit code of an import that did not take everything."""

vhost_option = click.option("--vhost", help="Of one virtual host; else of the whole broker.")


@click.group()
def definitions() -> None:
    """Export and import users, virtual hosts, exchanges, queues, bindings and policies."""


def _where(vhost: str | None) -> str:
    return path("definitions") if vhost is None else path("definitions", vhost)


@definitions.command("export")
@click.argument("target", type=click.Path(dir_okay=False, allow_dash=True), default="-")
@vhost_option
@with_api
def export_definitions(api: ApiClient, target: str, vhost: str | None) -> None:
    """Write definitions as JSON to TARGET (default: stdout). It holds hashes of passwords: its mode is 0600."""
    found = api.get(_where(vhost))
    text = msgspec.json.format(msgspec.json.encode(found)) + b"\n"
    if target == "-":
        click.echo(text, nl=False)
        return
    try:
        _write_private(target, text)
    except OSError as error:
        raise click.FileError(target, error.strerror or str(error)) from None


def _write_private(target: str, data: bytes) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            # One that was there before may have been readable by others.
            os.fchmod(descriptor, 0o600)
        file.write(data)


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
