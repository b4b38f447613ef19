"""Sections of a message.

    message  | header | delivery annotations | message annotations | bare message | footer |
    body     data sections, or sequence sections, or one value section
    bare     | properties | application properties | body |, which nobody may change between sender and receiver

`split` finds the sections of a message and validates each value. Only the header and the delivery annotations are meant
for the next node. Everything else is kept as it was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID

import msgspec

from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import DECODE_ERROR, Fault

HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION_PROPERTIES = range(0x70, 0x75)
DATA, SEQUENCE, VALUE, FOOTER = range(0x75, 0x79)

NAMES: Final = {
    "amqp:header:list": HEADER,
    "amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": SEQUENCE,
    "amqp:amqp-value:*": VALUE,
    "amqp:footer:map": FOOTER,
}

PROPERTY_NAMES: Final = (
    "message-id",
    "user-id",
    "to",
    "subject",
    "reply-to",
    "correlation-id",
    "content-type",
    "content-encoding",
    "absolute-expiry-time",
    "creation-time",
    "group-id",
    "group-sequence",
    "reply-to-group-id",
)
_ID: Final = (t.Ulong, UUID, bytes, str)
_PROPERTY_TYPES: Final[tuple[Any, ...]] = (_ID, bytes, str, str, str, _ID, str, str, int, int, str, int, str)
_MAPS: Final = (DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, APPLICATION_PROPERTIES, FOOTER)


class Sections(msgspec.Struct, gc=False):
    """The sections of a message. Spans are positions in the payload of its transfers."""

    header: list[Any] | None = None
    message_annotations: dict[Any, Any] | None = None
    annotations_span: tuple[int, int] = (0, 0)
    """The whole section, with its descriptor."""
    bare_at: int = 0
    """Start of the bare message."""
    properties: list[Any] | None = None
    application_properties: dict[Any, Any] | None = None
    body_at: int = 0
    """Start of the body sections."""
    body_end: int = 0
    data: tuple[int, int] | None = None
    """The content of the body, if it is one data section."""
    body_kind: int = 0
    """Kind of the first body section."""
    body_sections: int = 0


def walk(raw: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, start, start of the value, and end of each section. Only the sizes of values are validated."""
    while at < end:
        start = at
        if raw[at] != 0:
            raise Fault(DECODE_ERROR, f"a section of a message has no descriptor at byte {at}")
        if raw[at + 1 : at + 2] == b"\x53" and at + 3 < end:
            kind = raw[at + 2]
            at += 3
        else:
            descriptor, at = t.decode(raw, at + 1, end, 1)
            kind = NAMES.get(descriptor, 0) if isinstance(descriptor, str) else descriptor
        if not isinstance(kind, int) or not HEADER <= kind <= FOOTER:
            raise Fault(DECODE_ERROR, f"a message has an unknown section at byte {start}")
        if at >= end:
            raise Fault(DECODE_ERROR, "a section of a message has no value")
        code = raw[at]
        stop = t.span(raw, code, at + 1, end)[1] if code >= 0xA0 else t.decode(raw, at, end, 1)[1]
        yield kind, start, at, stop
        at = stop


def split(raw: bytes) -> Sections:
    """Find and validate the sections of a message."""
    found = Sections()
    end = len(raw)
    last = 0
    bare_at = footer_at = -1
    for kind, start, at, stop in walk(raw, 0, end):
        if kind < last or (kind == last and kind not in (DATA, SEQUENCE)):
            raise Fault(DECODE_ERROR, f"section 0x{kind:02x} of a message follows section 0x{last:02x}")
        if DATA <= kind <= VALUE and DATA <= last <= VALUE and kind != last:
            raise Fault(DECODE_ERROR, "the body of a message has sections of several kinds")
        last = kind
        if kind == DATA:
            if raw[at] not in (0xA0, 0xB0):
                raise Fault(DECODE_ERROR, "a data section of a message is not binary")
            content = (at + (2 if raw[at] == 0xA0 else 5), stop)
        else:
            value = t.decode(raw, at, stop)[0]
            _require(kind, value)
            if kind == HEADER:
                found.header = _header(value)
            elif kind == MESSAGE_ANNOTATIONS:
                found.message_annotations = value
                found.annotations_span = (start, stop)
            elif kind == PROPERTIES:
                found.properties = _properties(value)
            elif kind == APPLICATION_PROPERTIES:
                found.application_properties = value
        if kind >= PROPERTIES and bare_at < 0:
            bare_at = start
        if kind == FOOTER:
            footer_at = start
        if DATA <= kind <= VALUE:
            if not found.body_sections:
                found.body_at, found.body_kind = start, kind
                found.data = content if kind == DATA else None
            else:
                found.data = None
            found.body_sections += 1
            found.body_end = stop
    if not last:
        raise Fault(DECODE_ERROR, "a message has no sections")
    if not found.body_sections:
        # The specification demands a body, but Qpid Proton omits it if it is null.
        found.body_at = found.body_end = end if footer_at < 0 else footer_at
    found.bare_at = found.body_at if bare_at < 0 or bare_at == footer_at else bare_at
    return found


def _require(kind: int, value: Any) -> None:
    if kind in _MAPS:
        if not isinstance(value, dict):
            raise Fault(DECODE_ERROR, f"section 0x{kind:02x} of a message must be a map")
        if kind == APPLICATION_PROPERTIES and not all(isinstance(name, str) for name in value):
            raise Fault(DECODE_ERROR, "the names of application properties must be strings")
    elif kind != VALUE and not isinstance(value, list):
        raise Fault(DECODE_ERROR, f"section 0x{kind:02x} of a message must be a list")


_HEADER_TYPES: Final[tuple[type, ...]] = (bool, int, int, bool, int)


def _header(values: list[Any]) -> list[Any]:
    return _typed(values, _HEADER_TYPES, "header")


def _properties(values: list[Any]) -> list[Any]:
    return _typed(values, _PROPERTY_TYPES, "properties")


def _typed(values: list[Any], kinds: tuple[Any, ...], what: str) -> list[Any]:
    if len(values) > len(kinds):
        raise Fault(DECODE_ERROR, f"the {what} of a message have {len(values)} fields, at most {len(kinds)}")
    for value, kind in zip(values, kinds, strict=False):
        if value is not None and not isinstance(value, kind):
            raise Fault(DECODE_ERROR, f"the {what} of a message have a field of the wrong type")
    return values + [None] * (len(kinds) - len(values))


def section(kind: int, value: bytes) -> bytes:
    """Return a section with an encoded value."""
    return bytes((0, 0x53, kind)) + value


def data_head(size: int) -> bytes:
    """Return the start of a data section, whose content follows."""
    return b"\0\x53\x75" + (bytes((0xA0, size)) if size < 256 else b"\xb0" + size.to_bytes(4, "big"))
