"""Host names of a listener that browsers reach, and the origins of the pages that may use it.

A browser sends requests to any name that resolves to this machine. Two attacks use that:

    DNS rebinding   a page of evil.example makes its name resolve to 127.0.0.1. The request carries Host: evil.example.
    CSRF            a page of another origin sends a request here. The request carries Origin: http://evil.example.

A listener serves loopback names, the local address of the connection, the name of this machine, and configured names.
A page may use it if it comes from the host that it addresses, or from a configured name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Final

ANY: Final = "*"
"""A configured name that disables the host check, for brokers behind a gateway that checks it."""

_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,255})(?::([0-9]{1,5}))?", re.ASCII)
_DEFAULT_PORTS: Final = frozenset({"", "80", "443"})


class WebHosts:
    """The names of one listener."""

    def __init__(self, listener: str, configured: Callable[[], tuple[str, ...]]) -> None:
        """`listener` is the configured address of the listener, which may be a host name."""
        self._own = {_plain(listener), _plain(socket.gethostname())} - {""}
        self._configured = configured

    def serves(self, host: str, local: str) -> bool:
        """Whether a Host header names this listener. `local` is the local address of the connection."""
        if ANY in self._configured():
            return True
        parsed = _parsed(host)
        if parsed is None:
            return False
        name = parsed[0]
        return (
            name == "localhost"
            or name.endswith(".localhost")
            or name in self._own
            or _is_local_address(name, local)
            or self._is_configured(parsed)
        )

    def is_own_origin(self, origin: str, host: str) -> bool:
        """Whether an Origin header names the host that the request addresses, or a configured name."""
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
