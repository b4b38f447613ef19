"""Entry point: `basalt [--data-dir DIR] GROUP COMMAND`.

A command's module is imported when the command runs. So commands for a broker do not load the storage engine, and
embedded programs need not install the dependencies of the server.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from basaltmq import __version__
from basaltmq.cli.local_or_remote import has_server_flag
from basaltmq.cli.output import BasaltGroup
from basaltmq.errors import install_hint
from basaltmq.pipeline.store_path import DEFAULT_VHOST, VHOSTS, store_path

COMMANDS: Final = {
    "binding": "exchange",
    "connection": "connection",
    "definitions": "definitions",
    "demo": "demo",
    "doctor": "doctor.command",
    "exchange": "exchange",
    "mqtt": "mqtt",
    "permission": "user",
    "pipeline": "pipeline.command",
    "policy": "policy",
    "queue": "queue.command",
    "rocketmq": "rocketmq",
    "serve": "server.command",
    "status": "status",
    "store": "store",
    "topic": "topic.command",
    "user": "user",
    "vhost": "vhost",
}
"""Command -> module of this package that defines it under the same name."""


DATA_DIR_GROUPS: Final = {"queue", "store", "topic"}
"""Groups that work on the data directory. `--data-dir` may also follow their name."""

VHOST_GROUPS: Final = {"queue", "topic"}
"""Groups for which a broker's data directory and a virtual host select the store of that virtual host."""


class MainGroup(BasaltGroup):
    """The `basalt` command."""

    def main(self, *args: Any, **extra: Any) -> Any:
        if sys.stdin is None:
            # stdin is closed (`<&-`): treat it as empty.
            sys.stdin = open(os.devnull)  # noqa: SIM115
        with _sigterm_as_exit():
            return super().main(*args, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _hoist_data_dir(args))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        try:
            loaded = importlib.import_module(f"basaltmq.cli.{module}")
        except ModuleNotFoundError as error:
            missing = str(error.name)
            if missing.partition(".")[0] == "basaltmq":
                raise
            return click.Command(
                cmd_name,
                help=f"Needs the package {missing}: {install_hint('server')}",
                callback=lambda: _refuse(missing),
            )
        command: click.Command = getattr(loaded, cmd_name)
        return command


def _hoist_data_dir(arguments: list[str]) -> list[str]:
    """Move `--data-dir` and `--vhost` in front of the group: `topic list --data-dir DIR` works too."""
    word = next((each for each in arguments if each in COMMANDS), None)
    is_named = any(each.partition("=")[0] == "--data-dir" for each in arguments)
    if word not in DATA_DIR_GROUPS or has_server_flag(arguments) or ("BASALT_SERVER" in os.environ and not is_named):
        return arguments
    names = {"--data-dir", "--vhost"} if word in VHOST_GROUPS else {"--data-dir"}
    at = arguments.index(word)
    found, rest = [], []
    following = iter(arguments[at:])
    for each in following:
        if each == "--":
            rest += [each, *following]
        elif each in names:
            found += [each, *islice(following, 1)]
        elif each.partition("=")[0] in names:
            found.append(each)
        else:
            rest.append(each)
    return [*arguments[:at], *found, *rest]


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Make SIGTERM end a command like Ctrl-C: files are closed and temporary files are deleted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _refuse(missing: str) -> None:
    raise click.ClickException(f"this command needs the package {missing}: {install_hint('server')}")


@click.group(cls=MainGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="basalt")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("data"),
    envvar="BASALT_DATA_DIR",
    show_default=True,
    show_envvar=True,
    help="Data directory of a store or a broker.",
)
@click.option(
    "--vhost",
    default=DEFAULT_VHOST,
    show_default=True,
    help="Virtual host within a broker's data directory, for queue and topic.",
)
@click.pass_context
def main(ctx: click.Context, data_dir: Path, vhost: str) -> None:
    """Basalt: a message broker, and embedded queues and streams for Python, on RocksDB.

    `serve` runs the broker. These commands call a running broker: binding, connection, definitions, exchange, mqtt,
    permission, policy, rocketmq, status, user, vhost, and with --server also queue and topic.

    Without --server, queue, topic, store and pipeline work on the data directory. Commands that write need exclusive
    access to it. Commands that read also work while another process has it open.
    """
    is_broker = ctx.invoked_subcommand in VHOST_GROUPS and (data_dir / VHOSTS).is_dir()
    ctx.obj = store_path(data_dir, vhost) if is_broker else data_dir
