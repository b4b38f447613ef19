"""Replaces the damaged database with the repaired one. A crash at any point leaves one of the two in place.

    repair.tmp/        the unfinished copy. Without REPAIR next to it, it is discarded and the store is unchanged
    REPAIR             one sealed line: {"number": N}. The copy is complete and durable and must replace the database
    quarantine/
      repair-N/        the previous kv/, bodies/, SEALS and SYNCED, and losses.jsonl, which lists the losses

The files move by renames; a rename already done is skipped. So the next open or repair completes an interrupted swap.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import (
    DATABASE,
    QUARANTINE,
    SEALS,
    encode_line,
    make_directory,
    read_line,
    sync_directory,
    write_durably,
)
from basaltmq.store.integrity.body_frames import BODIES
from basaltmq.store.integrity.synced import SYNCED

REPAIR: Final = "REPAIR"
SCRATCH: Final = "repair.tmp"
COPY: Final = "store"
"""The copy inside the scratch directory: a separate store until the swap."""

LOSSES: Final = "losses.jsonl"

_MOVED: Final = (BODIES, DATABASE, SEALS, SYNCED)


def quarantine_of(directory: Path) -> tuple[int, Path]:
    """Return the number of the next repair, and the directory for the files that it replaces."""
    number = 1
    while (directory / QUARANTINE / f"repair-{number}").exists():
        number += 1
    return number, directory / QUARANTINE / f"repair-{number}"


def take_over(directory: Path, number: int) -> None:
    """Replace the database with the copy, which is closed and durable."""
    make_directory(directory / QUARANTINE / f"repair-{number}")
    write_durably(directory / REPAIR, encode_line({"number": number}))
    finish(directory)


def finish(directory: Path) -> bool:
    """Complete an interrupted swap. Return True if there was one."""
    try:
        number = int(read_line(directory / REPAIR, "restore a backup")["number"])
    except FileNotFoundError:
        return False
    except (KeyError, TypeError, ValueError):
        raise CorruptionError(f"{directory / REPAIR} has an unknown structure; restore a backup") from None
    kept = directory / QUARANTINE / f"repair-{number}"
    copy = directory / SCRATCH / COPY
    for name in _MOVED:
        new, place, old = copy / name, directory / name, kept / name
        if not new.exists():
            continue
        if place.exists() and not old.exists():
            os.rename(place, old)
            sync_directory(kept)
            sync_directory(directory)
        os.rename(new, place)
        sync_directory(directory)
    (directory / REPAIR).unlink()
    sync_directory(directory)
    clear(directory)
    return True


def clear(directory: Path) -> None:
    """Remove the unfinished copy of an interrupted repair."""
    shutil.rmtree(directory / SCRATCH, ignore_errors=True)
