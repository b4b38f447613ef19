"""Lifecycle events of queues as rows: expands the blocks of the internal topic `__events`, one row per event.

The option `explodeEvents` selects it. `basaltmq.queues.events.event` describes the columns. An unreadable record fails
the query; no event is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from basaltmq.queues.events.event import decode_events

SCHEMA: Final = (
    "kind string, queue string, messageId binary, fairnessKey string, priority int, atNs bigint, "
    "enqueuedNs bigint, attempts int, consumer string, offset bigint"
)

_COLUMNS: Final = pa.schema(
    [
        pa.field("kind", pa.string()),
        pa.field("queue", pa.string()),
        pa.field("messageId", pa.binary()),
        pa.field("fairnessKey", pa.string()),
        pa.field("priority", pa.int32()),
        pa.field("atNs", pa.int64()),
        pa.field("enqueuedNs", pa.int64()),
        pa.field("attempts", pa.int32()),
        pa.field("consumer", pa.string()),
        pa.field("offset", pa.int64()),
    ]
)


def explode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the events of records, one batch per record."""
    for batch in batches:
        for value, offset in zip(batch.column("value").to_pylist(), batch.column("offset").to_pylist(), strict=True):
            rows = [
                (
                    event.kind.name.lower(),
                    event.queue,
                    event.message_id,
                    event.fairness_key,
                    event.priority,
                    event.at_ns,
                    event.enqueued_ns,
                    event.attempts,
                    event.consumer,
                    offset,
                )
                for event in decode_events(value)
            ]
            if rows:
                columns = zip(*rows, strict=True)
                arrays = [pa.array(column, field.type) for column, field in zip(columns, _COLUMNS, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=_COLUMNS)
