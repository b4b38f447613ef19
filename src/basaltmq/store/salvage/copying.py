"""The rows that can be read, copied into a new store.

Rows are written without a log and flushed when the store is closed, so a crash leaves a copy that is thrown away. What
is derived and may be out of step with what is lost is left out; the planes make it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.salvage.survey import Survey

BATCH_BYTES: Final = 4 << 20
"""Rows written together: large enough that a batch's own cost is not seen, small beside the write buffers."""

STALL_WAIT_MS: Final = 600_000
"""The copy is as fast as compaction lets it be; a disk that takes no write for ten minutes is gone."""

_NEVER: Final = frozenset({Family.DEFAULT, Family.TRANSIENT})
"""Empty, or wiped when the queues are opened."""


def copy_rows(survey: Survey, target: Store, progress: Callable[[int], None]) -> int:
    """Copy every row that can be read; how many. `progress` hears of bytes."""
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
        # It is rebuilt from the log. A part of it would be taken for the whole.
        wipe = Batch()
        wipe.delete_range(Family.STREAM_INDEX, b"", b"\xff" * 64)
        target.write(wipe)
    return copied
