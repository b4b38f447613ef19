"""Rows of a task on their way to a broker's stage, in parts small enough to be sent again from memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa

from basaltmq.pipeline.remote import RemoteView
from basaltmq.streams.imports.parcel import pack
from pyspark_basalt.chunks import Cutter

PART_BYTES: Final = 16 << 20
"""Of a part, before its last chunk: a fraction of a second on the wire, and a task's memory twice over."""


def send_rows(
    rows: Iterator[pa.RecordBatch],
    remote: RemoteView,
    run: str,
    batch: int,
    number: int,
    topic: str | None,
    clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> Iterator[dict[str, Any]]:
    """Stage the rows of task `number`; the parts they became."""
    cutter = Cutter(lambda name: remote.topic(name).config.partitions, topic, clock_ms(), turn=number)
    some: list[tuple[str, int, pa.RecordBatch]] = []
    size_bytes = 0
    for chunk in cutter.chunks(rows):
        some.append(chunk)
        size_bytes += chunk[2].nbytes
        if size_bytes >= PART_BYTES:
            yield remote.put_part(run, batch, number, pack(some))
            some, size_bytes = [], 0
    if some:
        yield remote.put_part(run, batch, number, pack(some))
