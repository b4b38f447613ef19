"""Parsed header fields of requests and responses. Results are cached by header block (`http2/header_blocks.py`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from basaltmq.protocols.grpc.http2.header_blocks import Field
from basaltmq.protocols.grpc.status import Outcome, Status, status_of, unescaped

_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_CONNECTIONS: Final = frozenset(["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"])
_PSEUDO: Final = frozenset([":method", ":scheme", ":path", ":authority"])


class RequestHead:
    """The header fields of a request. If `http_status` or `refusal` is set, the call is rejected with it."""

    __slots__ = ("authorization", "encoding", "fields", "http_status", "path", "refusal", "timeout_s")

    def __init__(self, given: Sequence[Field]) -> None:
        self.path = ""
        self.fields: tuple[Field, ...] = ()
        self.authorization: str | None = None
        self.encoding = "identity"
        self.timeout_s: float | None = None
        self.http_status = 0
        """HTTP status of the response if the request is not a gRPC request, else 0."""
        self.refusal: Outcome | None = None
        self._read(given)

    def _read(self, given: Sequence[Field]) -> None:
        pseudo: dict[str, str] = {}
        plain: dict[str, str] = {}
        for name, value in given:
            if name in _PSEUDO and name not in pseudo and not plain:
                pseudo[name] = value
            elif _NAME.fullmatch(name) is None or name in _CONNECTIONS or any(each in value for each in "\r\n\0"):
                self.http_status = 400
            else:
                plain[name] = value
        has_required = pseudo.keys() >= {":method", ":scheme", ":path"}
        if self.http_status or not has_required or plain.get("te", "trailers") not in {"", "trailers"}:
            self.http_status = 400
            return
        if pseudo[":method"] != "POST":
            self.http_status = 405
            return
        kind = plain.get("content-type", "")
        if kind != "application/grpc" and not kind.startswith(("application/grpc+proto", "application/grpc;")):
            self.http_status = 415
            return
        self.path = pseudo[":path"]
        self.fields = tuple((name, value) for name, value in given if name[0] != ":")
        self.authorization = plain.get("authorization")
        self._read_encoding(plain.get("grpc-encoding", "identity"))
        self._read_timeout(plain.get("grpc-timeout"))

    def _read_encoding(self, encoding: str) -> None:
        self.encoding = encoding
        if encoding not in ("identity", "gzip"):
            self.refusal = Outcome(
                Status.UNIMPLEMENTED,
                f"the message encoding {encoding!r:.40} is not supported; send identity or gzip",
                (("grpc-accept-encoding", "identity,gzip"),),
            )

    def _read_timeout(self, timeout: str | None) -> None:
        if timeout is None:
            return
        found = _TIMEOUT.fullmatch(timeout)
        if found is None:
            self.refusal = Outcome(Status.INVALID_ARGUMENT, f"grpc-timeout {timeout!r:.40} is not a valid timeout")
        else:
            self.timeout_s = int(found[1]) * _UNITS_S[found[2]]


class ResponseHead:
    """The header fields of a response: its head, its trailers, or both in one block."""

    __slots__ = ("encoding", "fields", "http_status", "outcome")

    def __init__(self, given: Sequence[Field]) -> None:
        found = dict(given)
        self.fields = tuple(given)
        self.http_status = found.get(":status", "")
        self.encoding = found.get("grpc-encoding", "identity")
        self.outcome: Outcome | None = None
        number = found.get("grpc-status")
        if number is not None:
            own = tuple((name, value) for name, value in given if not name.startswith((":", "grpc-")))
            self.outcome = Outcome(status_of(number), unescaped(found.get("grpc-message", "")), own)
