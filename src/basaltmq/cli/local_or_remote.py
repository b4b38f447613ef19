"""Command groups that work on a data directory, or with --server on a running broker.

`basalt queue` and `basalt topic` have two implementations of most commands. `--server` or BASALT_SERVER selects the one
that calls a broker.
"""

from __future__ import annotations

import os
from typing import Any, Final

import click

FLAG: Final = "--server"
PLACE: Final = "Data directory: --data-dir DIR (and --vhost NAME, if it belongs to a broker)"
PLACES: Final = f"{PLACE}. Running broker: {FLAG} URL; `{FLAG} URL --help` shows its options."


def has_server_flag(arguments: list[str]) -> bool:
    return any(each == FLAG or each.startswith(FLAG + "=") for each in arguments)


def local_or_remote_group(remote: click.Group) -> type[click.Group]:
    """Return a group class whose commands have counterparts in `remote`, for a running broker."""

    class LocalOrRemoteGroup(click.Group):
        def add_command(self, cmd: click.Command, name: str | None = None) -> None:
            cmd.epilog = PLACES if (name or cmd.name) in remote.commands else f"{PLACE}."
            super().add_command(cmd, name)

        def make_context(
            self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
        ) -> click.Context:
            context = super().make_context(info_name, list(args), parent, **extra)
            context.meta[FLAG] = has_server_flag(args) or _has_server_variable(parent)
            return context

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if ctx.meta.get(FLAG):
                return remote.get_command(ctx, cmd_name)
            return super().get_command(ctx, cmd_name) or remote.get_command(ctx, cmd_name)

        def list_commands(self, ctx: click.Context) -> list[str]:
            if ctx.meta.get(FLAG):
                return remote.list_commands(ctx)
            return sorted({*super().list_commands(ctx), *remote.list_commands(ctx)})

        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            if ctx.meta.get(FLAG) and remote.get_command(ctx, args[0]) is None:
                available = ", ".join(remote.list_commands(ctx))
                raise click.UsageError(
                    f"{self.name} {args[0]} does not support {FLAG}: it works on a data directory. "
                    f"Commands that support {FLAG}: {available}",
                    ctx,
                )
            return super().resolve_command(ctx, args)

    return LocalOrRemoteGroup


def _has_server_variable(parent: click.Context | None) -> bool:
    """Whether BASALT_SERVER is set and the command line names no data directory."""
    if "BASALT_SERVER" not in os.environ:
        return False
    source = None if parent is None else parent.find_root().get_parameter_source("data_dir")
    return source is not click.core.ParameterSource.COMMANDLINE
