"""`basalt topic ... --server URL`: topics of a running broker.

Records are transferred as JSON in pages of limited size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from shlex import quote
from typing import Any, BinaryIO, Final

import click
import msgspec

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json, confirm, vhost_option, yes_option
from basaltmq.cli.output import show
from basaltmq.cli.topic import input as topic_input
from basaltmq.cli.topic.input import APPEND_RECORDS, batches, reset_to
from basaltmq.errors import BasaltError, RemoteError
from basaltmq.http_client import HttpClient, path
from basaltmq.streams.imports.record_lines import raw_value, to_line
from basaltmq.streams.topics import PARTITIONS_PER_BATCH, TOPICS_PER_BATCH

FOLLOW_S: Final = 0.5
"""Poll interval of --follow."""


@click.group()
def server_topic() -> None:
    """Manage topics of a running broker."""


@server_topic.command()
@topic_input.names
@topic_input.settings
@vhost_option
@with_api
def create(api: HttpClient, names: tuple[str, ...], vhost: str, **settings: Any) -> None:
    """Create topics. Topics that exist are named, and the others are created."""
    config = {key: value for key, value in settings.items() if value is not None}
    append = f"basalt topic append {quote(names[0])} --server {api.login.server}"
    if len(names) == 1:
        api.put(path("topics", vhost, names[0]), config)
        topic_input.report_created(names, [], append)
        return
    refused: list[BasaltError] = []
    left = iter(names)
    per_request = max(1, min(TOPICS_PER_BATCH, PARTITIONS_PER_BATCH // max(1, config["partitions"])))
    while batch := list(islice(left, per_request)):
        body = {"topics": [{"name": name, "config": config} for name in batch]}
        made = api.post(path("topics", vhost), body, long=True)["topics"]
        refused += [RemoteError(each["reason"], each["error"]) for each in made if not each["created"]]
    topic_input.report_created(names, refused, append)


@server_topic.command("list")
@topic_input.page
@vhost_option
@with_api
def list_topics(api: HttpClient, after: str | None, limit: int, vhost: str, as_json: bool) -> None:
    """List topics with record counts and sizes."""
    rows = []
    for each in islice(_pages(api, "topics", vhost, after), limit):
        found = api.get(path("topics", vhost, each["name"]))
        rows.append(
            {
                "topic": each["name"],
                "engine": each["config"]["engine"],
                "partitions": len(found["partitions"]),
                "records": sum(one["records"] for one in found["partitions"]),
                "bytes": sum(one["size_bytes"] for one in found["partitions"]),
                "durability": each["config"]["durability"],
            }
        )
    show(
        rows, as_json=as_json, empty=f"no topics; create one with: basalt topic create NAME --server {api.login.server}"
    )


def _pages(api: HttpClient, kind: str, vhost: str, after: str | None) -> Iterator[Any]:
    """Yield all topics or groups, page by page."""
    while True:
        found = api.get(path(kind, vhost), after=after)
        yield from found[kind]
        after = found["next_after"]
        if after is None:
            return


@server_topic.command()
@click.argument("name")
@vhost_option
@as_json
@with_api
def describe(api: HttpClient, name: str, vhost: str, as_json: bool) -> None:
    """Show settings and partitions of a topic."""
    found = api.get(path("topics", vhost, name))
    if as_json:
        show([found], as_json=True)
        return
    click.echo(f"topic {name} ({found['id']}) in vhost {vhost}")
    for setting, value in sorted(found["config"].items()):
        click.echo(f"  {setting}: {'-' if value is None else value}")
    click.echo()
    rows = [
        {
            "partition": each["partition"],
            "first": each["start_offset"],
            "end": each["end_offset"],
            "records": each["records"],
            "bytes": each["size_bytes"],
        }
        for each in found["partitions"]
    ]
    show(rows, as_json=False)


@server_topic.command()
@click.argument("name")
@topic_input.source
@vhost_option
@with_api
def append(
    api: HttpClient,
    name: str,
    partition: int | None,
    key: str | None,
    raw: bool,
    durability: str | None,
    source: BinaryIO,
    vhost: str,
) -> None:
    """Append one record per line of stdin.

    A line is a JSON object {"value": "...", "key": "..."}, or the value with --raw.
    """
    done = 0
    try:
        for batch in batches(source, raw, key):
            body = {
                "records": [to_line(each) for each in batch],
                "partition": partition,
                "durability": durability,
            }
            api.post(path("topics", vhost, name), body, long=True)
            done += len(batch)
    finally:
        click.echo(f"{done:,} records appended to {name}", err=True)


@server_topic.command()
@click.argument("name")
@topic_input.search
@vhost_option
@with_api
def read(
    api: HttpClient,
    name: str,
    partition: int | None,
    start: str,
    since_ms: int | None,
    limit: int | None,
    key: str | None,
    tag: str | None,
    follow: bool,
    raw: bool,
    vhost: str,
) -> None:
    """Print records as JSON lines."""
    found = api.get(path("topics", vhost, name))["partitions"]
    if partition is not None and partition not in range(len(found)):
        raise click.UsageError(f"topic {name} has partitions 0 to {len(found) - 1}, not {partition}")
    at = {
        each["partition"]: _begin(api, path("topics", vhost, name, str(each["partition"])), each, start, since_ms)
        for each in found
        if partition is None or each["partition"] == partition
    }
    topic_input.print_records(_BrokerSource(api, (vhost, name), key, tag, raw), at, limit, follow=follow)


class _BrokerSource:
    """Reads a topic of a broker."""

    def __init__(self, api: HttpClient, topic: tuple[str, str], key: str | None, tag: str | None, raw: bool) -> None:
        self._api = api
        self._topic = topic
        self._key = key
        self._tag = tag
        self._raw = raw

    def read(self, partition: int, offset: int, limit: int) -> tuple[list[bytes], int]:
        where = path("topics", *self._topic, partition, "lines")
        page = self._api.get(where, offset=offset, limit=min(limit, APPEND_RECORDS), key=self._key, tag=self._tag)
        lines = [raw_value(record) if self._raw else msgspec.json.encode(record) for record in page["records"]]
        return lines, page["next_offset"]

    def first_offset(self, partition: int) -> int:
        return int(self._api.get(path("topics", *self._topic))["partitions"][partition]["start_offset"])

    def wait(self) -> None:
        time.sleep(FOLLOW_S)


def _begin(api: HttpClient, where: str, partition: dict[str, Any], start: str, since_ms: int | None) -> int:
    if since_ms is not None:
        return int(api.get(f"{where}/offset", timestamp_ms=since_ms)["offset"])
    return topic_input.begin(start, partition["start_offset"], partition["end_offset"])


@server_topic.command()
@click.argument("name")
@yes_option
@vhost_option
@with_api
def delete(api: HttpClient, name: str, yes: bool, vhost: str) -> None:
    """Delete a topic with all its records and offsets. This cannot be undone."""
    api.get(path("topics", vhost, name))
    confirm(yes, f"Delete topic {name} and all its records?")
    api.delete(path("topics", vhost, name))
    click.echo(f"topic {name} deleted")


@server_topic.command()
@topic_input.group
@vhost_option
@with_api
def groups(
    api: HttpClient,
    group: str | None,
    reset: str | None,
    name: str | None,
    partition: int | None,
    vhost: str,
    as_json: bool,
) -> None:
    """List consumer groups, or show the lag of one, or reset it while it has no members."""
    if reset is None:
        rows = (
            [{"group": each} for each in _pages(api, "groups", vhost, None)]
            if group is None
            else api.get(path("groups", vhost, group))
        )
        show(rows, as_json=as_json, empty="no group has committed an offset")
        return
    if group is None or name is None:
        raise click.UsageError("--reset requires GROUP and --topic")
    to, time_ms = reset_to(reset)
    body = {"topic": name, "to": to, "partition": partition, "timestamp_ms": time_ms}
    show(api.post(path("groups", vhost, group, "reset"), body), as_json=as_json)
