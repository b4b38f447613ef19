"""Copies the readable rows of a damaged database into a new store.

Rows are written without WAL and flushed at close, so a crash leaves an incomplete copy, which is discarded. Derived
rows that may be inconsistent with the losses are omitted; the planes rebuild them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.integrity.body_frames import BODIES, check_places, files_in, walk
from basaltmq.store.salvage.reading import Row
from basaltmq.store.salvage.survey import Survey

BATCH_BYTES: Final = 4 << 20
"""Bytes of rows per batch: large enough to hide the cost of a batch, small compared to the write buffers."""

STALL_WAIT_MS: Final = 600_000
"""How long a write may stall. The copy is as fast as compaction allows, but a disk without a write for ten minutes has
failed."""

_NEVER: Final = frozenset({Family.DEFAULT, Family.TRANSIENT, Family.BODY_FILES})
"""Families that are empty, that the queue plane wipes at open, or that are counted again."""


def copy_rows(survey: Survey, target: Store, progress: Callable[[int], None]) -> int:
    """Copy every readable row and return their number. `progress` receives bytes."""
    copied = 0
    for label in survey.views.families:
        family = BY_LABEL.get(label)
        if family is None or family in _NEVER:
            continue
        batch = Batch()
        size_bytes = 0
        rows = survey.read(label)
        if family is Family.BODY_PLACES:
            rows = _intact(survey, target, list(rows))
        for key, value in rows:
            batch.put(family, key, value)
            size_bytes += len(key) + len(value)
            copied += 1
            if size_bytes >= BATCH_BYTES:
                target.write(batch, wal=False, wait_ms=STALL_WAIT_MS)
                progress(size_bytes)
                batch, size_bytes = Batch(), 0
        target.write(batch, wal=False, wait_ms=STALL_WAIT_MS)
        progress(size_bytes)
    if survey.losses.hit(Family.BODY_PLACES) or survey.losses.manifest_rebuilt:
        copied += _place_again(survey, target)
    if survey.losses.hit(Family.STREAM_INDEX, Family.SHARDS) or survey.losses.manifest_rebuilt:
        # The stream index is rebuilt from the log. A partial index would be mistaken for a complete one.
        wipe = Batch()
        wipe.delete_range(Family.STREAM_INDEX, b"", b"\xff" * 64)
        target.write(wipe)
    return copied


def _intact(survey: Survey, target: Store, rows: list[Row]) -> Iterator[Row]:
    """Yield the places of intact bodies. Bodies with a damaged header are written again. The planes drop the messages
    of the others."""
    damaged: set[bytes] = set()
    for fault in survey.check_bodies(rows):
        damaged.add(fault.key)
        if fault.body is not None:
            batch = Batch()
            batch.put(Family.MESSAGE_CONTENT, fault.key, fault.body)
            target.write(batch, wal=False, wait_ms=STALL_WAIT_MS)
    return (row for row in rows if row[0] not in damaged)


def _place_again(survey: Survey, target: Store) -> int:
    """Point to every intact body in a body file that has no row. The planes delete those of no message."""
    placed = 0
    directory = survey.directory / BODIES
    for number, path in files_in(directory).items():
        batch = Batch()
        for frame in walk(path, number):
            if target.get(Family.BODY_PLACES, frame.key) is None and not any(check_places(directory, [frame])):
                batch.put(Family.BODY_PLACES, frame.key, frame.place.encode())
                placed += 1
        target.write(batch, wal=False, wait_ms=STALL_WAIT_MS)
    return placed
