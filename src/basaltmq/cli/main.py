"""Entry point: `basalt [--data-dir DIR] GROUP COMMAND`.

Every group has its own module. The data directory comes from the flag, or from BASALT_DATA_DIR, or is `./data`.
"""

from __future__ import annotations

from pathlib import Path

import click

from basaltmq import __version__
from basaltmq.cli.connection import connection
from basaltmq.cli.definitions import definitions
from basaltmq.cli.doctor import doctor
from basaltmq.cli.exchange import binding, exchange
from basaltmq.cli.output import BasaltGroup
from basaltmq.cli.policy import policy
from basaltmq.cli.queue import queue
from basaltmq.cli.store import store
from basaltmq.cli.topic import topic
from basaltmq.cli.user import permission, user
from basaltmq.cli.vhost import vhost

SERVE = "serve"


class MainGroup(BasaltGroup):
    """The top: `serve` is loaded when it is asked for, because an embedded program has not all that it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), SERVE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != SERVE:
            return super().get_command(ctx, cmd_name)
        try:
            from basaltmq.cli.serve import serve
        except ImportError as error:
            missing = str(error.name)
            return click.Command(SERVE, help="Run the broker.", callback=lambda: _refuse(missing))
        return serve


def _refuse(missing: str) -> None:
    raise click.ClickException(f"the broker needs {missing}: pip install 'basaltmq[server]'")


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

    `serve` runs the broker; binding, connection, definitions, exchange, permission, policy, user and vhost speak to a
    running one, and so does queue with --server. The others work on a store in --data-dir: those that change something
    need it for themselves, those that only read work beside a running process.
    """
    ctx.obj = data_dir


for command in (
    binding,
    connection,
    definitions,
    doctor,
    exchange,
    permission,
    policy,
    queue,
    store,
    topic,
    user,
    vhost,
):
    main.add_command(command)
