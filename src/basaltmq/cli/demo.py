"""`basalt demo`: writes messages to a topic in a store on disk, and reads them back."""

from __future__ import annotations

import click

from basaltmq.demo import MESSAGES, MESSAGES_MAX
from basaltmq.demo import main as run_demo

DATA_DIR = "demo-data"


@click.command()
@click.option("--data-dir", default=DATA_DIR, show_default=True, help="Directory of the store.")
@click.option(
    "--messages", type=click.IntRange(1, MESSAGES_MAX), default=MESSAGES, show_default=True, help="Number of messages."
)
def demo(data_dir: str, messages: int) -> None:
    """Write and read messages durably in an embedded store."""
    raise SystemExit(run_demo(["--data-dir", data_dir, "--messages", str(messages)]))
