"""`basalt definitions`: export and import a broker's configuration as JSON, compatible with RabbitMQ's files."""

from __future__ import annotations

import os
import stat
from typing import Any, BinaryIO

import click
import msgspec

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.output import FINDINGS, show
from basaltmq.http_client import HttpClient, path

vhost_option = click.option("--vhost", help="Virtual host.  [default: the whole broker]")


@click.group()
def definitions() -> None:
    """Export and import all configured objects of a broker.

    These are users, virtual hosts, exchanges, queues, bindings and policies.
    """


def _where(vhost: str | None) -> str:
    return path("definitions") if vhost is None else path("definitions", vhost)


@definitions.command("export")
@click.argument("target", type=click.Path(dir_okay=False, allow_dash=True), default="-")
@vhost_option
@with_api
def export_definitions(api: HttpClient, target: str, vhost: str | None) -> None:
    """Export definitions as JSON to TARGET (default: stdout). The file has mode 0600, because it contains password
    hashes."""
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
            # An existing file may be readable by others.
            os.fchmod(descriptor, 0o600)
        file.write(data)


@definitions.command("import")
@click.argument("source", type=click.File("rb"), default="-")
@vhost_option
@with_api
def import_definitions(api: HttpClient, source: BinaryIO, vhost: str | None) -> None:
    """Import definitions of Basalt or RabbitMQ from SOURCE.

    SOURCE is a file that `basalt definitions export` or `rabbitmqctl export_definitions` has written. The default is
    stdin.

    The exit code is 2 if a definition was skipped.
    """
    done: dict[str, Any] = api.call("POST", _where(vhost), source.read(), long=True)
    rows = [{"kind": kind, "imported": count} for kind, count in done["imported"].items()]
    show(rows, as_json=False, empty="nothing imported")
    for line in done["skipped"]:
        click.echo(f"skipped: {line}", err=True)
    if done["skipped"]:
        raise SystemExit(FINDINGS)
