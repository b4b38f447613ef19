"""HTTP requests, responses and errors of the admin API."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal, Protocol
from urllib.parse import parse_qsl, unquote

import msgspec

from basaltmq.broker.peer import peer_at

QUERY_FIELDS_MAX: Final = 100
"""No route takes more than ten. The limit protects the parser."""

PROXY_HEADERS: Final = frozenset(
    {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
)
"""Headers that proxies add."""

REASONS: Final = {
    400: "bad_request",
    401: "not_authorised",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    415: "unsupported",
    421: "misdirected",
    429: "too_many_requests",
    431: "header_too_large",
    500: "internal_server_error",
    501: "not_implemented",
    503: "unavailable",
    507: "no_space",
}
"""The field `error` of a response by status, with RabbitMQ's names where it has one."""


class HttpError(Exception):
    """Ends a request with a status and a JSON body that contains the reason."""

    def __init__(
        self,
        status: int,
        reason: str,
        *,
        code: str = "",
        headers: dict[str, str] | None = None,
        details: dict[str, str | int] | None = None,
    ) -> None:
        """`details` are extra JSON fields for programs."""
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.code = code
        self.headers = headers or {}
        self.details = details or {}

    def response(self) -> Response:
        body: dict[str, str | int] = {"error": REASONS.get(self.status, "error"), "reason": self.reason}
        if self.code:
            body["code"] = self.code
        body |= self.details
        return Response(self.status, msgspec.json.encode(body), headers=self.headers)


class Request(msgspec.Struct):
    """A request. `body` is set after the request was admitted."""

    method: str
    target: str
    headers: dict[str, str]
    """Header names are in lower case. The last line of a name wins; the server refuses repeated headers of SINGLE."""
    peer: str = ""
    body: bytes = b""
    path: tuple[str, ...] = ()
    """Path segments, decoded after splitting, because the name of a virtual host may contain a slash (%2F)."""
    query: dict[str, str] = {}
    local: str = ""
    """The local address of the connection."""

    def split(self) -> None:
        """Set `path` and `query` from the target. The host of an absolute target replaces the header (RFC 9112)."""
        scheme, is_absolute, rest = self.target.partition("://")
        if is_absolute and scheme.lower() in {"http", "https"}:
            end = next((at for at, character in enumerate(rest) if character in "/?#"), len(rest))
            self.headers["host"], self.target = rest[:end], "/" + rest[end:].removeprefix("/")
        if not self.target.startswith("/"):
            raise HttpError(400, f"the request target {self.target[:80]!r} is not a path; it must start with /")
        raw, _, query = self.target.partition("#")[0].partition("?")
        try:
            self.path = tuple(unquote(part, errors="strict") for part in raw.split("/")[1:])
            self.query = dict(
                parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX, errors="strict")
            )
        except ValueError as error:
            raise HttpError(400, f"the request target is malformed: {error}") from error

    @property
    def is_loopback(self) -> bool:
        """Whether the client is on this machine and did not connect through a proxy."""
        return peer_at(self.peer).is_loopback and self.headers.keys().isdisjoint(PROXY_HEADERS)

    def flag(self, name: str) -> bool:
        return self.query.get(name, "false").lower() in {"true", "1", "yes"}


class BodySink(Protocol):
    """Receives a body that is too large for memory, piece by piece."""

    async def write(self, data: bytes) -> None:
        """Accept a piece. Nothing else buffers it, so a slow sink slows the client down."""
        ...

    async def discard(self) -> None:
        """Clean up after a body that was incomplete or refused."""
        ...


class BodyStream(Protocol):
    """A response that is produced while the client reads it."""

    async def next(self) -> bytes | None:
        """Return the next piece, or None at the end."""
        ...

    async def close(self) -> None:
        """Clean up. Called exactly once, even if the stream was not read to its end."""
        ...


class Response(msgspec.Struct):
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = {}
    stream: BodyStream | None = None
    """A body of unknown length, used instead of `body`. If it fails, the connection is closed, so that the client does
    not mistake a part for the whole."""


ENCODED_PER_TURN: Final = 500
"""List items encoded per loop turn: about 1 ms."""


def json_response(value: Any, status: Literal[200, 201] = 200) -> Response:
    return Response(status, msgspec.json.encode(value, enc_hook=str))


async def long_json_response(value: Any) -> Response:
    """Return a response of any length, encoded in portions."""
    return Response(200, await _encoded(value))


async def _encoded(value: Any) -> bytes:
    """Return JSON. Encode long lists, also those in an object, in portions."""
    if isinstance(value, dict) and any(_is_long(each) for each in value.values()):
        parts = [msgspec.json.encode(str(name)) + b":" + await _encoded(each) for name, each in value.items()]
        return b"{" + b",".join(parts) + b"}"
    if not _is_long(value):
        return msgspec.json.encode(value, enc_hook=str)
    parts = []
    for at in range(0, len(value), ENCODED_PER_TURN):
        parts.append(msgspec.json.encode(value[at : at + ENCODED_PER_TURN], enc_hook=str)[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) > ENCODED_PER_TURN
