"""Reads records as Arrow rows with the schema of Spark's Kafka connector.

`key`, `value`, `offset`, `timestamp` and `headers` are the store's arrays, not copies. `topic`, `partition` and
`timestampType` are constant: one array per piece, sliced to the length of each batch.

A read is limited by bytes, not by rows: such a read ends with a whole frame, and whole frames cost nothing per record.
The bytes for the wanted rows are estimated from previous reads. Budget: 0.3 us per row of 256 bytes from frames of 100
rows; two thirds of it are reading and checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from basaltmq.errors import DamagedFrameError, InvalidArgumentError, NotFoundError, OffsetOutOfRangeError
from basaltmq.streams.adapter import ShardInfo
from basaltmq.streams.view import StreamView
from pyspark_basalt.losses import check_kept, report_gone, report_recreated, skip_damage
from pyspark_basalt.memory import keep_freed
from pyspark_basalt.options import ReadOptions
from pyspark_basalt.plan import Piece

SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
)
HEADERS: Final = ", headers array<struct<key:string,value:binary>>"

BATCH_BYTES: Final = 16 << 20
"""Maximum bytes of one read. With large records, a batch has fewer rows than requested."""

COUNTED: Final = ("value", "key", "headers", "tags")
"""Columns that count towards the byte limit."""

ROWS_SLACK: Final = 4
"""Maximum factor by which a batch may exceed the requested rows, when records get smaller."""

CREATE_TIME: Final = 0
"""Kafka's `timestampType` for a timestamp from the producer."""

_US: Final = pa.timestamp("us", tz="UTC")
HEADERS_TYPE: Final = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)
_PLAIN: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", _US),
        pa.field("timestampType", pa.int32()),
    ]
)
_WITH_HEADERS: Final = _PLAIN.append(pa.field("headers", HEADERS_TYPE))


def read_piece(view: StreamView, piece: Piece, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Yield the records of a piece. Gaps from deletes, expiry and compaction are skipped."""
    keep_freed()
    try:
        info = _info(view, piece)
    except NotFoundError:
        report_gone(piece.topic, piece.partition, piece.begin, piece.end, options)
        return
    if is_recreated(piece, info, options):
        return
    offset = check_kept(piece.topic, piece.partition, piece.begin, piece.end, info, options)
    rows = _Rows(piece, options)
    record_bytes = info.size_bytes / max(1, info.records)
    while offset < piece.end:
        most = min(ROWS_SLACK * options.batch_rows, piece.end - offset)
        size_bytes = max(1, min(BATCH_BYTES, int(record_bytes * options.batch_rows)))
        try:
            found = view.read(piece.topic, piece.partition, offset, max_records=most, max_bytes=size_bytes)
        except OffsetOutOfRangeError:
            info = view.info(piece.topic, piece.partition)
            offset = check_kept(piece.topic, piece.partition, offset, piece.end, info, options)
            continue
        except DamagedFrameError as error:
            offset = skip_damage(piece.topic, piece.partition, error, options)
            continue
        if len(found):
            batch = found.arrow()
            if found.next_offset > piece.end:
                batch = _below(batch, piece.end)
            record_bytes = sum(batch.column(name).nbytes for name in COUNTED) / max(1, batch.num_rows)
            yield rows.batch(batch)
        if found.next_offset <= offset:
            check_kept(piece.topic, piece.partition, offset, piece.end, info, options)
            return
        offset = found.next_offset


def is_recreated(piece: Piece, info: ShardInfo, options: ReadOptions) -> bool:
    """Whether the topic was recreated after planning. Raises DataLossError unless the query accepts losses."""
    actual = str(info.meta.topic_id)
    if piece.topic_id in (None, actual):
        return False
    report_recreated(piece.topic, piece.partition, str(piece.topic_id), actual, options)
    return True


def _info(view: StreamView, piece: Piece) -> ShardInfo:
    """Return the partition. Refreshes the view if it is older than the plan."""
    try:
        info = view.info(piece.topic, piece.partition)
        if info.high_watermark >= piece.end and piece.shard in (None, info.meta.number):
            return info
    except (NotFoundError, InvalidArgumentError):
        # Created or extended after the last refresh. If it was deleted, the call below raises.
        pass
    view.refresh()
    return view.info(piece.topic, piece.partition)


def _below(batch: pa.RecordBatch, end: int) -> pa.RecordBatch:
    """Return the rows below an offset. After a gap, a read may return rows beyond the requested range."""
    offsets = batch.column("offset")
    count = batch.num_rows
    while count and offsets[count - 1].as_py() >= end:
        count -= 1
    return batch.slice(0, count)


class _Rows:
    """Builds the rows of one piece."""

    def __init__(self, piece: Piece, options: ReadOptions) -> None:
        self._piece = piece
        self._with_headers = options.include_headers
        self._repeated: tuple[Any, Any, Any] = self._repeat(0)

    def batch(self, records: pa.RecordBatch) -> pa.RecordBatch:
        count = records.num_rows
        if count > len(self._repeated[0]):
            self._repeated = self._repeat(count)
        topic, partition, timestamp_type = (column.slice(0, count) for column in self._repeated)
        columns = [
            records.column("key"),
            records.column("value"),
            topic,
            partition,
            records.column("offset"),
            records.column("timestamp").cast(_US),
            timestamp_type,
        ]
        if not self._with_headers:
            return pa.RecordBatch.from_arrays(columns, schema=_PLAIN)
        columns.append(records.column("headers").cast(HEADERS_TYPE))
        return pa.RecordBatch.from_arrays(columns, schema=_WITH_HEADERS)

    def _repeat(self, count: int) -> tuple[Any, Any, Any]:
        return (
            pa.repeat(pa.scalar(self._piece.topic, pa.string()), count),
            pa.repeat(pa.scalar(self._piece.partition, pa.int32()), count),
            pa.repeat(pa.scalar(CREATE_TIME, pa.int32()), count),
        )
