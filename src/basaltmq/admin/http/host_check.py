"""Host and Origin checks: which host names the admin API accepts, and which web pages may change something.

`broker/auth/web_hosts.py` describes the attacks. Every request must address a name of the listener. A request that
changes something and has an Origin must come from the host that it addresses, or from a name in `admin.allowed_hosts`.
Programs send no Origin and need none. The API sends no CORS headers, so a page of another origin cannot read a
response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from basaltmq.admin.http.message import HttpError, Request
from basaltmq.broker.auth.web_hosts import WebHosts

SETTING: Final = "admin.allowed_hosts"

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class HostCheck:
    """The checks of one listener."""

    def __init__(self, listener: str, configured: Callable[[], tuple[str, ...]]) -> None:
        """`listener` is the configured address of the listener, which may be a host name."""
        self._hosts = WebHosts(listener, configured)

    def check_host(self, request: Request) -> None:
        """Raise HttpError 421 unless the request addresses this broker. HTTP/1.0 clients may omit Host."""
        given = request.headers.get("host")
        if given is None or self._hosts.serves(given, request.local):
            return
        raise HttpError(421, f"host {given[:80]!r} is not served; add it to {SETTING} if it is a name of this broker")

    def check_origin(self, request: Request) -> None:
        """Raise HttpError 403 if a page of another origin requests a change."""
        if request.method in SAFE_METHODS:
            return
        site = request.headers.get("sec-fetch-site", "none").lower()
        origin = request.headers.get("origin")
        if origin is not None:
            if not self._hosts.is_own_origin(origin, request.headers.get("host", "")):
                raise _foreign(f"origin {origin[:80]!r}")
            if site == "cross-site":
                raise _foreign("another site")
        elif site not in {"none", "same-origin"}:
            raise _foreign("another site")


def _foreign(who: str) -> HttpError:
    return HttpError(403, f"a page of {who} may not change anything; add its host to {SETTING} if you trust it")
