"""Excision: takes the key range of a damaged block out of an open store, so that new rows in it can be read.

An iterator fails at a damaged block. It then hides the rows that memtables and other SST files have in the block's key
range, and every row written there later. So the range is deleted, and the rows of the other files are written again,
in one batch. Iterators do not read the blocks below a range tombstone.

    checkpoint ─> views without the damaged SST file ─> rows of the range ─> one batch: delete the range, put the rows

The rows of the block are lost in any case: nothing can read them. Before, the SST file is linked to
`quarantine/unreadable/` as it was, and the range is recorded next to it, in `excised.jsonl`: a later reader no longer
meets the damage, and a repair must name the loss. A lost block may have held tombstones. Then older rows of the same
keys reappear, as in a repair.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from basaltmq.store.batch import Batch
from basaltmq.store.directory import DATABASE, QUARANTINE, make_directory, sync_directory
from basaltmq.store.families import Family
from basaltmq.store.salvage.files import find_files
from basaltmq.store.salvage.losses import Gap
from basaltmq.store.salvage.reading import fault_of, read_range
from basaltmq.store.salvage.views import Views

SCRATCH: Final = "excision.tmp"
KEPT: Final = "unreadable"
"""The directory in quarantine with links to damaged SST files."""

EXCISED: Final = "excised.jsonl"

REWRITTEN_BYTES_MAX: Final = 64 << 20
"""A range with more readable bytes stays as it is: rewriting them would block the event loop for too long."""


def excised(
    directory: Path, checkpoint: Callable[[str], None], family: Family, start: bytes, end: bytes | None, fault: str
) -> Batch | None:
    """Return the batch that replaces a range with its readable rows. None if the fault names no SST file of the family.

    `checkpoint` makes a RocksDB checkpoint at a path. The caller holds the store's lock until the batch is written.
    """
    name = fault_of(fault)
    if not name.endswith(".sst"):
        return None
    with _views(directory, checkpoint) as views:
        table = views.tables.get(name)
        if table is None or table.family != family.label or table.last is None:
            return None
        # A seek behind the last key of the file does not read the block.
        after = table.last + b"\0"
        end = after if end is None else min(end, after)
        batch = Batch()
        batch.delete_range(family, start, end)
        room = REWRITTEN_BYTES_MAX
        for key, value in read_range(views, family.label, start, end, lambda _: None):
            batch.put(family, key, value)
            room -= len(key) + len(value)
            if room < 0:
                return None
    _keep(directory, Gap(family.label, start, end, name, fault))
    return batch


@contextmanager
def _views(directory: Path, checkpoint: Callable[[str], None]) -> Iterator[Views]:
    scratch = directory / SCRATCH
    clear(directory)
    scratch.mkdir(mode=0o700)
    try:
        checkpoint(str(scratch / DATABASE))
        files = find_files(scratch / DATABASE, {})
        files.logs = []
        views = Views(files, scratch / "views")
        try:
            yield views
        finally:
            views.close()
    finally:
        clear(directory)


def _keep(directory: Path, gap: Gap) -> None:
    """Record an excision, and link the damaged SST file into quarantine."""
    kept = directory / QUARANTINE / KEPT
    make_directory(kept)
    with contextlib.suppress(FileExistsError):
        os.link(directory / DATABASE / gap.file, kept / gap.file)
    end = None if gap.end is None else gap.end.hex()
    line = {"family": gap.family, "start": gap.start.hex(), "end": end, "file": gap.file, "why": gap.what}
    with open(kept / EXCISED, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
        os.fdatasync(file.fileno())
    sync_directory(kept)


def recorded(directory: Path) -> list[Gap]:
    """Return the ranges that were excised since the last repair."""
    try:
        lines = (directory / QUARANTINE / KEPT / EXCISED).read_bytes().splitlines()
    except OSError:
        return []
    found: list[Gap] = []
    for line in lines:
        # A crash may have truncated the last line.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            end = None if row["end"] is None else bytes.fromhex(row["end"])
            found.append(Gap(row["family"], bytes.fromhex(row["start"]), end, row["file"], row["why"]))
    return found


def clear(directory: Path) -> None:
    """Remove what a killed process left of an excision."""
    shutil.rmtree(directory / SCRATCH, ignore_errors=True)
