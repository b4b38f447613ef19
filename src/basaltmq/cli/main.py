"""Entry point: `basalt [--data-dir DIR] GROUP COMMAND`.

Every group has its own module, loaded when it is asked for: a command that speaks to a broker does not load the engine,
and an embedded program need not have what the broker needs. The data directory comes from the flag, or from
BASALT_DATA_DIR, or is `./data`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final

import click

from basaltmq import __version__
from basaltmq.cli.output import BasaltGroup

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


class MainGroup(BasaltGroup):
    """The top."""

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
@click.pass_context
def main(ctx: click.Context, data_dir: Path) -> None:
    """Basalt: a message broker, and queues and streams embedded in Python, on RocksDB.

    `serve` runs the broker; binding, connection, definitions, exchange, permission, policy, status, user and vhost
    speak to a running one, and so does queue with --server. The others work on a store in --data-dir: those that change
    something need it for themselves, those that only read work beside a running process.
    """
    ctx.obj = data_dir
