"""Conversion between messages of AMQP 1.0 and the broker's messages, which have properties as in AMQP 0-9-1.

    AMQP 1.0                                broker
    header: durable, priority, ttl          delivery mode (2 unless durable is false), priority, expiration
    message id, correlation id, user id,    properties of the same name, as text
    reply to, content type and encoding
    creation time (ms)                      timestamp (s)
    group id                                app id
    application properties                  headers
    annotation x-basic-type                 type
    annotations x-cc; other ones with x-    headers CC; of the same name
    body: one data section                  body
    body: anything else                     body as encoded, type amqp-1.0
    everything but header and data          header x-amqp-1.0

The header `x-amqp-1.0` keeps the encoded sections around the body, so a receiver gets the bare message byte for byte:

    | flags u8 | size u32 | message annotations | size u32 | sections before the body | sections after the body |

It is omitted if there are no such sections. A message without it was published by another protocol; its properties
are converted back. Only application properties and annotations with a counterpart in a header table are visible to
other protocols.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Any, Final, NamedTuple
from uuid import UUID

from basaltmq.broker.message import amqp_table, properties
from basaltmq.broker.message.amqp_table import NAME_BYTES_MAX, Table
from basaltmq.broker.message.properties import BARE_HEADER, EXPIRATION_MS_MAX, PERSISTENT, Properties
from basaltmq.broker.publishing.router import DELIVERY_TIME
from basaltmq.protocols.amqp10.wire import sections as s
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import MESSAGE_SIZE, Fault

BODY_TYPE: Final = "amqp-1.0"
"""The type property of a message whose body is encoded."""

SECTIONS_BYTES_MAX: Final = 256 << 10
"""Limit of the sections around the body of a message."""

HEADERS_BYTES_MAX: Final = 32 << 10
"""Larger application properties and annotations are not converted to headers, which must fit into a frame of 0-9-1."""

ORIGIN: Final = "x-opt-publisher-container"
"""Header with the container that has sent a message, if that container has a link with a no-local filter."""

JMS_DESTINATION: Final = "x-opt-jms-dest"
_JMS_TOPICS: Final = (1, 3)
"""Annotation with the kind of a destination, and its values for a topic and a temporary topic."""

KNOWN_MAX: Final = 1024
KNOWN_BYTES_MAX: Final = 1024
"""Limits of the caches of converted sections: entries, and bytes of each."""

_CANONICAL, _WIDE, _COMPLETE = range(3)
"""How the body begins: with the shortest data section, with one of a wide size, or it contains its sections."""

_U32: Final = Struct(">I")
_TRANSIENT: Final = b"\x10\0\1"
_PERSISTENT: Final = b"\x10\0\2"
_DEATHS: Final = ("x-death", "x-first-death-", "x-last-death-", "x-stream-offset", "x-delivery-count")
"""Headers that the broker adds to a stored message."""

_I64_MAX: Final = (1 << 63) - 1
_I64_MIN: Final = -(1 << 63)


class Received(NamedTuple):
    """A received message for the broker."""

    properties: bytes
    body: bytes
    to: str | None = None
    subject: str | None = None
    is_to_topic: bool = False
    """The property `to` names a topic of JMS."""


class Incoming:
    """Converts received messages, with a cache, because one sender's messages mostly have equal properties."""

    __slots__ = ("_known", "_last", "_last_head")

    def __init__(self) -> None:
        self._known: dict[bytes, Received] = {}
        self._last_head = b""
        self._last = Received(_PERSISTENT, b"")
        """The last conversion, of a message whose sections before its data were `_last_head`."""

    def convert(self, raw: bytes) -> Received:
        """Convert a message."""
        head = self._last_head
        if raw.startswith(head):
            body = _data_after(raw, len(head))
            if body is not None:
                known = self._last
                return Received(known.properties, body, known.to, known.subject, known.is_to_topic)
        start = next((start for kind, start, _, _ in s.walk(raw, 0, len(raw)) if kind >= s.DATA), len(raw))
        body = _data_after(raw, start)
        if body is None or start > KNOWN_BYTES_MAX:
            return convert(raw)
        head = raw[:start]
        found = self._known.get(head)
        if found is None:
            found = convert(raw)._replace(body=b"")
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[head] = found
        self._last_head, self._last = head, found
        return Received(found.properties, body, found.to, found.subject, found.is_to_topic)


def _data_after(raw: bytes, at: int) -> bytes | None:
    """Return the content of a data section in its shortest form that fills the rest of a message; otherwise None."""
    if raw[at : at + 3] != b"\0\x53\x75":
        return None
    code = raw[at + 3 : at + 4]
    if code == b"\xa0":
        at += 5
        return raw[at:] if at <= len(raw) and at + raw[at - 1] == len(raw) else None
    if code == b"\xb0":
        size = int.from_bytes(raw[at + 4 : at + 8], "big")
        return raw[at + 8 :] if size >= 256 and at + 8 + size == len(raw) else None
    return None


def convert(raw: bytes) -> Received:
    """Convert a received message."""
    found = s.split(raw)
    given = found.properties or [None] * len(s.PROPERTY_NAMES)
    before = raw[found.bare_at : found.body_at]
    after = raw[found.body_end :]
    annotations = raw[slice(*found.annotations_span)]
    if len(before) + len(after) + len(annotations) > SECTIONS_BYTES_MAX:
        raise Fault(MESSAGE_SIZE, f"the sections around the body of a message exceed {SECTIONS_BYTES_MAX} bytes")
    flags, body = _COMPLETE, raw[found.body_at : found.body_end]
    if found.data is not None and body[:3] == b"\0\x53\x75":
        at, stop = found.data
        flags = _WIDE if body[3] == 0xB0 and stop - at < 256 else _CANONICAL
        body = raw[at:stop]
    if not (before or after or annotations or flags or found.header):
        return Received(_PERSISTENT, body)
    made = _broker_properties(given, found)
    if flags == _COMPLETE:
        made.type = BODY_TYPE
    headers: Table = {}
    if len(before) + len(annotations) <= HEADERS_BYTES_MAX:
        _headers(found, made, headers)
    if before or after or annotations or flags:
        headers[BARE_HEADER] = KeptSections(flags, annotations, before, after).encode()
    if headers:
        made.set_headers(headers)
    return Received(properties.encode(made), body, given[2], given[3], _is_to_topic(found.message_annotations))


def _is_to_topic(annotations: Mapping[Any, Any] | None) -> bool:
    return annotations is not None and annotations.get(JMS_DESTINATION) in _JMS_TOPICS


def _broker_properties(given: list[Any], found: s.Sections) -> Properties:
    header = found.header or [None] * 5
    made = Properties(delivery_mode=1 if header[0] is False else PERSISTENT)
    if header[1] is not None:
        made.priority = min(255, max(0, int(header[1])))
    if header[2] is not None:
        made.expiration = str(min(int(header[2]), EXPIRATION_MS_MAX))
    made.message_id = _text(given[0])
    made.user_id = _text(given[1])
    made.reply_to = _text(given[4])
    made.correlation_id = _text(given[5])
    made.content_type = _text(given[6])
    made.content_encoding = _text(given[7])
    if given[9] is not None and given[9] >= 0:
        made.timestamp = int(given[9]) // 1000
    made.app_id = _text(given[10])
    return made


def _text(value: Any) -> str | None:
    """Return a value as a short string; None if it is too long."""
    if value is None:
        return None
    text = value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)
    return text if len(text.encode(errors="surrogateescape")) <= NAME_BYTES_MAX else None


def _headers(found: s.Sections, made: Properties, headers: Table) -> None:
    for name, value in (found.message_annotations or {}).items():
        if not isinstance(name, str):
            continue
        if name == "x-basic-type" and isinstance(value, str):
            made.type = _text(value)
        elif name == "x-cc" and isinstance(value, list) and all(isinstance(each, str) for each in value):
            headers["CC"] = [str(each) for each in value]
        elif name.startswith("x-") and name != BARE_HEADER:
            # A delivery time needs its milliseconds.
            _add(headers, name, int(value) if name == DELIVERY_TIME and isinstance(value, int) else value)
    for name, value in (found.application_properties or {}).items():
        if name not in ("CC", "BCC", BARE_HEADER):
            _add(headers, name, value)


def _add(headers: Table, name: str, value: Any) -> None:
    """Add a header, if its value has a counterpart in a header table."""
    if len(name.encode()) > NAME_BYTES_MAX:
        return
    if isinstance(value, t.Timestamp):
        if value >= 0:
            headers[name] = amqp_table.Timestamp(value // 1000)
    elif value is None or isinstance(value, bool):
        headers[name] = value
    elif isinstance(value, int):
        if _I64_MIN <= value <= _I64_MAX:
            headers[name] = amqp_table.Long(value) if type(value) is int else int(value)
    elif isinstance(value, float):
        headers[name] = float(value)
    elif isinstance(value, str | UUID):
        headers[name] = str(value)
    elif isinstance(value, bytes) and not isinstance(value, t.Decimal):
        headers[name] = value


def with_origin(raw: bytes, container: str) -> bytes:
    """Return the properties of a message with the container that has sent it."""
    parsed = properties.parse(raw)
    parsed.headers_raw = amqp_table.edit(parsed.headers_raw or amqp_table.EMPTY, {ORIGIN: container})
    return properties.encode(parsed)


def with_annotations(envelope: bytes, given: dict[Any, Any]) -> bytes:
    """Return the envelope of a message with message annotations added or replaced.

    They become headers too, if their names start with `x-`. If the result is too large, nothing changes.
    """
    if not envelope:
        # Published without properties by another protocol.
        envelope = properties.EMPTY_ENVELOPE
    start = properties.properties_start(envelope)
    parsed = properties.parse(envelope[start:])
    headers = parsed.headers if parsed.headers_raw is not None else {}
    kept = kept_sections(headers.get(BARE_HEADER))
    changed: Table = {}
    for name, value in given.items():
        if isinstance(name, str) and name.startswith("x-") and name != BARE_HEADER:
            _add(changed, str(name), value)
    if kept is not None:
        annotations = t.decode(kept.annotations, 3, len(kept.annotations))[0] if kept.annotations else {}
        encoded = s.section(s.MESSAGE_ANNOTATIONS, t.encode({**annotations, **given}))
        changed[BARE_HEADER] = kept._replace(annotations=encoded).encode()
    parsed.headers_raw = amqp_table.edit(parsed.headers_raw or amqp_table.EMPTY, changed)
    return envelope if len(parsed.headers_raw) > SECTIONS_BYTES_MAX else envelope[:start] + properties.encode(parsed)


class KeptSections(NamedTuple):
    """The sections of a message around its body, as they were received."""

    flags: int
    annotations: bytes
    before: bytes
    after: bytes

    def encode(self) -> bytes:
        """Return the value of the header `x-amqp-1.0`."""
        sizes = _U32.pack(len(self.annotations)), _U32.pack(len(self.before))
        return b"".join((bytes((self.flags,)), sizes[0], self.annotations, sizes[1], self.before, self.after))


def kept_sections(raw: object) -> KeptSections | None:
    """Decode the header `x-amqp-1.0`. Return None if it is not valid: any publisher can set it."""
    if not isinstance(raw, bytes) or len(raw) < 9 or raw[0] > _COMPLETE:
        return None
    middle = 5 + int(_U32.unpack_from(raw, 1)[0])
    if middle + 4 > len(raw):
        return None
    end = middle + 4 + int(_U32.unpack_from(raw, middle)[0])
    if end > len(raw):
        return None
    kept = KeptSections(raw[0], raw[5:middle], raw[middle + 4 : end], raw[end:])
    try:
        found = s.split(kept.annotations + kept.before + s.data_head(0) + kept.after)
    except Fault:
        return None
    spans = (found.annotations_span[1], found.body_sections, found.header)
    return kept if spans == (len(kept.annotations), 1, None) else None


class _Shape(NamedTuple):
    """The encoded parts that messages with the same envelope share."""

    header: bytes
    before: bytes
    flags: int
    after: bytes
    properties: Properties


class Outgoing:
    """Encodes messages for receivers, with a cache, because messages of one queue often have equal envelopes."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, _Shape] = {}

    def encode(self, envelope: bytes, body: bytes, redelivered: bool, attempts: int = 0) -> bytes:
        """Return the payload of a delivery."""
        shape = self._known.get(envelope)
        if shape is None:
            shape = _shape(envelope, body)
            if len(envelope) <= KNOWN_BYTES_MAX and shape.flags == _CANONICAL:
                if len(self._known) >= KNOWN_MAX:
                    self._known.clear()
                self._known[envelope] = shape
        header = shape.header if not redelivered else _header(shape.properties, attempts)
        if shape.flags == _CANONICAL:
            return b"".join((header, shape.before, s.data_head(len(body)), body, shape.after))
        head = b"\0\x53\x75\xb0" + _U32.pack(len(body)) if shape.flags == _WIDE else b""
        return b"".join((header, shape.before, head, body, shape.after))


def _header(found: Properties, attempts: int | None) -> bytes:
    """Encode the header of a delivery. `attempts` is None for the first one."""
    fields = b"".join(
        (
            b"\x41" if found.delivery_mode == PERSISTENT else b"\x42",
            b"\x40" if found.priority is None else bytes((0x50, found.priority)),
            b"\x40" if found.expiration is None else _ttl(found.expiration),
            b"\x41" if attempts is None else b"\x42",
            t.encode_uint(attempts or 0),
        )
    )
    return s.section(s.HEADER, t.encode_compound(0xC0, 5, fields))


def _ttl(expiration: str) -> bytes:
    return t.encode_uint(min(int(expiration), 0xFFFF_FFFF)) if expiration.isdigit() else b"\x40"


def _shape(envelope: bytes, body: bytes) -> _Shape:
    exchange, routing_key, raw = properties.decode_envelope(envelope)
    found = properties.parse(raw)
    annotations: dict[Any, Any] = {t.Symbol("x-exchange"): exchange, t.Symbol("x-routing-key"): routing_key}
    headers: Mapping[str, Any] = {} if found.headers_raw is None else found.headers
    kept = kept_sections(headers.get(BARE_HEADER))
    if kept is not None and kept.flags == _COMPLETE and not _is_body(body):
        kept = None
    if kept is not None:
        if kept.annotations:
            annotations.update(t.decode(kept.annotations, 3, len(kept.annotations))[0])
        for name, value in headers.items():
            if name.startswith(_DEATHS):
                annotations[t.Symbol(name)] = _value(value)
        before = s.section(s.MESSAGE_ANNOTATIONS, t.encode(annotations)) + kept.before
        return _Shape(_header(found, None), before, kept.flags, kept.after, found)
    if found.type is not None:
        annotations[t.Symbol("x-basic-type")] = _clean(found.type)
    applied: dict[str, Any] = {}
    for name, value in headers.items():
        if name == BARE_HEADER:
            continue
        if name.startswith("x-") and name.isascii():
            annotations[t.Symbol(name)] = _value(value)
        elif not isinstance(value, list | dict):
            applied[_clean(name)] = _value(value)
    before = s.section(s.MESSAGE_ANNOTATIONS, t.encode(annotations)) + _properties_section(found)
    if applied:
        before += s.section(s.APPLICATION_PROPERTIES, t.encode(applied))
    flags = _COMPLETE if found.type == BODY_TYPE and _is_body(body) else _CANONICAL
    return _Shape(_header(found, None), before, flags, b"", found)


def _is_body(raw: bytes) -> bool:
    """Whether bytes are the body sections of a message. A message without a body has none."""
    if not raw:
        return True
    try:
        found = s.split(raw)
    except Fault:
        return False
    return found.body_at == 0 and found.body_end == len(raw)


def _properties_section(found: Properties) -> bytes:
    values: list[Any] = [
        None if found.message_id is None else _clean(found.message_id),
        None if found.user_id is None else found.user_id.encode(errors="surrogateescape"),
        None,
        None,
        None if found.reply_to is None else _clean(found.reply_to),
        None if found.correlation_id is None else _clean(found.correlation_id),
        _symbol(found.content_type),
        _symbol(found.content_encoding),
        None,
        None if found.timestamp is None else t.Timestamp(min(found.timestamp * 1000, _I64_MAX)),
        None if found.app_id is None else _clean(found.app_id),
    ]
    while values and values[-1] is None:
        values.pop()
    return s.section(s.PROPERTIES, t.encode(values)) if values else b""


def _clean(text: str) -> str:
    """Return text without surrogates, which stand for bytes that are not UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _symbol(text: str | None) -> t.Symbol | None:
    return t.Symbol(text) if text is not None and text.isascii() else None


def _value(value: Any) -> Any:
    """Return a value of a header table as a value of AMQP 1.0."""
    if isinstance(value, amqp_table.Timestamp):
        return t.Timestamp(min(value * 1000, _I64_MAX))
    if isinstance(value, bool) or value is None or isinstance(value, float | bytes):
        return value
    if isinstance(value, int):
        return int(value) if value <= _I64_MAX else t.Ulong(value)
    if isinstance(value, Mapping):
        return {_clean(name): _value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_value(each) for each in value]
    return _clean(str(value))
