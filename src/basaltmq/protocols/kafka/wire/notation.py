"""Reads the definitions of APIs from text.

    18 ApiVersions 0-4 flexible 3+           key, name, versions that are served, first flexible version
      request                                the fields of the request
        client_software_name string 3+
      response
        error_code int16
        api_keys []                          an array of structs; the lines below it have their fields
            api_key int16

A field has a name, a type, and then, if they differ from the default:

    int32, []int32, [], {}     a type of schema.py, an array of it, an array of structs, a struct
    3+  or  3-5                versions that have the field
    ?  or  ?3                  null is allowed, in all versions or since this one
    =-1                        value when a version has no such field or the caller gives none
    tag:0                      number of a tagged field

The default -2147483648 means that authorized operations are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

from basaltmq.protocols.kafka.wire.schema import EVER, NEVER, Array, Field, Struct

_API: Final = re.compile(r"(\d+) (\w+) (\d+)-(\d+)(?: flexible (\d+)\+)?")
_FIELD: Final = re.compile(
    r" +(?P<name>\w+) (?P<shape>\[\]|\{\})?(?P<type>\w*)(?: (?P<since>\d+)(?:\+|-(?P<until>\d+)))?"
    r"(?: (?P<null>\?)(?P<null_since>\d*))?(?: =(?P<default>\S+))?(?: tag:(?P<tag>\d+))?"
)
_NAMED: Final[dict[str, Any]] = {"true": True, '""': ""}


class Api(NamedTuple):
    """An API: versions and schemas."""

    key: int
    name: str
    version_min: int
    version_max: int
    flexible_since: int
    request: Struct
    response: Struct


def read_apis(text: str) -> Iterator[Api]:
    """Yield the APIs that a text defines."""
    for block in text.strip().split("\n\n"):
        head, _, *lines = block.splitlines()
        found = _API.fullmatch(head)
        assert found is not None, head
        key, name, low, high, flexible = found.groups()
        end = lines.index("  response")
        request, response = _struct(lines[:end]), _struct(lines[end + 1 :])
        yield Api(int(key), name, int(low), int(high), int(flexible or EVER), request, response)


def _struct(lines: list[str]) -> Struct:
    """Build a struct. Lines with more indentation than the first belong to the field above them."""
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    starts = [at for at, line in enumerate(lines) if line[margin] != " "]
    return Struct(*(_field(lines[at], lines[at + 1 : end]) for at, end in pairwise([*starts, len(lines)])))


def _field(line: str, below: list[str]) -> Field:
    found = _FIELD.fullmatch(line)
    assert found is not None, line
    of: str | Struct = found["type"] or _struct(below)
    default = found["default"]
    return Field(
        found["name"],
        Array(of) if found["shape"] == "[]" else of,
        since=int(found["since"] or 0),
        until=int(found["until"] or EVER),
        null_since=int(found["null_since"] or 0) if found["null"] else EVER,
        default=None if default is None else _NAMED[default] if default in _NAMED else int(default),
        tag=NEVER if found["tag"] is None else int(found["tag"]),
    )
