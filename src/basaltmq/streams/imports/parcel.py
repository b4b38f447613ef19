"""A part of a stage on its way to a broker: an Arrow IPC file that says itself where its record batches go.

    schema of `stage`, with metadata  basalt.chunks  ->  JSON: [[topic, partition, records], ...]
    a record batch per chunk

Whoever receives one trusts nothing of it: `open_parcel` and `check` look at every count and every array before it
counts for anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.ipc

from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError, LimitExceededError
from basaltmq.log.batches.arrow import from_arrow
from basaltmq.log.batches.record import UNSTAMPED
from basaltmq.streams.adapter import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from basaltmq.streams.imports.arrow_file import is_compressed
from basaltmq.streams.imports.stage import SCHEMA, Chunk

CHUNKS: Final = b"basalt.chunks"

NAME: Final = re.compile(r"part-\d{5,9}-[0-9a-f]{32}\.arrow")

_DECODE: Final = json_decoder(list[tuple[str, int, int]])


def pack(chunks: Sequence[tuple[str, int, pa.RecordBatch]]) -> bytes:
    """Chunks (topic, partition, records) as a file."""
    told = msgspec.json.encode([(topic, partition, batch.num_rows) for topic, partition, batch in chunks])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA.with_metadata({CHUNKS: told})) as writer:
        for _, _, batch in chunks:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


class Parcel:
    """A file that came, opened."""

    def __init__(self, file: pa.ipc.RecordBatchFileReader, chunks: list[Chunk]) -> None:
        self._file = file
        self.chunks = chunks

    def check(self, record_bytes_max: Callable[[str], int]) -> None:
        """Look at every record; InvalidArgumentError or LimitExceededError names what is wrong."""
        for index, chunk in enumerate(self.chunks):
            try:
                batch = self._file.get_batch(index)
            except (pa.ArrowException, OSError) as error:
                raise InvalidArgumentError(f"chunk {index} of the part cannot be read: {error}") from None
            if batch.num_rows != chunk.records:
                raise InvalidArgumentError(f"chunk {index} has {batch.num_rows} records, not {chunk.records} as said")
            columns = from_arrow(batch, UNSTAMPED)
            columns.check_sizes(record_bytes_max(chunk.topic))
            # What no append would take could never be imported, and would stand in the way of what could.
            if columns.count > BATCH_RECORDS_MAX or len(columns.body) > BATCH_BYTES_MAX:
                raise LimitExceededError(
                    f"chunk {index} has {columns.count} records and {len(columns.body)} bytes, over the limit of "
                    f"{BATCH_RECORDS_MAX} and {BATCH_BYTES_MAX} of one append; make more chunks of it"
                )


def open_parcel(path: Path) -> Parcel:
    """A parcel, its outside checked."""
    try:
        mapped = pa.memory_map(str(path))
        file = pa.ipc.open_file(mapped)
        schema, batches = file.schema, file.num_record_batches
        compressed = is_compressed(memoryview(mapped.read_buffer(mapped.size())))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidArgumentError(f"the part is not an Arrow IPC file: {error}") from None
    if compressed:
        raise InvalidArgumentError("a part is not compressed: how large it would become cannot be told; send it plain")
    if not schema.equals(SCHEMA):
        raise InvalidArgumentError(f"a part has the columns {', '.join(SCHEMA.names)}, not {', '.join(schema.names)}")
    try:
        told = _DECODE((schema.metadata or {}).get(CHUNKS, b""))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the part does not say where its records go ({CHUNKS.decode()}): {error}") from None
    if len(told) != batches or not told:
        raise InvalidArgumentError(f"the part has {batches} record batches and tells of {len(told)}")
    if any(partition < 0 or records < 1 for _, partition, records in told):
        raise InvalidArgumentError("a chunk is of a partition from 0 on, and has a record at least")
    return Parcel(file, [Chunk(topic, partition, records) for topic, partition, records in told])
