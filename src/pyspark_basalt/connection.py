"""The location of the data: a data directory that every node can read (`path`), or a broker (`server`).

    path                 a store, a virtual host's directory, or a broker's directory with `vhost`
    server               http(s)://host:15672, a broker's admin API; with
    user, password       default guest; the password may also be in BASALT_PASSWORD of the driver
    vhost                default /
    ca                   PEM file on the driver with the CA of the broker's certificate
    retryTimeoutMs       how long to wait for an unreachable broker

Spark shows options in plans and redacts those whose names it considers secret; by default `password` is one. The driver
resolves all options, and tasks receive the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from basaltmq.errors import InvalidArgumentError
from basaltmq.http_client import GUEST, RETRY_S, Login, check_server
from basaltmq.pipeline.source import PASSWORD
from basaltmq.pipeline.store_path import DEFAULT_VHOST

NAMES: Final = ("path", "server", "user", "password", "vhost", "ca", "retryTimeoutMs")
_SERVER_ONLY: Final = ("user", "password", "ca", "retryTimeoutMs")


class StoreLocation(msgspec.Struct, frozen=True):
    """A store in a directory, or behind a broker."""

    path: str = ""
    vhost: str = DEFAULT_VHOST
    login: Login | None = None

    def __str__(self) -> str:
        return self.path if self.login is None else self.login.server


def parse_location(
    given: Mapping[str, str], example: str, environment: Mapping[str, str] = os.environ
) -> StoreLocation:
    """Return the location that options (names in lower case) give. `example` begins the error for missing options."""
    path, server = given.get("path", ""), given.get("server", "")
    if bool(path) == bool(server):
        if path:
            raise InvalidArgumentError("give either path, for a directory, or server, for a broker")
        raise InvalidArgumentError(f'{example}: .option("path", "/data/basalt"), or server, a broker\'s address')
    vhost = given.get("vhost", DEFAULT_VHOST)
    if path:
        for name in _SERVER_ONLY:
            if name.lower() in given:
                raise InvalidArgumentError(f"{name} requires server; a directory is read with the rights of the tasks")
        return StoreLocation(path, vhost)
    login = Login(
        check_server(server),
        given.get("user", GUEST),
        given.get("password") or environment.get(PASSWORD) or GUEST,
        vhost,
        _pem(given.get("ca")),
        _retry_s(given.get("retrytimeoutms")),
    )
    if login.ca and not login.server.startswith("https:"):
        raise InvalidArgumentError("ca requires TLS: write server with https://")
    return StoreLocation(vhost=vhost, login=login)


def _pem(file: str | None) -> str:
    if not file:
        return ""
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the file of the option ca cannot be read: {error}") from None


def _retry_s(text: str | None) -> float:
    if text is None:
        return RETRY_S
    if not text.strip().isdecimal():
        raise InvalidArgumentError(f"retryTimeoutMs must be a number of milliseconds, not {text!r:.80}")
    return int(text) / 1000
