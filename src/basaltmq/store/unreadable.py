"""Rows an open store cannot read: passed over, recorded, and left where they are for a repair.

A damaged block must not keep a queue from serving the messages outside of it. So reads of the families that hold
messages (`PASSED_OVER`) go on behind the damage, and a point read of a row in it finds nothing. Every range that was
passed over is recorded once, before reading goes on:

    quarantine/unreadable.jsonl    one JSON object per line: at_ms, family, start and end (hex), why

Reads of all other families raise: a configuration or a lease that cannot be read must not look like one that does not
exist.

Where reading goes on is found by bisection over keys (`salvage.reading`): a few hundred seeks for a block. Rows that
other tables have in the same key range are passed over too; a repair finds them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rocksdict import Rdict, ReadOptions

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import QUARANTINE, make_directory, sync_directory
from basaltmq.store.families import Family
from basaltmq.store.rocks_cursor import Cursor
from basaltmq.store.salvage.reading import after_block, fault_of

UNREADABLE: Final = "unreadable.jsonl"

PASSED_OVER: Final = frozenset({Family.MESSAGES, Family.DELAYED, Family.BODIES})
"""Families in which a row that cannot be read costs that row."""

RANGES_MAX: Final = 10_000
"""Ranges recorded by one open store, about 200 bytes each; beyond it they are passed over and counted only."""

_NEVER_STALL: Final = {
    "level0_slowdown_writes_trigger": "1000000",
    "level0_stop_writes_trigger": "1000000",
    "soft_pending_compaction_bytes_limit": "0",
    "hard_pending_compaction_bytes_limit": "0",
}
"""Options that can change while a store is open; 0 stands for no limit."""

_log: Final = logging.getLogger("basaltmq.store")


class Unreadable:
    """The ranges an open store has passed over. Safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / QUARANTINE / UNREADABLE
        self._lock = threading.Lock()
        self._known: set[tuple[Family, bytes]] = set()
        self.count = 0
        """Ranges met since the store was opened."""

    def row(self, family: Family, key: bytes, why: str) -> None:
        """A row cannot be read."""
        self.range(family, key, key + b"\0", why)

    def range(self, family: Family, start: bytes, end: bytes | None, why: str) -> None:
        """Record a range, once."""
        with self._lock:
            if (family, start) in self._known:
                return
            self.count += 1
            if len(self._known) >= RANGES_MAX:
                return
            self._known.add((family, start))
            said = {
                "at_ms": time.time_ns() // 1_000_000,
                "family": family.label,
                "start": start.hex(),
                "end": None if end is None else end.hex(),
                "why": why,
            }
            try:
                self._append(json.dumps(said))
            except OSError as error:
                _log.error("%s could not be written: %s", self._path, error)
        _log.error(
            "rows of family %s from key %s on cannot be read and are passed over: %s; "
            "verify the store, and repair it (basalt store repair)",
            family.label,
            start.hex(),
            why,
        )

    def _append(self, line: str) -> None:
        make_directory(self._path.parent)
        is_new = not self._path.exists()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line.encode() + b"\n")
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_directory(self._path.parent)


def relax(path: Path, families: Sequence[Rdict]) -> None:
    """Stop holding writes until compaction catches up: it fails at a damaged block, again and again."""
    _log.error(
        "the store at %s is damaged and cannot be compacted; writes go on, reads get slower: "
        "verify it, and repair it (basalt store repair)",
        path,
    )
    for family in families:
        family.set_options(_NEVER_STALL)


def scan_past(
    unreadable: Unreadable,
    family: Family,
    native: Rdict,
    cursor: Cursor,
    again: Callable[[ReadOptions], Cursor],
    start: bytes,
    end: bytes | None,
) -> Iterator[tuple[bytes, bytes]]:
    """A scan that goes on behind rows that cannot be read. What follows them is of a later moment.

    `again` makes another cursor of the same family.
    """
    reached: bytes | None = start
    while reached is not None:
        begun = reached
        try:
            yield from cursor.scan_once(begun, end, reverse=False)
            return
        except CorruptionError as error:
            begun = begun if cursor.reached is None else cursor.reached + b"\0"
            first, reached = _behind(native, begun, end, error)
            unreadable.range(family, first, end if reached is None else reached, str(error))
        reading = ReadOptions()
        if end is not None:
            reading.set_iterate_upper_bound(end)
        cursor = again(reading)
    cursor.close()


def _behind(family: Rdict, start: bytes, end: bytes | None, error: CorruptionError) -> tuple[bytes, bytes | None]:
    """Where the rows that cannot be read begin, at or after `start`, and where reading goes on; None: nowhere."""
    fault = str(error.__cause__ or error)
    reading = ReadOptions()
    reading.set_verify_checksums(False)
    if not fault_of(fault).endswith(".sst"):
        # A value in a blob file: its key is in a table that can be read.
        cursor = family.iter(reading)
        cursor.seek(start)
        if cursor.valid():
            key: bytes = cursor.key()
            return key, key + b"\0" if end is None or key < end else None
    return start, after_block(lambda: family.iter(), fault, start, end)
