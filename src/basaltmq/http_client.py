"""The command line's side of the admin API: one connection, JSON in and out, errors as Basalt's own.

The password comes from BASALT_PASSWORD, from the address, or is asked for; there is no flag for it, because command
lines are seen by every process of a machine.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import click
import msgspec

from basaltmq.errors import RemoteError

TIMEOUT_S: Final = 60.0
"""For an answer; operations on a store say how long they take by themselves and get more."""

LONG_TIMEOUT_S: Final = 3600.0
PAGE_ITEMS: Final = 500
SERVER: Final = "http://127.0.0.1:15672"
GUEST: Final = "guest"


def path(*names: str) -> str:
    """A path under /api, names percent-encoded."""
    return "/api/" + "/".join(quote(name, safe="") for name in names)


class ApiClient:
    """Calls the admin API of one broker."""

    def __init__(self, server: str, user: str, password: str, *, authority: str | None = None) -> None:
        parts = urlsplit(server if "://" in server else f"http://{server}")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise click.UsageError(f"--server takes an address such as {SERVER}, not {server!r}")
        user = unquote(parts.username) if parts.username is not None else user
        password = unquote(parts.password) if parts.password is not None else password
        self.address = f"{parts.scheme}://{parts.hostname}:{parts.port or 15672}"
        self._headers = {
            "Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode(),
            "Accept": "application/json",
        }
        self._base = parts.path.rstrip("/")
        self._connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=authority)
            self._connection = http.client.HTTPSConnection(
                parts.hostname, parts.port or 15672, timeout=TIMEOUT_S, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 15672, timeout=TIMEOUT_S)

    def get(self, where: str, **query: str | int | None) -> Any:
        return self.call("GET", where, query=query)

    def put(self, where: str, body: Any = None) -> Any:
        return self.call("PUT", where, {} if body is None else body)

    def post(self, where: str, body: Any = None, *, long: bool = False, **query: str | int | None) -> Any:
        return self.call("POST", where, {} if body is None else body, query=query, long=long)

    def delete(self, where: str, body: Any = None, **query: str | int | None) -> Any:
        return self.call("DELETE", where, body, query=query)

    def pages(self, where: str, **query: str | int | None) -> Iterator[dict[str, Any]]:
        """Every item of a list, page by page."""
        number = 1
        while True:
            found = self.get(where, **query, page=number, page_size=PAGE_ITEMS)
            yield from found["items"]
            if number >= found["page_count"]:
                return
            number += 1

    def call(
        self,
        method: str,
        where: str,
        body: Any = None,
        *,
        query: Mapping[str, str | int | None] | None = None,
        long: bool = False,
    ) -> Any:
        asked = {name: value for name, value in (query or {}).items() if value is not None}
        target = self._base + where + ("?" + urlencode(asked) if asked else "")
        raw = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        headers = dict(self._headers)
        if raw is not None:
            headers["Content-Type"] = "application/json"
        self._connection.timeout = LONG_TIMEOUT_S if long else TIMEOUT_S
        if self._connection.sock is not None:
            self._connection.sock.settimeout(self._connection.timeout)
        try:
            # A broker that has refused by the head does not read the rest, and what it said is there to be read.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._connection.request(method, target, raw, headers)
            response = self._connection.getresponse()
            said = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise RemoteError(
                f"no broker answers at {self.address} ({error}); start one with: basalt serve, or give --server",
                "unreachable",
            ) from error
        return _understood(response.status, response.getheader("Content-Type", ""), said)

    def close(self) -> None:
        self._connection.close()


def _understood(status: int, kind: str, said: bytes) -> Any:
    value: Any = said.decode(errors="replace")
    if said and kind.startswith("application/json"):
        try:
            value = msgspec.json.decode(said)
        except msgspec.DecodeError as error:
            raise RemoteError(f"the answer is not JSON: {error}", "bad_answer", status) from error
    if status < 400:
        return value if said else None
    if isinstance(value, dict) and "reason" in value:
        raise RemoteError(str(value["reason"]), str(value.get("code") or value.get("error")), status)
    raise RemoteError(f"the broker answered {status}: {str(value)[:200]}", "refused", status)


def _password(user: str, server: str, environment_password: str | None) -> str:
    if environment_password is not None:
        return environment_password
    if "@" in server or user == GUEST:
        return GUEST
    if not sys.stdin.isatty():
        raise click.UsageError(f"give the password of {user} in BASALT_PASSWORD")
    return str(click.prompt(f"Password of {user}", hide_input=True, err=True))


def with_api(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --server and its companions to a command, which gets the client as its first argument."""

    @click.option(
        "--server",
        envvar="BASALT_SERVER",
        default=SERVER,
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
        help="Who you are; the password is in BASALT_PASSWORD or asked for.",
    )
    @click.option(
        "--ca",
        "authority",
        type=click.Path(exists=True, dir_okay=False),
        help="PEM file of who signed the broker's certificate.",
    )
    @click.option("--password-from-environment", "password", envvar="BASALT_PASSWORD", hidden=True)
    def run(server: str, user: str, authority: str | None, password: str | None, **arguments: Any) -> Any:
        api = ApiClient(server, user, _password(user, server, password), authority=authority)
        try:
            return command(api, **arguments)
        finally:
            api.close()

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__click_params__ = [  # type: ignore[attr-defined]
        *getattr(command, "__click_params__", []),
        *getattr(run, "__click_params__", []),
    ]
    return run
