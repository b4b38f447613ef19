"""Splits the rows of a task into chunks per topic and partition, in Arrow.

Rows keep their order within a partition. Each distinct key is hashed once. Records without a key go round-robin to the
partitions, many at a time, as in the embedded API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from basaltmq.errors import InvalidArgumentError
from basaltmq.streams.imports.stage import CHUNK_BYTES, CHUNK_RECORDS, SCHEMA
from basaltmq.streams.partitions import partition_of_key

COLLECTED_ROWS: Final = 100_000
COLLECTED_BYTES: Final = 64 << 20
"""Rows that are split at once: enough for full chunks of a few partitions, within a task's memory."""


class ChunkSplitter:
    """Splits the rows of one task."""

    def __init__(self, partitions_of: Callable[[str], int], topic: str | None, stamp_ms: int, turn: int) -> None:
        """`topic` applies to all rows; None uses the column. `turn` selects the first partition for records without a
        key."""
        self._partitions_of = partitions_of
        self._topic = topic
        self._stamp_ms = stamp_ms
        self._turn = turn

    def chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        """Yield (topic, partition, records with the schema of the stage)."""
        for table in _collect(batches):
            for topic, rows in self._by_topic(table):
                yield from self._by_partition(topic, rows)

    def _by_topic(self, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
        if self._topic is not None:
            yield self._topic, table
            return
        names = table.column("topic")
        if names.null_count:
            raise InvalidArgumentError("a row has no topic; set the column topic, or the option topic")
        for name in names.unique().to_pylist():
            yield name, table.filter(pc.equal(names, name))

    def _by_partition(self, topic: str, rows: pa.Table) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        count = self._partitions_of(topic)
        staged = self._staged(rows)
        if count == 1 and "partition" not in rows.column_names:
            yield from _pieces(topic, 0, staged)
            return
        chosen = self._chosen(topic, rows, staged.column("key"), count)
        for number in sorted(chosen.unique().to_pylist()):
            yield from _pieces(topic, number, staged.filter(pc.equal(chosen, number)))

    def _chosen(self, topic: str, rows: pa.Table, keys: pa.ChunkedArray, count: int) -> pa.Array:
        encoded = keys.combine_chunks().dictionary_encode()
        by_key = pa.array([partition_of_key(key, count) for key in encoded.dictionary.to_pylist()], pa.int32())
        chosen = by_key.take(encoded.indices)
        if "partition" in rows.column_names:
            given = rows.column("partition").combine_chunks().cast(pa.int32())
            beyond = pc.filter(given, pc.or_(pc.less(given, 0), pc.greater_equal(given, count)))
            if len(beyond):
                raise InvalidArgumentError(f"topic {topic!r} has partitions 0 to {count - 1}, not {beyond[0]}")
            chosen = pc.coalesce(given, chosen)
        if chosen.null_count:
            chosen = pc.fill_null(chosen, pa.scalar(self._turn % count, pa.int32()))
            self._turn += 1
        return chosen

    def _staged(self, rows: pa.Table) -> pa.Table:
        columns = [
            self._binary(rows, "key"),
            self._binary(rows, "value"),
            self._headers(rows),
            self._times(rows),
        ]
        return pa.table(columns, schema=SCHEMA)

    def _binary(self, rows: pa.Table, name: str) -> pa.ChunkedArray | pa.Array:
        if name not in rows.column_names:
            return pa.nulls(rows.num_rows, pa.binary())
        return rows.column(name).cast(pa.binary())

    def _headers(self, rows: pa.Table) -> pa.ChunkedArray | pa.Array:
        wanted = SCHEMA.field("headers").type
        if "headers" not in rows.column_names:
            return pa.nulls(rows.num_rows, wanted)
        return rows.column("headers").cast(wanted)

    def _times(self, rows: pa.Table) -> pa.ChunkedArray | pa.Array:
        wanted = SCHEMA.field("timestamp").type
        stamp = pa.scalar(self._stamp_ms, pa.int64()).cast(wanted)
        if "timestamp" not in rows.column_names:
            return pa.repeat(stamp, rows.num_rows)
        given = rows.column("timestamp")
        if given.type.tz is None:
            given = given.cast(pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC"))
        return pc.fill_null(given.cast(wanted, safe=False), stamp)


def _collect(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    some: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        some.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
        if rows >= COLLECTED_ROWS or size_bytes >= COLLECTED_BYTES:
            yield pa.Table.from_batches(some)
            some, rows, size_bytes = [], 0, 0
    if some:
        yield pa.Table.from_batches(some)


def _pieces(topic: str, partition: int, rows: pa.Table) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Yield batches within the limits of a chunk."""
    at = 0
    while at < rows.num_rows:
        count = min(CHUNK_RECORDS, rows.num_rows - at)
        while count > 1 and rows.slice(at, count).nbytes > CHUNK_BYTES:
            count = (count + 1) // 2
        yield topic, partition, rows.slice(at, count).combine_chunks().to_batches()[0]
        at += count
