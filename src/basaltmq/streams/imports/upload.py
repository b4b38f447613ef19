"""Upload format of a staged part: an Arrow IPC file that names the destinations of its record batches.

    schema of `stage`, with metadata  basalt.chunks  ->  JSON: [[topic, partition, records], ...]
    a record batch per chunk

The content is untrusted. `open_upload` and `Upload.check` validate every count and every array before use.
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
from basaltmq.log.arrow import from_arrow
from basaltmq.log.batches.record import UNSTAMPED
from basaltmq.streams.adapter import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from basaltmq.streams.imports.arrow_file import is_compressed
from basaltmq.streams.imports.stage import SCHEMA, Chunk

CHUNKS: Final = b"basalt.chunks"

NAME: Final = re.compile(r"part-\d{5,9}-[0-9a-f]{32}\.arrow")

_DECODE: Final = json_decoder(list[tuple[str, int, int]])


def pack(chunks: Sequence[tuple[str, int, pa.RecordBatch]]) -> bytes:
    """Encode chunks (topic, partition, records) as a file."""
    declared = msgspec.json.encode([(topic, partition, batch.num_rows) for topic, partition, batch in chunks])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA.with_metadata({CHUNKS: declared})) as writer:
        for _, _, batch in chunks:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


class Upload:
    """A received file, opened."""

    def __init__(self, file: pa.ipc.RecordBatchFileReader, chunks: list[Chunk]) -> None:
        self._file = file
        self.chunks = chunks

    def check(self, record_bytes_max: Callable[[str], int]) -> None:
        """Validate every record. Raises InvalidArgumentError or LimitExceededError with the reason."""
        for index, chunk in enumerate(self.chunks):
            try:
                batch = self._file.get_batch(index)
            except (pa.ArrowException, OSError) as error:
                raise InvalidArgumentError(f"chunk {index} of the part cannot be read: {error}") from None
            if batch.num_rows != chunk.records:
                raise InvalidArgumentError(f"chunk {index} has {batch.num_rows} records, but declares {chunk.records}")
            columns = from_arrow(batch, UNSTAMPED)
            columns.check_sizes(record_bytes_max(chunk.topic))
            # A chunk that exceeds the append limits could never be imported and would block later batches.
            if columns.count > BATCH_RECORDS_MAX or len(columns.body) > BATCH_BYTES_MAX:
                raise LimitExceededError(
                    f"chunk {index} has {columns.count} records and {len(columns.body)} bytes, over the limit of "
                    f"{BATCH_RECORDS_MAX} and {BATCH_BYTES_MAX} of one append; split it into more chunks"
                )


def open_upload(path: Path) -> Upload:
    """Open an uploaded part and validate its schema and chunk list."""
    try:
        mapped = pa.memory_map(str(path))
        file = pa.ipc.open_file(mapped)
        schema, batches = file.schema, file.num_record_batches
        compressed = is_compressed(memoryview(mapped.read_buffer(mapped.size())))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidArgumentError(f"the part is not an Arrow IPC file: {error}") from None
    if compressed:
        raise InvalidArgumentError("the part is compressed, so its expanded size is unknown; send it uncompressed")
    if not schema.equals(SCHEMA):
        raise InvalidArgumentError(f"a part needs the columns {', '.join(SCHEMA.names)}, not {', '.join(schema.names)}")
    try:
        declared = _DECODE((schema.metadata or {}).get(CHUNKS, b""))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the part has no valid chunk list ({CHUNKS.decode()}): {error}") from None
    if len(declared) != batches or not declared:
        raise InvalidArgumentError(f"the part has {batches} record batches, but lists {len(declared)} chunks")
    if any(partition < 0 or records < 1 for _, partition, records in declared):
        raise InvalidArgumentError("a chunk needs a partition of at least 0 and at least one record")
    return Upload(file, [Chunk(topic, partition, records) for topic, partition, records in declared])
