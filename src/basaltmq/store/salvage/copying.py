"""Copies the readable rows of a damaged database into a new store.

Rows are written without WAL and flushed at close, so a crash leaves an incomplete copy, which is discarded. Derived
rows that may be inconsistent with the losses are omitted; the planes rebuild them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.salvage.survey import Survey

BATCH_BYTES: Final = 4 << 20
"""Bytes of rows per batch: large enough to hide the cost of a batch, small compared to the write buffers."""

STALL_WAIT_MS: Final = 600_000
"""The copy runs as fast as compaction allows. A disk that accepts no write for ten minutes has failed."""

_NEVER: Final = frozenset({Family.DEFAULT, Family.TRANSIENT})
"""Families that are empty, or that the queue plane wipes at open."""


def copy_rows(survey: Survey, target: Store, progress: Callable[[int], None]) -> int:
    """Copy every readable row and return their number. `progress` receives bytes."""
    copied = 0
    for label in survey.views.families:
        family = BY_LABEL.get(label)
        if family is None or family in _NEVER:
            continue
        batch = Batch()
        size_bytes = 0
        for key, value in survey.read(label):
            batch.put(family, key, value)
            size_bytes += len(key) + len(value)
            copied += 1
            if size_bytes >= BATCH_BYTES:
                target.write(batch, wal=False, wait_ms=STALL_WAIT_MS)
                progress(size_bytes)
                batch, size_bytes = Batch(), 0
        target.write(batch, wal=False, wait_ms=STALL_WAIT_MS)
        progress(size_bytes)
    if survey.losses.hit(Family.STREAM_INDEX, Family.SHARDS) or survey.losses.manifest_rebuilt:
        # The stream index is rebuilt from the log. A partial index would be mistaken for a complete one.
        wipe = Batch()
        wipe.delete_range(Family.STREAM_INDEX, b"", b"\xff" * 64)
        target.write(wipe)
    return copied
