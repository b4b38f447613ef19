"""What an AMQP consumer of a stream is shown of a record: an envelope, made or kept.

Records that came over AMQP carry their envelope in the one header `amqp`, and it is handed on as it came. Records that
came through another door (Kafka, the embedded API, Spark) are shown as a message with

    headers      theirs: text where it is UTF-8, void where it is null, else bytes; of several of a name the last.
                 `x-stream-key`: the key, if there is one. `timestamp_in_ms`: the time, which AMQP has in seconds only
    timestamp    the time in seconds

AMQP has no null body: the body of a null value is empty.

A producer of another door may call a header `amqp` too. What is no envelope is taken for any other header: a client
must never be sent properties that it cannot read. Headers are shown as long as they fit into the one frame AMQP has for
them; one that does not is left out.
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
"""Names and values of headers: half of the largest frame, the rest for lengths and the other properties."""

_NOWHERE: Final = b"\0\0"
"""No exchange, no routing key."""


def envelope_of(record: Record) -> bytes:
    """The envelope a record came with, or one that says what can be said of it."""
    headers = record.headers
    if len(headers) == 1 and headers[0][0] == ENVELOPE:
        envelope = headers[0][1]
        if envelope and _is_sound(envelope):
            return envelope
    return _NOWHERE + encode(_told(record))


def _is_sound(envelope: bytes) -> bool:
    try:
        peek(envelope[properties_start(envelope) :])
    except (BasaltError, IndexError):
        return False
    return True


def _told(record: Record) -> Properties:
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
