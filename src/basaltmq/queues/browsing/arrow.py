"""Messages of a queue as Arrow batches, with the column names of streams. Only this module of the plane needs pyarrow.

key        the fairness key
value      the payload
offset     enqueue time in ns, ascending; readers continue from it
timestamp  the same as a time
headers    the message's own; `amqp` is the envelope of an AMQP message, as in stream queues
messageId, attempts, priority
cursor     where to continue after this message (`browse`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from basaltmq.queues.browsing.browse import Page
from basaltmq.queues.message import Message

ENVELOPE: Final = "amqp"

_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])

SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("headers", pa.list_(pa.field("element", _HEADER))),
        pa.field("messageId", pa.binary()),
        pa.field("attempts", pa.int32()),
        pa.field("priority", pa.int32()),
        pa.field("cursor", pa.binary()),
    ]
)


def to_arrow(page: Page) -> pa.RecordBatch:
    messages = page.messages
    columns: list[Sequence[object]] = [
        [each.fairness_key.encode() for each in messages],
        [each.payload for each in messages],
        [each.enqueued_ns for each in messages],
        [each.enqueued_ns // 1000 for each in messages],
        [_headers(each) for each in messages],
        [each.id for each in messages],
        [each.attempts for each in messages],
        [each.priority for each in messages],
        page.cursors,
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _headers(message: Message) -> list[tuple[str, bytes]]:
    headers = [(name, value.encode()) for name, value in message.headers.items()]
    if message.properties:
        headers.append((ENVELOPE, message.properties))
    return headers
