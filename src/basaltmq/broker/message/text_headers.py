"""Headers of a message that crosses between AMQP and the protocols whose headers are text.

A queue keeps the headers of gRPC and the embedded API as text (`Message.headers`), and what AMQP says of a message as
an envelope in its properties, untouched. It is served over both, so each side is shown what the other has:

    text headers, no envelope ──> an envelope with a table of text ──> an AMQP consumer
    an envelope ──> what its table has of text, numbers and truths ──> a gRPC consumer

Nothing is rewritten on disk. Values that text cannot say (tables, lists, times, bytes) are left out, and so is whatever
is no envelope: properties are opaque to the queues, and others may keep something else in them.
"""

from __future__ import annotations

from typing import Final

from basaltmq.broker.message.properties import Properties, encode, open_envelope, parse
from basaltmq.errors import BasaltError

_NUMBERS: Final = (int, float)
_NOWHERE: Final = b"\0\0"
"""No exchange, no routing key."""

_NAME_BYTES_MAX: Final = 255
"""AMQP's short string."""


def envelope_of(headers: dict[str, str]) -> bytes:
    """The envelope of a message that has text headers and no envelope; empty if AMQP can say none of them."""
    table = {name: value for name, value in headers.items() if len(name.encode()) <= _NAME_BYTES_MAX}
    if not table:
        return b""
    properties = Properties()
    properties.set_headers(dict(table))
    return _NOWHERE + encode(properties)


def headers_of(envelope: bytes) -> dict[str, str]:
    """What an envelope's headers say in text."""
    if not envelope:
        return {}
    try:
        table = parse(open_envelope(envelope)[2]).headers
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
