"""Host and Origin checks: which host names the admin API accepts, and which web pages may change something.

A browser sends a stored password to any name that resolves to this machine. Two attacks use that:

    DNS rebinding   a page of evil.example makes its name resolve to 127.0.0.1. The request carries Host: evil.example.
    CSRF            a page of another origin sends a request here. The request carries Origin: http://evil.example.

The host of every request must therefore be a loopback name, the address of this connection's listener, the name of this
machine, or a name from `admin.allowed_hosts`. A request that changes something and has an Origin must come from the
host that it addresses, or from a configured name. Programs send no Origin and need none. The API sends no CORS headers,
so a page of another origin cannot read an answer.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Final

from basaltmq.admin.http.message import HttpError, Request

SETTING: Final = "admin.allowed_hosts"

ANY: Final = "*"
"""A configured name that disables the host check, for brokers behind a gateway that checks it."""

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})

_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,255})(?::([0-9]{1,5}))?", re.ASCII)
_DEFAULT_PORTS: Final = frozenset({"", "80", "443"})


class HostCheck:
    """The checks of one listener."""

    def __init__(self, listener: str, configured: Callable[[], tuple[str, ...]]) -> None:
        """`listener` is the configured address of the listener, which may be a host name."""
        self._own = {_plain(listener), _plain(socket.gethostname())} - {""}
        self._configured = configured

    def check_host(self, request: Request) -> None:
        """Raise HttpError 421 unless the request addresses this broker. HTTP/1.0 clients may omit Host."""
        given = request.headers.get("host")
        if given is None or self._is_allowed(given, request.local):
            return
        raise HttpError(421, f"host {given[:80]!r} is not served; add it to {SETTING} if it is a name of this broker")

    def check_origin(self, request: Request) -> None:
        """Raise HttpError 403 if a page of another origin requests a change."""
        if request.method in SAFE_METHODS:
            return
        site = request.headers.get("sec-fetch-site", "none").lower()
        origin = request.headers.get("origin")
        if origin is not None:
            if not self._is_own_origin(origin, request.headers.get("host", "")):
                raise _foreign(f"origin {origin[:80]!r}")
            if site == "cross-site":
                raise _foreign("another site")
        elif site not in {"none", "same-origin"}:
            raise _foreign("another site")

    def _is_allowed(self, given: str, local: str) -> bool:
        if ANY in self._configured():
            return True
        parsed = _parsed(given)
        if parsed is None:
            return False
        host = parsed[0]
        return (
            host == "localhost"
            or host.endswith(".localhost")
            or host in self._own
            or _is_local_address(host, local)
            or self._is_configured(parsed)
        )

    def _is_own_origin(self, origin: str, host: str) -> bool:
        scheme, _, authority = origin.lower().partition("://")
        parsed = _parsed(authority)
        if scheme not in {"http", "https"} or parsed is None:
            return False
        return parsed == _parsed(host) or self._is_configured(parsed)

    def _is_configured(self, parsed: tuple[str, str]) -> bool:
        """Whether a name is configured. A name without a port covers every port. `*` covers hosts, never origins."""
        configured = {_parsed(each) for each in self._configured()}
        return parsed in configured or (parsed[0], "") in configured


def _parsed(authority: str) -> tuple[str, str] | None:
    """Return (host, port) in normal form: lower case, no final dot, canonical addresses, no default port.

    Return None for anything that is neither a name nor an address.
    """
    found = _AUTHORITY.fullmatch(authority.strip().lower())
    if found is None:
        return None
    port = found[2] or ""
    return _plain(found[1]), "" if port in _DEFAULT_PORTS else port


def _plain(host: str) -> str:
    host = host.strip("[]").lower().rstrip(".")
    address = _address(host)
    return host if address is None else str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_local_address(host: str, local: str) -> bool:
    """Whether the host is a loopback address, or the local address of the connection."""
    address = _address(host)
    return address is not None and (address.is_loopback or address == _address(local))


def _foreign(who: str) -> HttpError:
    return HttpError(403, f"a page of {who} may not change anything; add its host to {SETTING} if you trust it")
