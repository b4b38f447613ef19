"""Entry point: `basalt [--data-dir DIR] GROUP COMMAND`.

Every group has its own module, loaded when it is asked for: a command that speaks to a broker does not load the engine,
and an embedded program need not have what the broker needs. The data directory comes from the flag, or from
BASALT_DATA_DIR, or is `./data`.
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
from basaltmq.cli.local_or_remote import asks_for_server
from basaltmq.cli.output import BasaltGroup
from basaltmq.pipeline.place import DEFAULT_VHOST, VHOSTS, store_path

COMMANDS: Final = {
    "binding": "exchange",
    "connection": "connection",
    "definitions": "definitions",
    "demo": "demonstrate",
    "doctor": "doctor",
    "exchange": "exchange",
    "permission": "user",
    "pipeline": "pipeline",
    "policy": "policy",
    "queue": "queue",
    "serve": "serve",
    "status": "status",
    "store": "store",
    "topic": "topic",
    "user": "user",
    "vhost": "vhost",
}
"""Command -> the module of this package that has it, under its own name."""


ON_A_STORE: Final = {"queue", "store", "topic"}
"""Groups that work on the data directory; it may be named behind them too."""

OF_A_BROKER: Final = {"queue", "topic"}
"""Of these, those that take a broker's directory, with a virtual host, for the store of that virtual host."""


class MainGroup(BasaltGroup):
    """The top."""

    def main(self, *args: Any, **extra: Any) -> Any:
        if sys.stdin is None:
            # `<&-`: there is nothing to read, which is no error.
            sys.stdin = open(os.devnull)  # noqa: SIM115
        with _left_by_sigterm():
            return super().main(*args, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _hoisted(args))

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
            return click.Command(
                cmd_name, help=f"Needs {missing}: pip install 'basaltmq[server]'", callback=lambda: _refuse(missing)
            )
        command: click.Command = getattr(loaded, cmd_name)
        return command


def _hoisted(arguments: list[str]) -> list[str]:
    """`topic list --data-dir DIR` is what `--data-dir DIR topic list` is."""
    word = next((each for each in arguments if each in COMMANDS), None)
    is_named = any(each.partition("=")[0] == "--data-dir" for each in arguments)
    if word not in ON_A_STORE or asks_for_server(arguments) or ("BASALT_SERVER" in os.environ and not is_named):
        return arguments
    names = {"--data-dir", "--vhost"} if word in OF_A_BROKER else {"--data-dir"}
    at = arguments.index(word)
    found, rest = [], []
    behind = iter(arguments[at:])
    for each in behind:
        if each == "--":
            rest += [each, *behind]
        elif each in names:
            found += [each, *islice(behind, 1)]
        elif each.partition("=")[0] in names:
            found.append(each)
        else:
            rest.append(each)
    return [*arguments[:at], *found, *rest]


@contextmanager
def _left_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does: what is open is closed, and no scratch file stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _refuse(missing: str) -> None:
    raise click.ClickException(f"this needs {missing}: pip install 'basaltmq[server]'")


@click.group(cls=MainGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="basalt")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("data"),
    envvar="BASALT_DATA_DIR",
    show_default=True,
    show_envvar=True,
    help="The store to work on.",
)
@click.option("--vhost", default=DEFAULT_VHOST, show_default=True, help="Of a broker's directory, for queue and topic.")
@click.pass_context
def main(ctx: click.Context, data_dir: Path, vhost: str) -> None:
    """Basalt: a message broker, and queues and streams embedded in Python, on RocksDB.

    `serve` runs the broker; binding, connection, definitions, exchange, permission, policy, status, user and vhost
    speak to a running one, and so do queue and topic with --server. The others work on a store in --data-dir: those
    that change something need it for themselves, those that only read work beside a running process.
    """
    is_broker = ctx.invoked_subcommand in OF_A_BROKER and (data_dir / VHOSTS).is_dir()
    ctx.obj = store_path(data_dir, vhost) if is_broker else data_dir
