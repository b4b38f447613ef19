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


@click.group(cls=BasaltGroup, context_settings={"help_option_names": ["-h", "--help"]})
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
    """Basalt: queues and streams for Python, on RocksDB.

    Commands that change something need the store for themselves; commands that only read work beside a running one.
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
