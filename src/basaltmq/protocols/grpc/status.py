"""The outcome of a gRPC call: status code, message, and trailing metadata."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from basaltmq.protocols.grpc.http2.header_blocks import Field, encode

TEXT_CHARACTERS_MAX: Final = 1_024
"""Limit for an error text. Escaping triples it at worst, and it must fit the client's header list limit."""

_PLAIN: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"
"""Characters that `quote` would escape and gRPC does not: all printable ASCII except the percent sign."""


ERROR_CODE_KEY: Final = "basalt-error"
"""Trailing metadata with the code of a Basalt error."""


class Status(enum.IntEnum):
    """gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Outcome(NamedTuple):
    """How a call ended. `fields` is trailing metadata."""

    status: Status
    text: str = ""
    fields: tuple[Field, ...] = ()


def trailer(outcome: Outcome) -> bytes:
    """Return the trailer block of a call."""
    found = [("grpc-status", str(int(outcome.status)))]
    if outcome.text:
        found.append(("grpc-message", escaped(outcome.text[:TEXT_CHARACTERS_MAX])))
    return encode([*found, *outcome.fields])


def escaped(text: str) -> str:
    """Percent-encode the UTF-8 bytes that are not printable ASCII, and the percent sign."""
    return quote(text, safe=_PLAIN, errors="replace")


def unescaped(text: str) -> str:
    return unquote(text, errors="replace")


def status_of(number: str) -> Status:
    """Return the status with this number, or UNKNOWN."""
    try:
        return Status(int(number))
    except ValueError:
        return Status.UNKNOWN
