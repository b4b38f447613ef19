"""`basalt status`: summary of a running broker."""

from __future__ import annotations

from typing import Any

import click

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json
from basaltmq.cli.output import FINDINGS, show
from basaltmq.http_client import HttpClient, path


@click.command()
@as_json
@with_api
def status(api: HttpClient, as_json: bool) -> None:
    """Show a summary of a running broker. The exit code is 2 if publishers are blocked or a virtual host is down."""
    overview: dict[str, Any] = api.get(path("overview"))
    vhosts = list(api.pages(path("vhosts")))
    alarms = overview.get("alarms") or []
    down = [each["name"] for each in vhosts if each["state"] != "running"]
    if as_json:
        show([{"overview": overview, "vhosts": vhosts}], as_json=True)
    else:
        for line in _summary(overview, vhosts):
            click.echo(line)
        for name in down:
            click.echo(f"vhost {name} is not running; start it with: basalt vhost restart {name}")
        for alarm in alarms:
            click.echo(f"publishers are blocked: {alarm}")
    if alarms or down:
        raise SystemExit(FINDINGS)


def _summary(overview: dict[str, Any], vhosts: list[dict[str, Any]]) -> list[str]:
    objects, messages = overview["object_totals"], overview["queue_totals"]
    hours, seconds = divmod(overview["uptime_s"], 3600)
    ports = ", ".join(f"{each['protocol']} {each['port']}" for each in overview.get("listeners", []))
    lines = [
        f"Basalt {overview['product_version']} as {overview['node']}, up {hours:,} h {seconds // 60} min",
        f"  vhosts       {len(vhosts):,}",
        f"  connections  {objects['connections']:,} with {objects['channels']:,} channels",
        f"  queues       {objects['queues']:,} with {objects['consumers']:,} consumers",
        f"  messages     {messages['messages_ready']:,} ready, {messages['messages_unacknowledged']:,} unacknowledged",
    ]
    return [*lines, f"  listens      {ports}"] if ports else lines
