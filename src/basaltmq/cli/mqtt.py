"""`basalt mqtt`: sessions, subscriptions, retained messages and rules of a running broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json, confirm, vhost_option, yes_option
from basaltmq.cli.output import show_objects, titled
from basaltmq.http_client import HttpClient, path


@click.group()
def mqtt() -> None:
    """Manage MQTT sessions, retained messages and rules of a broker."""


def _sessions(api: HttpClient, vhost: str) -> Iterator[dict[str, Any]]:
    after = ""
    while page := api.get(path("mqtt", "sessions", vhost), after=after):
        yield from page
        after = page[-1]["client_id"]


@mqtt.command()
@vhost_option
@as_json
@with_api
def sessions(api: HttpClient, vhost: str, as_json: bool) -> None:
    """List sessions, connected or not."""
    found = list(_sessions(api, vhost))
    columns = {"client": "client_id", **titled("user", "connected", "protocol", "durable", "subscriptions")}
    show_objects(found, columns | titled("messages", "in_flight"), as_json=as_json, empty="no sessions")


@mqtt.command()
@click.argument("client_id", required=False)
@vhost_option
@as_json
@with_api
def subscriptions(api: HttpClient, client_id: str | None, vhost: str, as_json: bool) -> None:
    """List the subscriptions of CLIENT_ID, or of all sessions."""
    clients = [client_id] if client_id else [each["client_id"] for each in _sessions(api, vhost)]
    found = [each for name in clients for each in api.get(path("mqtt", "sessions", vhost, name, "subscriptions"))]
    columns = {"client": "client_id", **titled("filter", "qos", "shared", "no_local", "identifier")}
    show_objects(found, columns, as_json=as_json, empty="no subscriptions")


@mqtt.command()
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@click.option("--delete", is_flag=True, help="Delete the messages.")
@yes_option
@vhost_option
@as_json
@with_api
def retained(api: HttpClient, topic_filter: str, delete: bool, yes: bool, vhost: str, as_json: bool) -> None:
    """List or delete retained messages that match FILTER.

    The default filter is #.
    """
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = api.get(path("mqtt", "retained", vhost), filter=topic_filter, after=after)
        found += page["items"]
        after = page["next"]
        if not after:
            break
    if not delete:
        columns = {"topic": "topic", "bytes": "payload_bytes"}
        show_objects(found, columns, as_json=as_json, empty="no retained messages")
        return
    confirm(yes, f"Delete {len(found)} retained messages?")
    for each in found:
        api.delete(path("mqtt", "retained", vhost, each["topic"]))
    click.echo(f"{len(found)} retained messages deleted")


@mqtt.command()
@click.argument("client_id")
@click.option("--end-session", is_flag=True, help="Also delete the session with its messages.")
@click.option("--reason", default="closed by the operator", show_default=True, help="Reason that the client receives.")
@vhost_option
@with_api
def disconnect(api: HttpClient, client_id: str, end_session: bool, reason: str, vhost: str) -> None:
    """Disconnect CLIENT_ID."""
    ending = {"end_session": "true"} if end_session else {}
    api.delete(path("mqtt", "sessions", vhost, client_id), reason=reason, **ending)
    click.echo(f"client {client_id} disconnected" + (", session deleted" if end_session else ""))


@mqtt.group()
def rule() -> None:
    """Manage rules that copy messages to streams."""


@rule.command("list")
@vhost_option
@as_json
@with_api
def list_rules(api: HttpClient, vhost: str, as_json: bool) -> None:
    """List rules with counts of messages.

    The counts are the messages that wait, and those that were appended since the broker started.
    """
    found = api.get(path("mqtt", "rules", vhost))
    columns = titled("name", "filter", "topic", "key", "waiting", "appended")
    show_objects(found, columns, as_json=as_json, empty="no rules")


@rule.command("set")
@click.argument("name")
@click.argument("topic_filter", metavar="FILTER")
@click.argument("topic")
@click.option("--key", default="none", show_default=True, help="Key of the records: none, topic, or 'level N'.")
@vhost_option
@with_api
def set_rule(api: HttpClient, name: str, topic_filter: str, topic: str, key: str, vhost: str) -> None:
    """Copy messages that match FILTER to the stream TOPIC.

    The stream must exist.

    Records with the same key go to the same partition. With --key 'level 2', messages of sensors/7/temp have the key 7.
    Without a key, records are spread over the partitions.
    """
    api.put(path("mqtt", "rules", vhost, name), {"filter": topic_filter, "topic": topic, "key": key})
    click.echo(f"rule {name}: {topic_filter} is copied to topic {topic}")


@rule.command("delete")
@click.argument("name")
@vhost_option
@with_api
def delete_rule(api: HttpClient, name: str, vhost: str) -> None:
    """Delete a rule, and the messages that wait for it."""
    api.delete(path("mqtt", "rules", vhost, name))
    click.echo(f"rule {name} deleted")
