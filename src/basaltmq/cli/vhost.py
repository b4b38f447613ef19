"""`basalt vhost`: virtual hosts of a running broker, and the store of each."""

from __future__ import annotations

from typing import Any

import click

from basaltmq.cli.output import show
from basaltmq.http_client import ApiClient, path, with_api

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
no_question = click.option("--yes", is_flag=True, help="Do not ask.")
family_option = click.option("--family", help="One family; all of them if not given.")


@click.group()
def vhost() -> None:
    """Virtual hosts of a running broker."""


@vhost.command("list")
@as_json
@with_api
def list_vhosts(api: ApiClient, as_json: bool) -> None:
    """List virtual hosts with what they hold and whether they are up."""
    found = list(api.pages(path("vhosts")))
    if as_json:
        show(found, as_json=True)
        return
    rows = [
        {
            "vhost": each["name"],
            "state": each["state"],
            "ready": each.get("messages_ready"),
            "unacked": each.get("messages_unacknowledged"),
            "restarts": each.get("restarts"),
            "description": each.get("description") or "",
        }
        for each in found
    ]
    show(rows, as_json=False, empty="no virtual hosts that you may see")


@vhost.command()
@click.argument("name")
@click.option("--description", default="")
@with_api
def create(api: ApiClient, name: str, description: str) -> None:
    """Make a virtual host."""
    api.put(path("vhosts", name), {"description": description})
    click.echo(f"vhost {name} is there; let somebody in with: basalt permission set USER --vhost {name}")


@vhost.command()
@click.argument("name")
@no_question
@with_api
def delete(api: ApiClient, name: str, yes: bool) -> None:
    """Delete a virtual host with everything in it. There is no way back."""
    if not yes:
        click.confirm(f"Delete virtual host {name} with all its queues and messages?", abort=True)
    api.delete(path("vhosts", name))
    click.echo(f"vhost {name} deleted")


@vhost.command()
@click.argument("name")
@with_api
def restart(api: ApiClient, name: str) -> None:
    """Start a virtual host that is down, or take it through recovery. Its clients are disconnected."""
    api.post(path("vhosts", name, "restart"), long=True)
    click.echo(f"vhost {name} is up")


@vhost.group("store")
def vhost_store() -> None:
    """Look after the store of a virtual host while it is served."""


@vhost_store.command()
@click.argument("name")
@family_option
@as_json
@with_api
def diagnostics(api: ApiClient, name: str, family: str | None, as_json: bool) -> None:
    """RocksDB's figures, per family and summed."""
    found: dict[str, Any] = api.get(path("vhosts", name, "store"), family=family)
    if as_json:
        show([found], as_json=True)
        return
    families = found["families"]
    rows = [
        {
            "family": each,
            "rows": values.get("estimated-rows"),
            "table bytes": values.get("sst-bytes"),
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
def flush(api: ApiClient, name: str, family: str | None) -> None:
    """Write what is in memory tables to files."""
    api.post(path("vhosts", name, "store", "flush"), {"family": family}, long=True)
    click.echo(f"store of vhost {name} flushed")


@vhost_store.command()
@click.argument("name")
@family_option
@with_api
def compact(api: ApiClient, name: str, family: str | None) -> None:
    """Rewrite the files without what was deleted."""
    done = api.post(path("vhosts", name, "store", "compact"), {"family": family}, long=True)
    click.echo(f"{done['bytes_before']:,} bytes before, {done['bytes_after']:,} after")


@vhost_store.command()
@click.argument("name")
@click.argument("target")
@with_api
def checkpoint(api: ApiClient, name: str, target: str) -> None:
    """Make a backup at TARGET, a new path below the broker's backup directory (admin.backup_dir).

    A relative TARGET is taken from that directory.
    """
    target = api.post(path("vhosts", name, "store", "checkpoint"), {"target": target}, long=True)["target"]
    click.echo(f"backup of vhost {name} at {target}; check it with: basalt store verify {target}")


@vhost_store.command()
@click.argument("name")
@with_api
def verify(api: ApiClient, name: str) -> None:
    """Read everything back. Exit code 2 if anything is damaged."""
    faults = api.post(path("vhosts", name, "store", "verify"), long=True)["faults"]
    show([{"fault": fault} for fault in faults], as_json=False, empty=f"the store of vhost {name} is sound")
    if faults:
        raise SystemExit(2)


@vhost_store.command("set")
@click.argument("name")
@click.argument("options", nargs=-1, required=True, metavar="OPTION=VALUE...")
@family_option
@with_api
def set_options(api: ApiClient, name: str, options: tuple[str, ...], family: str | None) -> None:
    """Change mutable options of RocksDB until the next restart."""
    chosen: dict[str, str] = {}
    for each in options:
        option, equals, value = each.partition("=")
        if not equals:
            raise click.UsageError(f"give OPTION=VALUE, not {each!r}")
        chosen[option] = value
    api.put(path("vhosts", name, "store", "options"), {"options": chosen, "family": family})
    click.echo(f"{len(chosen)} options of vhost {name} changed until its next start")
