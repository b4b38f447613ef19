"""One word for two places: a command of a store, and its twin of a running broker.

A command that is given `--server` (or finds BASALT_SERVER) speaks to a broker; without it, it opens the data directory
as an embedded program would.
"""

from __future__ import annotations

import os
from typing import Any, Final

import click

FLAG: Final = "--server"
PLACE: Final = "Where: --data-dir DIR (and --vhost NAME, if it is a broker's)"
EITHER: Final = f"{PLACE}, or {FLAG} URL of a running broker, whose options `{FLAG} URL --help` shows."


def asks_for_server(arguments: list[str]) -> bool:
    return any(each == FLAG or each.startswith(FLAG + "=") for each in arguments)


def either_group(twin: click.Group) -> type[click.Group]:
    """A group whose commands have twins for a running broker."""

    class EitherGroup(click.Group):
        def add_command(self, cmd: click.Command, name: str | None = None) -> None:
            cmd.epilog = EITHER if (name or cmd.name) in twin.commands else f"{PLACE}."
            super().add_command(cmd, name)

        def make_context(
            self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
        ) -> click.Context:
            context = super().make_context(info_name, list(args), parent, **extra)
            context.meta[FLAG] = asks_for_server(args) or _by_environment(parent)
            return context

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if ctx.meta.get(FLAG):
                return twin.get_command(ctx, cmd_name)
            return super().get_command(ctx, cmd_name) or twin.get_command(ctx, cmd_name)

        def list_commands(self, ctx: click.Context) -> list[str]:
            if ctx.meta.get(FLAG):
                return twin.list_commands(ctx)
            return sorted({*super().list_commands(ctx), *twin.list_commands(ctx)})

        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            if ctx.meta.get(FLAG) and twin.get_command(ctx, args[0]) is None:
                there = ", ".join(twin.list_commands(ctx))
                raise click.UsageError(f"with {FLAG} there is no {args[0]!r} of {self.name}s, but {there}", ctx)
            return super().resolve_command(ctx, args)

    return EitherGroup


def _by_environment(parent: click.Context | None) -> bool:
    """BASALT_SERVER is set, and no data directory was named on the command line."""
    if "BASALT_SERVER" not in os.environ:
        return False
    source = None if parent is None else parent.find_root().get_parameter_source("data_dir")
    return source is not click.core.ParameterSource.COMMANDLINE
