"""`basalt queue transactions | commit | rollback | forget`: XA branches, in a data directory or on a server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

import basaltmq
from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json, confirm, vhost_option, yes_option
from basaltmq.cli.output import Column, show_objects, titled
from basaltmq.http_client import HttpClient, path
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.xa import parse_xid
from basaltmq.queues.transactions.xid import Xid

View = Callable[[Path], AbstractContextManager[QueuePlane]]
EMPTY: Final = "no prepared branches"
LIST_HELP: Final = "List prepared transaction branches without an outcome."
COLUMNS: Final[dict[str, Column]] = {
    **titled("xid", "state"),
    "since": lambda each: datetime.fromtimestamp(each["since_ms"] / 1000, UTC).isoformat(timespec="seconds"),
    "held": "held",
    "to enqueue": "to_enqueue",
    "queues": lambda each: ", ".join(each["queues"]),
}


class Decision(NamedTuple):
    """A command with which an operator decides a branch."""

    name: str
    summary: str
    done: str
    warning: str
    decide: Callable[[QueuePlane, Xid], None]


_ELSEWHERE: Final = "The coordinator and other resources may decide otherwise."
DECISIONS: Final = (
    Decision(
        "commit",
        "Commit a prepared branch whose coordinator does not respond. The decision is recorded.",
        "committed; the coordinator will see this decision, or delete it with: basalt queue forget",
        _ELSEWHERE,
        lambda plane, xid: plane.xa.decide(xid, commit=True),
    ),
    Decision(
        "rollback",
        "Roll back a prepared branch.\n\nUse it if the coordinator does not respond. The decision is recorded.",
        "rolled back; the coordinator will see this decision, or delete it with: basalt queue forget",
        _ELSEWHERE,
        lambda plane, xid: plane.xa.decide(xid, commit=False),
    ),
    Decision(
        "forget",
        "Delete the recorded decision of a branch.\n\nDo this after its coordinator has read the decision.",
        "forgotten",
        "The coordinator will no longer see the decision.",
        lambda plane, xid: plane.xa.forget(xid),
    ),
)


def add_to_directory(group: click.Group, view: View) -> None:
    """Add the commands for a data directory. `view` opens its queues read-only."""

    @group.command("transactions", help=LIST_HELP + " Works while another process has the store open.")
    @as_json
    @click.pass_obj
    def transactions(data_dir: Path, as_json: bool) -> None:
        with view(data_dir) as plane:
            found = [each.shown() for each in plane.xa.in_doubt()]
        show_objects(found, COLUMNS, as_json=as_json, empty=EMPTY)

    for decision in DECISIONS:
        _add_decision(group, decision)


def _add_decision(group: click.Group, decision: Decision) -> None:
    @group.command(decision.name, help=decision.summary)
    @click.argument("xid")
    @yes_option
    @click.pass_obj
    def run(data_dir: Path, xid: str, yes: bool) -> None:
        chosen = parse_xid(xid)
        with basaltmq.open(data_dir, create=False) as db:
            confirm(yes, f"{decision.warning} Continue with branch {chosen}?")
            decision.decide(db.queue_plane, chosen)
        click.echo(f"branch {chosen} {decision.done}")


def add_to_server(group: click.Group) -> None:
    """Add the commands for a running broker."""

    @group.command("transactions", help=LIST_HELP)
    @vhost_option
    @as_json
    @with_api
    def transactions(api: HttpClient, vhost: str, as_json: bool) -> None:
        found: list[dict[str, Any]] = api.get(path("xa", vhost))
        show_objects(found, COLUMNS, as_json=as_json, empty=EMPTY)

    for decision in DECISIONS:
        _add_server_decision(group, decision)


def _add_server_decision(group: click.Group, decision: Decision) -> None:
    @group.command(decision.name, help=decision.summary)
    @click.argument("xid")
    @vhost_option
    @yes_option
    @with_api
    def run(api: HttpClient, xid: str, vhost: str, yes: bool) -> None:
        chosen = parse_xid(xid)
        confirm(yes, f"{decision.warning} Continue with branch {chosen}?")
        if decision.name == "forget":
            api.delete(path("xa", vhost, str(chosen)))
        else:
            api.post(path("xa", vhost, str(chosen), decision.name), {})
        click.echo(f"branch {chosen} {decision.done}")
