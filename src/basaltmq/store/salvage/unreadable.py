"""Unreadable rows of an open store: reads skip and record them, and leave them in place for a repair.

A damaged block must not stop a queue from serving the messages outside of it, nor other queues. So scans of the
families in `SKIPPABLE` continue after the damage, and a get of a damaged row finds nothing. Every skipped range is
recorded once, before reading continues:

    quarantine/unreadable.jsonl    one JSON object per line: at_ms, family, start and end (hex), why

Counts without a row are recounted. Messages whose lease is unreadable are ready again, as after a crash of the
consumer; `Store.has_unreadable` tells the queue to mark them as redelivered. Reads of all other families raise, because
an unreadable configuration must not look like a missing one.

Compaction must not read the damaged block, because RocksDB then stops all writes. So a family with a skipped range is
no longer compacted. That makes reads slower but never stalls writes. If compaction reads the damaged block first, a
write fails and poisons the store. The SST file is recorded, and the next open does not compact its family.

Bisection over keys finds the key after the damage (`salvage.reading`): a few hundred seeks per block. The store then
takes the range out of the database (`salvage.excision`), because an iterator would hide every other row in it, also
those written later. If that fails, the range is skipped with all its rows; a repair finds them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rocksdict import Rdict, ReadOptions

from basaltmq.clock import now_ms
from basaltmq.errors import CorruptionError
from basaltmq.store.directory import DATABASE, QUARANTINE, make_directory, sync_directory
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.options import FILES_ANY
from basaltmq.store.rocks_cursor import Cursor
from basaltmq.store.salvage.files import table_family
from basaltmq.store.salvage.reading import after_block, fails_like, fault_of

UNREADABLE: Final = "unreadable.jsonl"

SKIPPABLE: Final = frozenset(
    {
        Family.MESSAGES,
        Family.DELAYED,
        Family.MESSAGE_CONTENT,
        Family.QUEUE_STATS,
        Family.LEASES,
        Family.LEASE_EXPIRY,
        Family.MESSAGE_EXPIRY,
        Family.TIMERS,
        Family.DEDUP,
        Family.DEDUP_EXPIRY,
        Family.BODY_PLACES,
        Family.BODY_FILES,
    }
)
"""Families in which an unreadable row affects only that row, or can be computed again."""

RANGES_MAX: Final = 10_000
"""Ranges that one open store records, at about 200 bytes each. Further ranges are only skipped and counted."""

NOT_COMPACTED: Final = {
    "disable_auto_compactions": "true",
    "level0_slowdown_writes_trigger": str(FILES_ANY),
    "level0_stop_writes_trigger": str(FILES_ANY),
}
"""Options of a damaged family while the store is open."""

_log: Final = logging.getLogger("basaltmq.store")


class Unreadable:
    """The ranges that an open store has skipped. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / QUARANTINE / UNREADABLE
        self._lock = threading.Lock()
        self._known: set[tuple[str, bytes, bytes | None]] = set()
        self.count = 0
        """Ranges found since the last repair."""
        self._database = directory / DATABASE
        self.on_damage: Callable[[Family], None] | None = None
        """Called for the first damage of a family."""
        self.excise: Callable[[Family, bytes, bytes | None, str], bool] | None = None
        """Takes a range with a fault out of the database. Returns whether it did."""
        self.families = self._read()
        """Labels of the damaged families."""
        if self.families:
            _log.error(
                "the store at %s is damaged; %s: not compacted until the store is repaired (basalt store repair)",
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
            # A crash may have truncated the last line.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found.add(str(json.loads(line)["family"]))
                self.count += 1
        return found

    def require_none(self, family: Family | None) -> None:
        """Raise if a family is damaged and must not be compacted."""
        damaged = self.families if family is None else self.families & {family.label}
        if damaged:
            raise CorruptionError(
                f"{', '.join(sorted(damaged))} has unreadable rows and cannot be compacted; "
                "repair the store (basalt store repair)"
            )

    def table(self, fault: str) -> None:
        """Record a damaged SST file that a background job has read."""
        name = fault_of(fault)
        if name.endswith(".sst"):
            with contextlib.suppress(OSError):
                label, _ = table_family(self._database / name)
                if label:
                    self.range(BY_LABEL[label], b"", None, fault)

    def row(self, family: Family, key: bytes, why: str) -> None:
        """Record an unreadable row."""
        self.range(family, key, key + b"\0", why)

    def range(self, family: Family, start: bytes, end: bytes | None, why: str) -> None:
        """Record a range once."""
        with self._lock:
            if (family.label, start, end) in self._known:
                return
            self.count += 1
            if len(self._known) >= RANGES_MAX:
                return
            self._known.add((family.label, start, end))
            content = {
                "at_ms": now_ms(),
                "family": family.label,
                "start": start.hex(),
                "end": None if end is None else end.hex(),
                "why": why,
            }
            try:
                self._append(json.dumps(content))
            except OSError as error:
                _log.error("%s could not be written: %s", self._path, error)
            if family.label not in self.families:
                self.families.add(family.label)
                if self.on_damage is not None:
                    with contextlib.suppress(Exception):
                        # The store may be closing.
                        self.on_damage(family)
        _log.error(
            "skipped unreadable rows of family %s from key %s: %s; "
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
    new_cursor: Callable[[ReadOptions], Cursor],
    start: bytes,
    end: bytes | None,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield a scan that skips unreadable rows. Rows after a skipped range may be newer than the scan.

    `new_cursor` makes another cursor of the same family.
    """
    reached: bytes | None = start
    retried: bytes | None = None
    excised: tuple[bytes, bytes | None] | None = None
    while reached is not None:
        begun = reached
        try:
            yield from cursor.scan_once(begun, end, reverse=False)
            return
        except CorruptionError as error:
            begun = begun if cursor.reached is None else cursor.reached + b"\0"
            fault = str(error.__cause__ or error)
            if retried != begun and not fails_like(native.iter, fault)(begun):
                # The step from the last row fails, a seek does not: the block was excised.
                reached = retried = begun
            else:
                # Beyond the end of the scan, too: an excision covers the whole block.
                first, stop = _damaged_range(native, begun, fault)
                unreadable.range(family, first, stop, str(error))
                reached = None if stop is None or (end is not None and stop >= end) else stop
                if excised != (first, stop) and unreadable.excise is not None:
                    excised = (first, stop)
                    if unreadable.excise(family, first, stop, fault):
                        reached = begun
        reading = ReadOptions()
        if end is not None:
            reading.set_iterate_upper_bound(end)
        cursor = new_cursor(reading)
    cursor.close()


def _damaged_range(family: Rdict, start: bytes, fault: str) -> tuple[bytes, bytes | None]:
    """Return the start of the unreadable rows, at or after `start`, and the next readable key or None."""
    if not fault_of(fault).endswith(".sst"):
        # The value is in a blob file, and its key is in a readable SST file.
        reading = ReadOptions()
        reading.set_verify_checksums(False)
        cursor = family.iter(reading)
        cursor.seek(start)
        if cursor.valid():
            key: bytes = cursor.key()
            return key, key + b"\0"
    return start, after_block(family.iter, fault, start)
