"""`basalt exchange` and `basalt binding`: exchanges and bindings of a running broker."""

from __future__ import annotations

import sys
from shlex import quote
from typing import Any, Final

import click
import msgspec

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json, vhost_option
from basaltmq.cli.output import Column, compact_json, show_objects, titled
from basaltmq.decoding import json_decoder
from basaltmq.http_client import HttpClient, path

arguments_option = click.option("--arguments", default="{}", metavar="JSON", help="Arguments as a JSON object.")


_decode: Final = json_decoder(dict[str, Any])


def json_object(name: str, text: str) -> dict[str, Any]:
    try:
        return _decode(text)
    except msgspec.DecodeError as error:
        raise click.UsageError(f"{name} is not a JSON object: {error}") from error


@click.group()
def exchange() -> None:
    """Manage exchanges of a running broker, and publish to them."""


@exchange.command("list")
@vhost_option
@as_json
@with_api
def list_exchanges(api: HttpClient, vhost: str, as_json: bool) -> None:
    """List exchanges."""
    columns: dict[str, Column] = {
        "exchange": lambda each: each["name"] or "(default)",
        **titled("type", "durable", "auto_delete", "internal"),
        "arguments": lambda each: compact_json(each["arguments"]),
    }
    show_objects(list(api.pages(path("exchanges", vhost))), columns, as_json=as_json)


@exchange.command()
@click.argument("name")
@click.option("--type", "kind", default="direct", show_default=True, help="Type: direct, fanout, topic or headers.")
@click.option("--transient", is_flag=True, help="Delete it at the next restart.")
@click.option("--auto-delete", is_flag=True, help="Delete it with its last binding.")
@click.option("--internal", is_flag=True, help="Clients cannot publish to it, only other exchanges.")
@vhost_option
@arguments_option
@with_api
def declare(
    api: HttpClient,
    name: str,
    kind: str,
    transient: bool,
    auto_delete: bool,
    internal: bool,
    vhost: str,
    arguments: str,
) -> None:
    """Create an exchange. Fails if one with this name and other settings exists."""
    body = {"type": kind, "durable": not transient, "auto_delete": auto_delete, "internal": internal}
    api.put(path("exchanges", vhost, name), {**body, "arguments": json_object("--arguments", arguments)})
    click.echo(f"exchange {name} created; bind a queue with: basalt binding create {quote(name)} QUEUE --key KEY")


@exchange.command()
@click.argument("name")
@click.option("--if-unused", is_flag=True, help="Fail if it has bindings.")
@vhost_option
@with_api
def delete(api: HttpClient, name: str, if_unused: bool, vhost: str) -> None:
    """Delete an exchange and its bindings."""
    api.delete(path("exchanges", vhost, name), **{"if-unused": "true" if if_unused else None})
    click.echo(f"exchange {name} deleted")


@exchange.command()
@click.argument("name")
@click.argument("payload", required=False)
@click.option("--key", default="", help="Routing key.")
@click.option("--properties", default="{}", metavar="JSON", help='Message properties, such as {"delivery_mode": 2}.')
@vhost_option
@with_api
def publish(api: HttpClient, name: str, payload: str | None, key: str, properties: str, vhost: str) -> None:
    """Publish one message: PAYLOAD, or stdin. With NAME "", the default exchange, --key is the queue name."""
    text = sys.stdin.read() if payload is None else payload
    given = json_object("--properties", properties)
    body = {"routing_key": key, "payload": text, "payload_encoding": "string", "properties": given}
    where = path("exchanges", vhost, name or "amq.default", "publish")
    if api.post(where, body)["routed"]:
        click.echo("published and confirmed")
    else:
        click.echo("the message was dropped: no queue is bound for it", err=True)
        raise SystemExit(1)


@click.group()
def binding() -> None:
    """Manage bindings of a running broker."""


@binding.command("list")
@vhost_option
@as_json
@with_api
def list_bindings(api: HttpClient, vhost: str, as_json: bool) -> None:
    """List bindings, except those of the default exchange."""
    found = [each for each in api.pages(path("bindings", vhost)) if as_json or each["source"]]
    columns: dict[str, Column] = {
        "exchange": "source",
        "to": "destination_type",
        "destination": "destination",
        "key": "routing_key",
        "arguments": lambda each: compact_json(each["arguments"]),
    }
    show_objects(found, columns, as_json=as_json, empty=f"no bindings in vhost {vhost}")


to_exchange = click.option("--to-exchange", is_flag=True, help="DESTINATION is an exchange instead of a queue.")


@binding.command("create")
@click.argument("source")
@click.argument("destination")
@click.option("--key", default="", help="Routing key or pattern.")
@to_exchange
@vhost_option
@arguments_option
@with_api
def create_binding(
    api: HttpClient, source: str, destination: str, key: str, to_exchange: bool, vhost: str, arguments: str
) -> None:
    """Bind DESTINATION to the exchange SOURCE."""
    where = path("bindings", vhost, "e", source, "e" if to_exchange else "q", destination)
    api.post(where, {"routing_key": key, "arguments": json_object("--arguments", arguments)})
    click.echo(f"{destination} is bound to {source}")


@binding.command("delete")
@click.argument("source")
@click.argument("destination")
@click.option("--key", default="", help="Routing key or pattern.")
@to_exchange
@vhost_option
@with_api
def delete_binding(api: HttpClient, source: str, destination: str, key: str, to_exchange: bool, vhost: str) -> None:
    """Delete the bindings of DESTINATION to SOURCE that have this key."""
    where = ("bindings", vhost, "e", source, "e" if to_exchange else "q", destination)
    to_delete = [each for each in api.get(path(*where)) if each["routing_key"] == key]
    if not to_delete:
        raise click.ClickException(f"{destination} is not bound to {source} with key {key!r}")
    for each in to_delete:
        api.delete(path(*where, each["properties_key"]))
    click.echo(f"{destination} is no longer bound to {source} with key {key!r}")
