"""Reads records from a broker, as rows of the schema in rows.py."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from basaltmq.errors import DamagedFrameError, NotFoundError, RemoteError
from basaltmq.pipeline.remote import RemoteView
from basaltmq.streams.adapter import ShardInfo
from pyspark_basalt.losses import check_kept, report_gone, skip_damage
from pyspark_basalt.options import ReadOptions
from pyspark_basalt.plan import Piece
from pyspark_basalt.rows import CREATE_TIME, HEADERS_TYPE, is_recreated

OUT_OF_RANGE = "offset_out_of_range"
"""Error code for an offset that retention deleted."""


def read_remote(view: RemoteView, piece: Piece, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Yield the records of a piece. Gaps from deletes, expiry and compaction are skipped."""
    begin = piece.begin
    while True:
        info = _info(view, piece, options)
        if info is None:
            return
        begin = check_kept(piece.topic, piece.partition, begin, piece.end, info, options)
        try:
            for batch in view.records(piece.topic, piece.partition, begin, piece.end, headers=options.include_headers):
                begin = batch.column("offset")[-1].as_py() + 1
                yield from _cut(_rows(batch, piece, options), options.batch_rows)
            # The broker reads by name. Check that the topic was not recreated meanwhile.
            _info(view, piece, options)
            return
        except DamagedFrameError as error:
            begin = skip_damage(piece.topic, piece.partition, error, options)
        except RemoteError as error:
            if error.code != OUT_OF_RANGE:
                raise
        except NotFoundError:
            # Deleted during the read. The next `_info` reports it.
            pass


def _info(view: RemoteView, piece: Piece, options: ReadOptions) -> ShardInfo | None:
    """Return the partition. None if its topic was deleted or recreated and the query accepts that."""
    view.refresh()
    try:
        info = view.info(piece.topic, piece.partition)
    except NotFoundError:
        report_gone(piece.topic, piece.partition, piece.begin, piece.end, options)
        return None
    return None if is_recreated(piece, info, options) else info


def _cut(batch: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    for at in range(0, batch.num_rows, rows_max):
        yield batch.slice(at, rows_max)


def _rows(batch: pa.RecordBatch, piece: Piece, options: ReadOptions) -> pa.RecordBatch:
    count = batch.num_rows
    columns = {
        "key": batch.column("key"),
        "value": batch.column("value"),
        "topic": pa.repeat(pa.scalar(piece.topic, pa.string()), count),
        "partition": pa.repeat(pa.scalar(piece.partition, pa.int32()), count),
        "offset": batch.column("offset"),
        "timestamp": batch.column("timestamp").cast(pa.timestamp("us", tz="UTC")),
        "timestampType": pa.repeat(pa.scalar(CREATE_TIME, pa.int32()), count),
    }
    if options.include_headers:
        columns["headers"] = batch.column("headers").cast(HEADERS_TYPE)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
