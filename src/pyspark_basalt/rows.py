"""Records as rows of Kafka's schema, in Arrow.

The reader makes batches of what the store holds: `key`, `value`, `offset`, `timestamp` and `headers` are the store's
own arrays; `topic`, `partition` and `timestampType` are one value each, repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from basaltmq.errors import InvalidArgumentError, NotFoundError, OffsetOutOfRangeError
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.view import StreamView
from pyspark_basalt.options import ReadOptions
from pyspark_basalt.plan import Piece, check_kept

SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
)
HEADERS: Final = ", headers array<struct<key:string,value:binary>>"

BATCH_BYTES: Final = 16 << 20
"""Bytes of one read; with large records a batch has fewer rows than asked for."""

CREATE_TIME: Final = 0
"""Kafka's `timestampType` of a time the producer gave."""

_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_PLAIN: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
    ]
)
_WITH_HEADERS: Final = _PLAIN.append(pa.field("headers", pa.list_(pa.field("element", _HEADER))))


def read_piece(view: StreamView, piece: Piece, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """The records of a piece; gaps left by deletes, expiry and compaction are passed over."""
    info = _info(view, piece)
    offset = check_kept(piece.topic, piece.partition, piece.begin, piece.end, info, options)
    while offset < piece.end:
        rows = min(options.batch_rows, piece.end - offset)
        try:
            found = view.read(piece.topic, piece.partition, offset, max_records=rows, max_bytes=BATCH_BYTES)
        except OffsetOutOfRangeError:
            info = view.info(piece.topic, piece.partition)
            offset = check_kept(piece.topic, piece.partition, offset, piece.end, info, options)
            continue
        if len(found):
            batch = found.arrow()
            if found.next_offset > piece.end:
                batch = _below(batch, piece.end)
            yield _row_batch(batch, piece, options)
        if found.next_offset <= offset:
            check_kept(piece.topic, piece.partition, offset, piece.end, info, options)
            return
        offset = found.next_offset


def _info(view: StreamView, piece: Piece) -> ShardInfo:
    """The partition as it is; the view may be older than the plan, and know another topic of the name, or none."""
    try:
        info = view.info(piece.topic, piece.partition)
        if info.high_watermark >= piece.end and piece.shard in (None, info.meta.number):
            return info
    except (NotFoundError, InvalidArgumentError):
        # Made, or given more partitions, since the view was last used; if it is gone, that is told below.
        pass
    view.refresh()
    return view.info(piece.topic, piece.partition)


def _below(batch: pa.RecordBatch, end: int) -> pa.RecordBatch:
    """What lies below an offset: after holes, as many rows reach further than asked for."""
    offsets = batch.column("offset")
    count = batch.num_rows
    while count and offsets[count - 1].as_py() >= end:
        count -= 1
    return batch.slice(0, count)


def _row_batch(batch: pa.RecordBatch, piece: Piece, options: ReadOptions) -> pa.RecordBatch:
    count = batch.num_rows
    columns = [
        batch.column("key"),
        batch.column("value"),
        pa.repeat(pa.scalar(piece.topic, pa.string()), count),
        pa.repeat(pa.scalar(piece.partition, pa.int32()), count),
        batch.column("offset"),
        batch.column("timestamp").cast(pa.timestamp("us", tz="UTC")),
        pa.repeat(pa.scalar(CREATE_TIME, pa.int32()), count),
    ]
    if not options.include_headers:
        return pa.RecordBatch.from_arrays(columns, schema=_PLAIN)
    columns.append(batch.column("headers").cast(_WITH_HEADERS.field("headers").type))
    return pa.RecordBatch.from_arrays(columns, schema=_WITH_HEADERS)
