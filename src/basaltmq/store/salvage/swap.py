"""The repaired database takes the place of the damaged one; a crash at any moment leaves one of the two in place.

    repair.tmp/        the copy in the making. Without REPAIR beside it, it is thrown away and nothing has happened
    REPAIR             one sealed line: {"number": N}. The copy is whole and durable; from here on it takes over
    quarantine/
      repair-N/        kv/, SEALS, SYNCED as they were, and losses.jsonl, which says what is lost

The files move by renames, each of which is skipped if it was made before. So whoever opens the store next, or runs the
repair again, finishes an interrupted swap.
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
from basaltmq.store.integrity.synced import SYNCED

REPAIR: Final = "REPAIR"
SCRATCH: Final = "repair.tmp"
COPY: Final = "store"
"""The copy inside of the scratch directory: a store of its own until it takes over."""

LOSSES: Final = "losses.jsonl"

_MOVED: Final = (DATABASE, SEALS, SYNCED)


def quarantine_of(directory: Path) -> tuple[int, Path]:
    """The number of the next repair, and the directory where it puts what was there."""
    number = 1
    while (directory / QUARANTINE / f"repair-{number}").exists():
        number += 1
    return number, directory / QUARANTINE / f"repair-{number}"


def take_over(directory: Path, number: int) -> None:
    """Put the copy, which is closed and durable, in the place of the database."""
    make_directory(directory / QUARANTINE / f"repair-{number}")
    write_durably(directory / REPAIR, encode_line({"number": number}))
    finish(directory)


def finish(directory: Path) -> bool:
    """Finish a swap that was begun; True if there was one."""
    try:
        number = int(read_line(directory / REPAIR, "restore a backup")["number"])
    except FileNotFoundError:
        return False
    except (KeyError, TypeError, ValueError):
        raise CorruptionError(f"{directory / REPAIR} has an unknown form; restore a backup") from None
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
    """Throw away what an interrupted repair left in the making."""
    shutil.rmtree(directory / SCRATCH, ignore_errors=True)
