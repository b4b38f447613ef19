"""Rows an open store cannot read: passed over, recorded, and left where they are for a repair.

A damaged block must not keep a queue from serving the messages outside of it. So reads of the families that hold
messages (`PASSED_OVER`) go on behind the damage, and a point read of a row in it finds nothing. Every range that was
passed over is recorded once, before reading goes on:

    quarantine/unreadable.jsonl    one JSON object per line: at_ms, family, start and end (hex), why

Reads of all other families raise: a configuration or a lease that cannot be read must not look like one that does not
exist.

Compaction must not meet the damage: RocksDB ends all writing when it does. So a family in which anything was passed
over is not compacted any more, which makes reads slower and never holds writes. If compaction meets the damage first,
that write fails and poisons the store; the table is recorded, and the next open does not compact its family.

Where reading goes on is found by bisection over keys (`salvage.reading`): a few hundred seeks for a block. Rows that
other tables have in the same key range are passed over too; a repair finds them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rocksdict import Rdict, ReadOptions

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import DATABASE, QUARANTINE, make_directory, sync_directory
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.options import FILES_ANY
from basaltmq.store.rocks_cursor import Cursor
from basaltmq.store.salvage.files import table_family
from basaltmq.store.salvage.reading import after_block, fault_of

UNREADABLE: Final = "unreadable.jsonl"

PASSED_OVER: Final = frozenset({Family.MESSAGES, Family.DELAYED, Family.BODIES})
"""Families in which a row that cannot be read costs that row."""

RANGES_MAX: Final = 10_000
"""Ranges recorded by one open store, about 200 bytes each; beyond it they are passed over and counted only."""

NOT_COMPACTED: Final = {
    "disable_auto_compactions": "true",
    "level0_slowdown_writes_trigger": str(FILES_ANY),
    "level0_stop_writes_trigger": str(FILES_ANY),
}
"""Options of a family that is damaged, while the store is open."""

_log: Final = logging.getLogger("basaltmq.store")


class Unreadable:
    """The ranges an open store has passed over. Safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / QUARANTINE / UNREADABLE
        self._lock = threading.Lock()
        self._known: set[tuple[str, bytes]] = set()
        self.count = 0
        """Ranges met since the last repair."""
        self._database = directory / DATABASE
        self.stop_compaction: Callable[[Family], None] | None = None
        self.families = self._read()
        """Labels of the damaged families."""
        if self.families:
            _log.error(
                "the store at %s is damaged; %s: not compacted until it is repaired (basalt store repair)",
                directory,
                ", ".join(sorted(self.families)),
            )

    def _read(self) -> set[str]:
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return set()
        found = set()
        for line in lines:
            # A crash may have cut the last one.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found.add(str(json.loads(line)["family"]))
                self.count += 1
        return found

    def require_none(self, family: Family | None) -> None:
        """Refuse to compact what is damaged."""
        damaged = self.families if family is None else self.families & {family.label}
        if damaged:
            raise CorruptionError(
                f"rows of {', '.join(sorted(damaged))} cannot be read, so they cannot be compacted; repair the store"
            )

    def table(self, fault: str) -> None:
        """A background job met a table that cannot be read."""
        name = fault_of(fault)
        if name.endswith(".sst"):
            with contextlib.suppress(OSError):
                label, _ = table_family(self._database / name)
                if label:
                    self.range(BY_LABEL[label], b"", None, fault)

    def row(self, family: Family, key: bytes, why: str) -> None:
        """A row cannot be read."""
        self.range(family, key, key + b"\0", why)

    def range(self, family: Family, start: bytes, end: bytes | None, why: str) -> None:
        """Record a range, once."""
        with self._lock:
            if (family.label, start) in self._known:
                return
            self.count += 1
            if len(self._known) >= RANGES_MAX:
                return
            self._known.add((family.label, start))
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
            if family.label not in self.families:
                self.families.add(family.label)
                if self.stop_compaction is not None:
                    with contextlib.suppress(Exception):
                        # The store may be on its way down.
                        self.stop_compaction(family)
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
