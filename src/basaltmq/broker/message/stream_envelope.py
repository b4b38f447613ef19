"""AMQP envelopes of stream records.

Records published over AMQP carry their envelope in the single header `amqp`, which is used unchanged. Records of other
protocols (Kafka, the embedded API, Spark) become a message with

    headers      the record's headers: text if UTF-8, void if null, otherwise bytes; the last one of each name.
                 `x-stream-key`: the key, if any. `timestamp_in_ms`: the time, because AMQP's has seconds only
    timestamp    the time in seconds

AMQP has no null body, so a null value becomes an empty body.

Producers of other protocols may also use a header named `amqp`. If it is not a valid envelope, it is treated as an
ordinary header, because a client must never receive unreadable properties. All headers must fit into one AMQP frame;
headers that do not fit are omitted.
"""

from __future__ import annotations

from typing import Final

from basaltmq.broker.message.amqp_table import NAME_BYTES_MAX, Long, Table, Value
from basaltmq.broker.message.properties import Properties, encode, peek, properties_start
from basaltmq.errors import BasaltError
from basaltmq.log.batches.record import Record

ENVELOPE: Final = "amqp"
KEY_HEADER: Final = "x-stream-key"
TIME_HEADER: Final = "timestamp_in_ms"
OURS: Final = frozenset((KEY_HEADER, TIME_HEADER))
HEADERS_BYTES_MAX: Final = 64 << 10
"""Maximum size of header names and values: half of the default frame. Lengths and other properties need the rest."""

_NO_ROUTE: Final = b"\0\0"
"""Empty exchange and routing key."""


def envelope_of(record: Record) -> bytes:
    """Return the envelope of a record, or create one from its key, time and headers."""
    headers = record.headers
    if len(headers) == 1 and headers[0][0] == ENVELOPE:
        envelope = headers[0][1]
        if envelope and _is_valid(envelope):
            return envelope
    return _NO_ROUTE + encode(_properties_of(record))


def _is_valid(envelope: bytes) -> bool:
    try:
        peek(envelope[properties_start(envelope) :])
    except (BasaltError, IndexError):
        return False
    return True


def _properties_of(record: Record) -> Properties:
    table: Table = {}
    room = HEADERS_BYTES_MAX
    own = () if record.key is None else ((KEY_HEADER, record.key),)
    for name, value in (*(each for each in record.headers if each[0] not in OURS), *own):
        name_bytes = len(name.encode())
        size_bytes = name_bytes + len(value or b"")
        if name_bytes <= NAME_BYTES_MAX and size_bytes <= room:
            table[name] = None if value is None else _value(value)
            room -= size_bytes
    properties = Properties()
    if record.timestamp_ms >= 0:
        table[TIME_HEADER] = Long(record.timestamp_ms)
        properties.timestamp = record.timestamp_ms // 1000
    properties.set_headers(table)
    return properties


def _value(raw: bytes) -> Value:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw
