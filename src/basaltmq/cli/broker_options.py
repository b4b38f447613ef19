"""Options of the commands that call a broker's admin API: --server, --user and --ca.

The password comes from BASALT_PASSWORD, from the address, or from a prompt. No option takes it, because every process
of the machine can read command lines.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from basaltmq.errors import InvalidArgumentError
from basaltmq.http_client import DEFAULT_SERVER, GUEST, HttpClient, Login, parse_server


def connect(server: str, user: str = GUEST, password: str | None = None, *, ca_file: str | None = None) -> HttpClient:
    """Return a client of the broker at `server`. Credentials in the address have precedence."""
    try:
        address, user_in_address, password_in_address = parse_server(server)
    except InvalidArgumentError as error:
        raise click.UsageError(f"--server: {error}") from None
    if user_in_address is not None:
        user = user_in_address
    if password_in_address is not None:
        password = password_in_address
    ca = "" if ca_file is None else Path(ca_file).read_text()
    return HttpClient(Login(address, user, _ask_password(user) if password is None else password, ca=ca))


def _ask_password(user: str) -> str:
    if user == GUEST:
        return GUEST
    if not sys.stdin.isatty():
        raise click.UsageError(f"set BASALT_PASSWORD to the password of user {user}")
    return str(click.prompt(f"Password of {user}", hide_input=True, err=True))


def with_api(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --server, --user and --ca to a command. The command gets the client as its first argument."""

    @click.option(
        "--server",
        envvar="BASALT_SERVER",
        default=DEFAULT_SERVER,
        show_default=True,
        show_envvar=True,
        help="Address of the broker's admin API.",
    )
    @click.option(
        "--user",
        envvar="BASALT_USER",
        default=GUEST,
        show_default=True,
        show_envvar=True,
        help="User name. The password comes from BASALT_PASSWORD or a prompt.",
    )
    @click.option(
        "--ca",
        "ca_file",
        type=click.Path(exists=True, dir_okay=False),
        help="PEM file with the CA of the broker's certificate.  [default: the CAs of the system]",
    )
    @click.option("--password-from-environment", "password", envvar="BASALT_PASSWORD", hidden=True)
    @functools.wraps(command)
    def run(server: str, user: str, ca_file: str | None, password: str | None, **arguments: Any) -> Any:
        return command(connect(server, user, password, ca_file=ca_file), **arguments)

    return run
