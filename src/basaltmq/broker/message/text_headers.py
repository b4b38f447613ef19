"""Conversion of headers between AMQP and protocols with text headers.

A queue stores headers of gRPC and the embedded API as text (`Message.headers`), and AMQP properties as an envelope.
Both kinds of consumers can read both kinds of messages:

    text headers, no envelope ──> an envelope with a table of text ──> an AMQP consumer
    an envelope ──> the text, numbers and booleans of its table    ──> a gRPC consumer

Stored messages are not changed. Values without a text form (tables, lists, times, bytes) are omitted. Invalid envelopes
give no headers, because queues treat properties as opaque and other programs may store something else in them.
"""

from __future__ import annotations

from typing import Final

from basaltmq.broker.message.properties import Properties, decode_envelope, encode, parse
from basaltmq.errors import BasaltError

_NUMBERS: Final = (int, float)
_NO_ROUTE: Final = b"\0\0"
"""Empty exchange and routing key."""

_NAME_BYTES_MAX: Final = 255
"""Length of an AMQP short string."""


def envelope_of(headers: dict[str, str]) -> bytes:
    """Return the envelope for text headers; empty if AMQP can represent none of them."""
    table = {name: value for name, value in headers.items() if len(name.encode()) <= _NAME_BYTES_MAX}
    if not table:
        return b""
    properties = Properties()
    properties.set_headers(dict(table))
    return _NO_ROUTE + encode(properties)


def headers_of(envelope: bytes) -> dict[str, str]:
    """Return the headers of an envelope that have a text form."""
    if not envelope:
        return {}
    try:
        table = parse(decode_envelope(envelope)[2]).headers
    except BasaltError:
        return {}
    found: dict[str, str] = {}
    for name, value in table.items():
        if type(value) is str:
            found[name] = value
        elif type(value) is bool:
            found[name] = "true" if value else "false"
        elif type(value) in _NUMBERS:
            found[name] = str(value)
    return found
