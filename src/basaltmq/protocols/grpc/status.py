"""How a call ended, as gRPC says it: a number, a text, and fields of our own beside them."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from basaltmq.protocols.grpc.http2.header_blocks import Field, encode

TEXT_CHARACTERS_MAX: Final = 1_024
"""Of an error's text; escaped it is three times as long at worst, and has to fit a client's limit for all fields."""

_PLAIN: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"
"""What `quote` would escape and gRPC does not: all that is printable but the percent sign."""


class Status(enum.IntEnum):
    """The codes of gRPC."""

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
    """The end of a call."""

    status: Status
    text: str = ""
    fields: tuple[Field, ...] = ()


def trailer(outcome: Outcome) -> bytes:
    """The header block that ends a call."""
    found = [("grpc-status", str(int(outcome.status)))]
    if outcome.text:
        found.append(("grpc-message", escaped(outcome.text[:TEXT_CHARACTERS_MAX])))
    return encode([*found, *outcome.fields])


def escaped(text: str) -> str:
    """UTF-8 with everything that is not printable ASCII, and the percent sign, as %XX."""
    return quote(text, safe=_PLAIN, errors="replace")


def unescaped(text: str) -> str:
    return unquote(text, errors="replace")


def status_of(number: str) -> Status:
    """The status of this number; UNKNOWN for any that is none."""
    try:
        return Status(int(number))
    except ValueError:
        return Status.UNKNOWN
