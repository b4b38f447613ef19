"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import click

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def combine(*options: Decorator) -> Decorator:
    """Combine options into one decorator, in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def confirm(yes: bool, question: str) -> None:
    """Ask the user, unless --yes was given. End the command if the user refuses."""
    if not yes:
        click.confirm(question, abort=True)


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
vhost_option = click.option("--vhost", default="/", show_default=True, help="Virtual host.")
family_option = click.option("--family", help="Column family.  [default: all]")
