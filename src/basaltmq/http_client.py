"""HTTP client of a broker's admin API: JSON calls, streamed bodies, TLS, timeouts and retries.

Each request opens its own connection, so one client may serve several threads. Only the standard library is used.
No error message and no representation contains the password.

With `retry_s`, a request is repeated while the broker is unreachable or busy (`BUSY`), at growing intervals. The
caller must make only requests that the broker may execute twice. A refusal by the broker is never repeated. Before
the first response the retry time is at most `FIRST_RETRY_S`, because the address is probably wrong.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from basaltmq import errors
from basaltmq.decoding import json_decoder
from basaltmq.errors import (
    AuthenticationError,
    BasaltError,
    DamagedFrameError,
    InvalidArgumentError,
    RemoteError,
    UnavailableError,
)

DEFAULT_PORT: Final = 15672
DEFAULT_SERVER: Final = f"http://127.0.0.1:{DEFAULT_PORT}"
GUEST: Final = "guest"

RETRY_S: Final = 120.0
"""Retry time of the pipeline: enough for a broker to restart and recover."""

FIRST_RETRY_S: Final = 5.0
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 3.0
"""The pause between two attempts doubles up to this limit."""

TIMEOUT_S: Final = 120.0
"""Timeout for the next bytes: twice the broker's timeout for a slow client."""

LONG_TIMEOUT_S: Final = 3600.0
"""Timeout for operations on a whole store and for large imports: the broker sends nothing meanwhile."""

PAGE_ITEMS: Final = 500

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.file"

BUSY: Final = frozenset({408, 429, 502, 503, 504})
"""Statuses after which a retry may succeed."""

CONNECTION_ERRORS: Final = (OSError, http.client.HTTPException)

Query = Mapping[str, str | int | None]
"""Parameters whose value is None are left out."""

_decode_object: Final = json_decoder(dict[str, Any])


class Login(msgspec.Struct, frozen=True):
    """Address and credentials of a broker. Spark tasks receive it in this form."""

    server: str
    """Normalized by `parse_server`."""
    user: str = GUEST
    password: str = GUEST
    vhost: str = "/"
    ca: str = ""
    """CA certificates as PEM text, not as a file name: tasks on other machines have no such file."""
    retry_s: float = RETRY_S

    def __repr__(self) -> str:
        return f"Login({self.server!r}, {self.user!r}, vhost={self.vhost!r})"

    __str__ = __repr__


def parse_server(text: str) -> tuple[str, str | None, str | None]:
    """Return the normalized address, and the user and the password in it, if any."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == -1:
        shown = text.rpartition("@")[2][:80]
        raise InvalidArgumentError(
            f"{shown!r} is not the address of a broker's admin API; give one such as {DEFAULT_SERVER}"
        )
    address = f"{parts.scheme}://{host if port else f'{host}:{DEFAULT_PORT}'}{parts.path.rstrip('/')}"
    user, password = (None if each is None else unquote(each) for each in (parts.username, parts.password))
    return address, user, password


def check_server(text: str) -> str:
    """Return the normalized address. Credentials are refused, because Spark shows the address in plans."""
    address, user, password = parse_server(text)
    if user is not None or password is not None:
        raise InvalidArgumentError("the option server must not contain credentials; use the options user and password")
    return address


def path(*names: str | int) -> str:
    """Return a path below /api, with percent-encoded names."""
    return "/api/" + "/".join(quote(str(name), safe="") for name in names)


class Retries:
    """Time limit and pauses for the attempts of one operation."""

    def __init__(self, limit_s: float, clock_s: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._sleep = sleep
        self.restart()

    def restart(self) -> None:
        """Reset the limit after progress: a later failure is a new one."""
        self._until_s = self._clock_s() + self._limit_s
        self._pause_s = PAUSE_MIN_S

    def wait(self) -> bool:
        """Sleep before the next attempt. Return False if the time limit is over."""
        left_s = self._until_s - self._clock_s()
        if left_s <= 0:
            return False
        self._sleep(min(self._pause_s, left_s))
        self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        return True


class HttpClient:
    """Requests to one broker, each made once. A refusal raises RemoteError with the broker's code and status."""

    def __init__(self, login: Login) -> None:
        self.login = login
        parts = urlsplit(login.server)
        self._host = parts.hostname or ""
        self._port = parts.port
        self._base = parts.path
        self._tls = _context(login.ca) if parts.scheme == "https" else None
        token = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {token}"}
        self._has_responded = False

    def get(self, where: str, **query: str | int | None) -> Any:
        return self.call("GET", where, query=query)

    def put(self, where: str, body: Any = None) -> Any:
        return self.call("PUT", where, {} if body is None else body)

    def post(self, where: str, body: Any = None, *, long: bool = False, **query: str | int | None) -> Any:
        return self.call("POST", where, {} if body is None else body, query=query, long=long)

    def delete(self, where: str, body: Any = None, **query: str | int | None) -> Any:
        return self.call("DELETE", where, body, query=query)

    def pages(self, where: str, **query: str | int | None) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, page by page."""
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
        query: Query | None = None,
        *,
        long: bool = False,
        content_type: str = JSON,
    ) -> Any:
        """Make a request and return its decoded response. `body` is sent as JSON, unless it is bytes."""
        raw = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        timeout_s = LONG_TIMEOUT_S if long else TIMEOUT_S
        try:
            with self.stream(method, where, raw, query, timeout_s=timeout_s, content_type=content_type) as response:
                received = response.read()
        except CONNECTION_ERRORS as error:
            raise self.unreachable(error) from error
        if not received:
            return None
        if not response.getheader("Content-Type", "").startswith(JSON):
            return received.decode(errors="replace")
        try:
            return msgspec.json.decode(received)
        except msgspec.DecodeError as error:
            raise RemoteError(f"the response is not valid JSON: {error}", "bad_answer", response.status) from error

    @contextmanager
    def stream(
        self,
        method: str,
        where: str,
        body: bytes | None = None,
        query: Query | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        content_type: str = JSON,
    ) -> Iterator[http.client.HTTPResponse]:
        """Make a request and yield its response, whose body is not read yet.

        A connection that fails raises one of `CONNECTION_ERRORS`, also while the caller reads the body.
        """
        connection = self._connection(timeout_s)
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = self._base + where + ("?" + urlencode(given) if given else "")
        headers = self._headers if body is None else self._headers | {"Content-Type": content_type}
        try:
            connection.connect()
            # A broker that refuses a request by its head does not read the body, but its response can be read.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, target, body, headers)
            response = connection.getresponse()
            self._has_responded = True
            if response.status >= 400:
                raise self._refusal(response.status, response.read())
            yield response
        finally:
            connection.close()

    def unreachable(self, error: BaseException) -> BasaltError:
        """Return the error for a connection that failed."""
        return RemoteError(self._explain(error), "unreachable")

    def _explain(self, error: BaseException) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self.login.server} is not trusted ({error.verify_message}): give the PEM file of "
                "its CA in the option ca"
            )
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
            return (
                f"{self.login.server} responds, but not with HTTP: use the address of the admin API, "
                "which has port 15672 by default"
            )
        why = str(error) or type(error).__name__
        return f"no broker responds at {self.login.server} ({why}): start it with basalt serve, or correct the address"

    def _refusal(self, status: int, body: bytes) -> BasaltError:
        try:
            refusal = _decode_object(body)
        except msgspec.DecodeError:
            refusal = {}
        if "reason" not in refusal:
            text = body[:200].decode(errors="replace")
            refusal["reason"] = f"{self.login.server} responded with status {status}: {text}"
        code = str(refusal.get("code") or refusal.get("error") or "refused")
        return self._refused(status, code, refusal)

    def _refused(self, status: int, code: str, refusal: dict[str, Any]) -> BasaltError:
        return RemoteError(str(refusal["reason"]), code, status)

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)


class RetryingClient(HttpClient):
    """Repeats requests for `Login.retry_s`, and raises the error class that belongs to the broker's code.

    UnavailableError means that the broker was unreachable or busy for the whole retry time.
    """

    def __init__(
        self,
        login: Login,
        *,
        is_known: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`is_known`: another client has reached this broker, so the first request has the full retry time."""
        super().__init__(login)
        self._has_responded = is_known
        self._clock_s = clock_s
        self._sleep = sleep

    def retries(self) -> Retries:
        limit_s = self.login.retry_s
        return Retries(limit_s if self._has_responded else min(limit_s, FIRST_RETRY_S), self._clock_s, self._sleep)

    def call(
        self,
        method: str,
        where: str,
        body: Any = None,
        query: Query | None = None,
        *,
        long: bool = False,
        content_type: str = JSON,
    ) -> Any:
        retries = self.retries()
        while True:
            try:
                return super().call(method, where, body, query, long=long, content_type=content_type)
            except UnavailableError:
                if not retries.wait():
                    raise

    def unreachable(self, error: BaseException) -> BasaltError:
        return UnavailableError(self._explain(error))

    def _refused(self, status: int, code: str, refusal: dict[str, Any]) -> BasaltError:
        reason = str(refusal["reason"])
        if status in BUSY:
            return UnavailableError(reason)
        if status == 401:
            return AuthenticationError(
                f"{self.login.server} refused user {self.login.user!r} ({reason}): check the options user and password"
            )
        if code == DamagedFrameError.code:
            return DamagedFrameError(*(refusal[name] for name in ("shard", "base_offset", "last_offset", "damage")))
        kind = _plain_errors().get(code)
        return RemoteError(reason, code, status) if kind is None else kind(reason)


def _plain_errors() -> dict[str, type[BasaltError]]:
    """Return Basalt's error classes that take only a message, by code."""
    return {
        each.code: each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, BasaltError) and each.__init__ is Exception.__init__
    }


def _context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=ca or None)
    except ssl.SSLError as error:
        raise InvalidArgumentError(f"the file of the option ca contains no PEM certificate: {error}") from None
