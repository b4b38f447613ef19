"""`basalt vhost`: virtual hosts of a running broker, and maintenance of their stores."""

from __future__ import annotations

from shlex import quote
from typing import Any

import click

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json, confirm, family_option, yes_option
from basaltmq.cli.output import FINDINGS, Column, show, show_objects
from basaltmq.http_client import HttpClient, path


@click.group()
def vhost() -> None:
    """Manage virtual hosts of a running broker."""


@vhost.command("list")
@as_json
@with_api
def list_vhosts(api: HttpClient, as_json: bool) -> None:
    """List virtual hosts with their state and message counts."""
    columns: dict[str, Column] = {
        "vhost": "name",
        "state": "state",
        "ready": "messages_ready",
        "unacked": "messages_unacknowledged",
        "restarts": "restarts",
        "description": lambda each: each.get("description") or "",
    }
    found = list(api.pages(path("vhosts")))
    show_objects(found, columns, as_json=as_json, empty="no virtual hosts that this user may access")


@vhost.command()
@click.argument("name")
@click.option("--description", default="", help="Free text.")
@with_api
def create(api: HttpClient, name: str, description: str) -> None:
    """Create a virtual host."""
    api.put(path("vhosts", name), {"description": description})
    click.echo(f"vhost {name} created; grant access with: basalt permission set USER --vhost {quote(name)}")


@vhost.command()
@click.argument("name")
@yes_option
@with_api
def delete(api: HttpClient, name: str, yes: bool) -> None:
    """Delete a virtual host with all its data. This cannot be undone."""
    confirm(yes, f"Delete virtual host {name} with all its queues and messages?")
    api.delete(path("vhosts", name))
    click.echo(f"vhost {name} deleted")


@vhost.command()
@click.argument("name")
@with_api
def restart(api: HttpClient, name: str) -> None:
    """Start a virtual host that is down, or restart one with recovery. Its clients are disconnected."""
    api.post(path("vhosts", name, "restart"), long=True)
    click.echo(f"vhost {name} is up")


@vhost.group("store")
def vhost_store() -> None:
    """Maintain the store of a virtual host while the broker serves it."""


@vhost_store.command()
@click.argument("name")
@family_option
@as_json
@with_api
def diagnostics(api: HttpClient, name: str, family: str | None, as_json: bool) -> None:
    """Show RocksDB properties per column family and in total."""
    found: dict[str, Any] = api.get(path("vhosts", name, "store"), family=family)
    if as_json:
        show([found], as_json=True)
        return
    families = found["families"]
    rows = [
        {
            "family": each,
            "rows": values.get("estimated-rows"),
            "SST bytes": values.get("sst-bytes"),
            "blob bytes": values.get("blob-bytes"),
            "memory bytes": values.get("memtable-bytes"),
        }
        for each, values in {**families, "all": found["total"]}.items()
        if each == "all" or values.get("estimated-rows")
    ]
    show(rows, as_json=False)


@vhost_store.command()
@click.argument("name")
@family_option
@with_api
def flush(api: HttpClient, name: str, family: str | None) -> None:
    """Flush memtables to SST files."""
    api.post(path("vhosts", name, "store", "flush"), {"family": family}, long=True)
    click.echo(f"store of vhost {name} flushed")


@vhost_store.command()
@click.argument("name")
@family_option
@with_api
def compact(api: HttpClient, name: str, family: str | None) -> None:
    """Compact the SST files to reclaim the space of deleted rows."""
    done = api.post(path("vhosts", name, "store", "compact"), {"family": family}, long=True)
    click.echo(f"{done['bytes_before']:,} bytes before, {done['bytes_after']:,} after")


@vhost_store.command()
@click.argument("name")
@click.argument("target")
@with_api
def checkpoint(api: HttpClient, name: str, target: str) -> None:
    """Create a backup of a virtual host.

    TARGET is a new path below the broker's backup directory (`admin.backup_dir`).

    A relative TARGET is relative to that directory.
    """
    target = api.post(path("vhosts", name, "store", "checkpoint"), {"target": target}, long=True)["target"]
    click.echo(f"backup of vhost {name} at {target}; check it with: basalt store verify {target}")


@vhost_store.command()
@click.argument("name")
@with_api
def verify(api: HttpClient, name: str) -> None:
    """Read all data and verify its checksums. The exit code is 2 if anything is damaged."""
    faults = api.post(path("vhosts", name, "store", "verify"), long=True)["faults"]
    show([{"fault": fault} for fault in faults], as_json=False, empty=f"the store of vhost {name} is intact")
    if faults:
        raise SystemExit(FINDINGS)


@vhost_store.command("set")
@click.argument("name")
@click.argument("options", nargs=-1, required=True, metavar="OPTION=VALUE...")
@family_option
@with_api
def set_options(api: HttpClient, name: str, options: tuple[str, ...], family: str | None) -> None:
    """Change mutable RocksDB options until the next restart."""
    chosen: dict[str, str] = {}
    for each in options:
        option, equals, value = each.partition("=")
        if not equals:
            raise click.UsageError(f"expected OPTION=VALUE, not {each!r}")
        chosen[option] = value
    api.put(path("vhosts", name, "store", "options"), {"options": chosen, "family": family})
    click.echo(f"{len(chosen)} options of vhost {name} changed until its next start")
