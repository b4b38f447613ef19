"""HTTP to a broker's admin server that outlives the broker: what fails on the way is tried again, for a while.

Everything asked for here may be asked for twice: reads, parts of a stage, commits that the broker does once, offsets of
groups. So a request whose answer was lost, or that met a broker that is gone or starting, is simply made again, less
and less often, until patience ends: a short one before the first answer of a query, when the address is probably wrong,
and a long one after that, in which a broker is restarted. What the broker refuses is not tried again.

Only the standard library. The password is in no message and no representation.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

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

PATIENCE_S: Final = 120.0
"""For a broker that has answered before, or the driver has spoken to: a restart with a recovery of some size."""

FIRST_PATIENCE_S: Final = 5.0
"""For the first answer of all: long enough for a network to come up, short enough for a typing error."""

PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 3.0
"""Between two tries, doubling."""

TIMEOUT_S: Final = 120.0
"""For the next bytes; twice what the broker gives a slow client."""

LONG_TIMEOUT_S: Final = 3600.0
"""For an import of many gigabytes, during which nothing is sent."""

JSON: Final = "application/json"
PART: Final = "application/vnd.apache.arrow.file"
"""Content types of request bodies."""

DEFAULT_PORT: Final = 15672
USER: Final = "guest"

BUSY: Final = frozenset({408, 429, 502, 503, 504})
"""Statuses that another try may change."""

ON_THE_WAY: Final = (OSError, http.client.HTTPException)
"""What a connection that breaks raises."""

_decode_object: Final = json_decoder(dict[str, Any])


class Login(msgspec.Struct, frozen=True):
    """Where a broker is, and who asks."""

    server: str
    user: str = USER
    password: str = USER
    vhost: str = "/"
    ca: str = ""
    """Who signs the broker's certificate, as PEM text: tasks need no file for it."""
    patience_s: float = PATIENCE_S

    def __repr__(self) -> str:
        return f"Login({self.server!r}, {self.user!r}, vhost={self.vhost!r})"

    __str__ = __repr__


def check_server(text: str) -> str:
    """An address, brought into one form."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == -1:
        raise InvalidArgumentError(
            f"server is the address of a broker's admin API, such as http://host:{DEFAULT_PORT}, not {_plain(text)!r}"
        )
    if parts.username is not None or parts.password is not None:
        raise InvalidArgumentError("put user and password into the options of these names, not into server")
    return f"{parts.scheme}://{parts.netloc if port else f'{parts.netloc}:{DEFAULT_PORT}'}{parts.path.rstrip('/')}"


def _plain(text: str) -> str:
    """An address as it may be shown."""
    before, at, behind = text.rpartition("@")
    return (behind if at else before + behind)[:80]


def path(*names: str | int) -> str:
    """A path under /api, names percent-encoded."""
    return "/api/" + "/".join(quote(str(name), safe="") for name in names)


class Patience:
    """Counts the tries of one thing."""

    def __init__(self, limit_s: float, clock_s: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._sleep = sleep
        self.went_well()

    def went_well(self) -> None:
        """Something came: what fails from here on is another failure."""
        self._until_s = self._clock_s() + self._limit_s
        self._pause_s = PAUSE_MIN_S

    def wait(self) -> bool:
        """Wait before another try; False if there is to be none."""
        left_s = self._until_s - self._clock_s()
        if left_s <= 0:
            return False
        self._sleep(min(self._pause_s, left_s))
        self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        return True


class BrokerHttp:
    """Requests to one broker."""

    def __init__(
        self,
        login: Login,
        *,
        is_known: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`is_known`: somebody has spoken to it before, so that it is worth waiting for."""
        self.login = login
        self._is_known = is_known
        self._clock_s = clock_s
        self._sleep = sleep
        parts = urlsplit(login.server)
        self._host = parts.hostname or ""
        self._port = parts.port
        self._base = parts.path
        self._tls = _context(login.ca) if parts.scheme == "https" else None
        token = base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {token}"}

    def patience(self) -> Patience:
        limit_s = self.login.patience_s
        return Patience(limit_s if self._is_known else min(limit_s, FIRST_PATIENCE_S), self._clock_s, self._sleep)

    def call(
        self,
        method: str,
        where: str,
        body: Any = None,
        query: Mapping[str, str | int] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """One request; its answer, decoded. Bytes are a part of an import, anything else is sent as JSON."""
        is_raw = isinstance(body, bytes)
        raw = body if body is None or is_raw else msgspec.json.encode(body)
        content_type = PART if is_raw else JSON
        patience = self.patience()
        while True:
            try:
                with self.request(
                    method, where, raw, query, timeout_s=timeout_s, content_type=content_type
                ) as response:
                    said = response.read()
                return msgspec.json.decode(said) if said else None
            except (*ON_THE_WAY, UnavailableError) as error:
                if not patience.wait():
                    raise self.unreachable(error) from None

    @contextmanager
    def request(
        self,
        method: str,
        where: str,
        body: bytes | None = None,
        query: Mapping[str, str | int] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        content_type: str = JSON,
    ) -> Iterator[http.client.HTTPResponse]:
        """One try. UnavailableError if the broker asks to come back; another error if it refuses."""
        connection = self._connection(timeout_s)
        try:
            target = self._base + where + ("?" + urlencode(query) if query else "")
            connection.request(
                method, target, body, self._headers if body is None else self._headers | {"Content-Type": content_type}
            )
            response = connection.getresponse()
            self._is_known = True
            if response.status >= 400:
                raise self._refusal(response.status, response.read())
            yield response
        finally:
            connection.close()

    def unreachable(self, error: BaseException) -> BasaltError:
        """What to tell when patience ended."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return UnavailableError(
                f"the certificate of {self.login.server} is not trusted ({error.verify_message}): give the PEM file of "
                "who signed it in the option ca"
            )
        why = str(error) or type(error).__name__
        return UnavailableError(
            f"no broker answers at {self.login.server} ({why}): start it with basalt serve, or correct the option "
            "server"
        )

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _refusal(self, status: int, said: bytes) -> BasaltError:
        try:
            told = _decode_object(said)
        except msgspec.DecodeError:
            told = {}
        reason = str(told.get("reason") or f"{self.login.server} answered {status}")
        code = str(told.get("code") or told.get("error") or "refused")
        if status in BUSY:
            return UnavailableError(reason)
        if status == 401:
            return AuthenticationError(
                f"{self.login.server} does not let user {self.login.user!r} in ({reason}): check the options user and "
                "password"
            )
        if code == DamagedFrameError.code:
            return DamagedFrameError(told["shard"], told["base_offset"], told["last_offset"], told["damage"])
        kind = _plain_errors().get(code)
        return RemoteError(reason, code, status) if kind is None else kind(reason)


def _plain_errors() -> dict[str, type[BasaltError]]:
    """Basalt's errors that are made of a text alone, by code."""
    return {
        each.code: each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, BasaltError) and each.__init__ is Exception.__init__
    }


def _context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=ca or None)
    except ssl.SSLError as error:
        raise InvalidArgumentError(f"the file of the option ca is not PEM with a certificate: {error}") from None
