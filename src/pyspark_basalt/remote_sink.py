"""Sends the rows of a task to a broker's stage, in parts small enough to be kept in memory and sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa

from basaltmq.clock import now_ms
from basaltmq.pipeline.remote import RemoteView
from basaltmq.streams.imports.upload import pack
from pyspark_basalt.chunks import ChunkSplitter

PART_BYTES: Final = 16 << 20
"""Size limit of a part, before its last chunk: a fraction of a second of network time. A task holds it twice."""


def send_rows(
    rows: Iterator[pa.RecordBatch],
    remote: RemoteView,
    run: str,
    batch: int,
    number: int,
    topic: str | None,
    clock_ms: Callable[[], int] = now_ms,
) -> Iterator[dict[str, Any]]:
    """Stage the rows of task `number`. Yield the parts."""
    splitter = ChunkSplitter(lambda name: remote.topic(name).config.partitions, topic, clock_ms(), turn=number)
    some: list[tuple[str, int, pa.RecordBatch]] = []
    size_bytes = 0
    for chunk in splitter.chunks(rows):
        some.append(chunk)
        size_bytes += chunk[2].nbytes
        if size_bytes >= PART_BYTES:
            yield remote.put_part(run, batch, number, pack(some))
            some, size_bytes = [], 0
    if some:
        yield remote.put_part(run, batch, number, pack(some))
