"""A request and a response of HTTP, as the rest of `admin` sees them."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal, Protocol
from urllib.parse import parse_qsl, unquote

import msgspec

from basaltmq.broker.peer import peer_at

QUERY_FIELDS_MAX: Final = 100
"""Nothing here takes more than ten; the rest is somebody trying."""

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
"""What `error` says for a status; the names RabbitMQ's tools know where it has one."""


class HttpError(Exception):
    """Ends a request with a status and a JSON body that says why."""

    def __init__(
        self,
        status: int,
        reason: str,
        *,
        code: str = "",
        headers: dict[str, str] | None = None,
        details: dict[str, str | int] | None = None,
    ) -> None:
        """`details` are for programs that act on the reason, and stand beside it."""
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.code = code
        self.headers = headers or {}
        self.details = details or {}

    def response(self) -> Response:
        said: dict[str, str | int] = {"error": REASONS.get(self.status, "error"), "reason": self.reason}
        if self.code:
            said["code"] = self.code
        said |= self.details
        return Response(self.status, msgspec.json.encode(said), headers=self.headers)


class Request(msgspec.Struct):
    """A request whose head is known; `body` comes once it was admitted."""

    method: str
    target: str
    headers: dict[str, str]
    """Names in lower case; of several lines of one name the last."""
    peer: str = ""
    body: bytes = b""
    path: tuple[str, ...] = ()
    """Parts between slashes, decoded after they were split: a virtual host's name may hold a slash (%2F)."""
    query: dict[str, str] = {}
    local: str = ""
    """Address at which the connection arrived."""

    def split(self) -> None:
        """Set `path` and `query` from the target."""
        raw, _, query = self.target.partition("#")[0].partition("?")
        try:
            self.path = tuple(unquote(part, errors="strict") for part in raw.split("/")[1:])
            self.query = dict(
                parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX, errors="strict")
            )
        except ValueError as error:
            raise HttpError(400, f"the address cannot be read: {error}") from error

    @property
    def is_loopback(self) -> bool:
        """Whether the client is on this machine and no proxy on it spoke for another one."""
        return peer_at(self.peer).is_loopback and not ({"forwarded", "x-forwarded-for"} & self.headers.keys())

    def flag(self, name: str) -> bool:
        return self.query.get(name, "false").lower() in {"true", "1", "yes"}


class BodySink(Protocol):
    """Where a body goes that is too large for memory, as it comes in."""

    async def write(self, data: bytes) -> None:
        """Take a piece; what was handed over is not waited for elsewhere, so a slow disk slows the client."""
        ...

    async def discard(self) -> None:
        """The body ended in the middle, or was refused."""
        ...


class BodyStream(Protocol):
    """An answer that is made while the client takes it."""

    async def next(self) -> bytes | None:
        """The next piece; None at the end."""
        ...

    async def close(self) -> None:
        """Called once, whether it was taken to its end or not at all."""
        ...


class Response(msgspec.Struct):
    """What goes back."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = {}
    stream: BodyStream | None = None
    """A body of unknown length, in pieces, instead of `body`. One that fails in the middle ends the connection, so
    that a client cannot take a part for the whole."""


ENCODED_AT_ONCE: Final = 500
"""Items of a list encoded before others have their turn: about a millisecond."""


def json_response(value: Any, status: Literal[200, 201] = 200) -> Response:
    return Response(status, msgspec.json.encode(value, enc_hook=str))


async def long_json_response(value: Any) -> Response:
    """An answer of any length."""
    return Response(200, await _encoded(value))


async def _encoded(value: Any) -> bytes:
    """JSON. Long lists, also those in an object, are encoded in portions."""
    if isinstance(value, dict) and any(_is_long(each) for each in value.values()):
        parts = [msgspec.json.encode(str(name)) + b":" + await _encoded(each) for name, each in value.items()]
        return b"{" + b",".join(parts) + b"}"
    if not _is_long(value):
        return msgspec.json.encode(value, enc_hook=str)
    parts = []
    for at in range(0, len(value), ENCODED_AT_ONCE):
        parts.append(msgspec.json.encode(value[at : at + ENCODED_AT_ONCE], enc_hook=str)[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) > ENCODED_AT_ONCE
