"""Where the data is: a directory every node sees (`path`), or a broker (`server`), with what it takes to get in.

    path                 a store, a virtual host's directory, or a broker's with `vhost`
    server               http(s)://host:15672, a broker's admin API; with
    user, password       default guest; the password may be in BASALT_PASSWORD of the driver instead
    vhost                default /
    ca                   PEM file, on the driver, of who signed the broker's certificate
    retryTimeoutMs       how long a broker that is gone is waited for

Options are shown in plans, so Spark is to hide those it knows as secret: `password` is one by its default settings.
Everything is resolved on the driver: tasks get it as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from basaltmq.errors import InvalidArgumentError
from basaltmq.pipeline.place import DEFAULT_VHOST
from basaltmq.pipeline.remote_http import PATIENCE_S, USER, Login, check_server

NAMES: Final = ("path", "server", "user", "password", "vhost", "ca", "retryTimeoutMs")
_OF_SERVER: Final = ("user", "password", "ca", "retryTimeoutMs")
PASSWORD: Final = "BASALT_PASSWORD"  # noqa: S105 the name of a variable


class Place(msgspec.Struct, frozen=True):
    """A store, by path or behind a broker."""

    path: str = ""
    vhost: str = DEFAULT_VHOST
    login: Login | None = None

    def __str__(self) -> str:
        return self.path if self.login is None else self.login.server


def parse_place(given: Mapping[str, str], example: str, environment: Mapping[str, str] = os.environ) -> Place:
    """The place that options (names in small letters) mean; `example` shows how it is said."""
    path, server = given.get("path", ""), given.get("server", "")
    if bool(path) == bool(server):
        if path:
            raise InvalidArgumentError("give path, for a directory, or server, for a broker, not both")
        raise InvalidArgumentError(f'{example}: .option("path", "/data/basalt"), or server, a broker\'s address')
    vhost = given.get("vhost", DEFAULT_VHOST)
    if path:
        for name in _OF_SERVER:
            if name.lower() in given:
                raise InvalidArgumentError(f"{name} goes with server; a directory is read as who runs the tasks")
        return Place(path, vhost)
    login = Login(
        check_server(server),
        given.get("user", USER),
        given.get("password") or environment.get(PASSWORD) or USER,
        vhost,
        _pem(given.get("ca")),
        _patience_s(given.get("retrytimeoutms")),
    )
    if login.ca and not login.server.startswith("https:"):
        raise InvalidArgumentError("ca is for brokers behind TLS: write server with https://")
    return Place(vhost=vhost, login=login)


def _pem(file: str | None) -> str:
    if not file:
        return ""
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the file of the option ca cannot be read: {error}") from None


def _patience_s(text: str | None) -> float:
    if text is None:
        return PATIENCE_S
    if not text.strip().isdecimal():
        raise InvalidArgumentError(f"retryTimeoutMs is a number of milliseconds, not {text!r:.80}")
    return int(text) / 1000
