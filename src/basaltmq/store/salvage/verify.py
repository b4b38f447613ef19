"""Verify: reads a whole store and reports, in one line per fault, the file, the fault and its cost.

    STORE, SEALS, CHECKSUMS    their own checksum
    all listed files           CHECKSUMS (a checkpoint) and SEALS
    CURRENT, MANIFEST, WAL     Basalt's reader of RocksDB's log format (`wal`)
    blob files                 Basalt's reader of blob files (`blobs`)
    SST files                  RocksDB, row by row, past damage (`salvage`)
    body files                 each body that a row points to (`body_frames`)

The losses follow the files: unreadable queues, messages, topics and objects.

SST files are read by a second, read-only RocksDB on a scratch directory of links. It has its own caches, because a
block in the store's cache proves nothing about the disk. For an open store the links come from a RocksDB checkpoint, so
that compaction cannot delete files during the read.

Verify changes nothing, except that it seals intact SST and blob files of an open store.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from basaltmq.errors import BasaltError, CorruptionError, NotAStoreError, StoreLockedError, StoreNotFoundError
from basaltmq.store.checkpoint import check_sums, read_checksums
from basaltmq.store.directory import (
    CHECKSUMS,
    DATABASE,
    LOCK,
    MARKER,
    QUARANTINE,
    SEALS,
    is_database,
    os_error,
    read_marker,
)
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.integrity.blobs import BlobFault, scan_blobs
from basaltmq.store.integrity.manifest import added_blobs, oldest_log
from basaltmq.store.integrity.seals import Sealer, Seals, Sum, check_manifest, check_small, file_sum, is_table, mismatch
from basaltmq.store.integrity.synced import short_manifest
from basaltmq.store.integrity.wal import LogScan, current_manifest, scan_log, wal_files, wal_number
from basaltmq.store.rocks_errors import named_file, translate
from basaltmq.store.salvage.naming import Loss
from basaltmq.store.salvage.reading import Row
from basaltmq.store.salvage.survey import Survey
from basaltmq.store.salvage.views import Table
from basaltmq.store.scratch import Scratch

Progress = Callable[[int, int], None]

SCRATCH: Final = "verify.tmp"
FAULTS_PER_FILE_MAX: Final = 3
"""Faults reported per file. A file with a thousand bad blocks is one bad file."""

FILTER_CHECK_ROWS: Final = 1000
"""Rows between two reads of bloom filters. A partition of a filter covers about 3,000 keys."""


@dataclass(slots=True)
class _Findings:
    """Faults by file, in the order found."""

    faults: dict[Path, list[str]] = field(default_factory=dict)
    costs: dict[Path, str] = field(default_factory=dict)

    def add(self, path: Path, what: str, cost: str | None = None) -> None:
        known = self.faults.setdefault(path, [])
        if what not in known and len(known) < FAULTS_PER_FILE_MAX:
            known.append(what)
        if cost is not None:
            self.costs[path] = cost

    def lines(self) -> list[str]:
        return [
            f"{path}: {', '.join(known)}; {self.costs.get(path, 'restore a backup')}"
            for path, known in self.faults.items()
        ]


@dataclass(frozen=True, slots=True)
class Verified:
    """The damaged files, and one line per damaged file and per loss."""

    lines: list[str]
    files: list[Path]


def verify(path: Path, progress: Progress | None = None) -> list[str]:
    """Verify a checkpoint or a store that no process has open for writing. Return one line per fault."""
    return inspect(path, progress).lines


def inspect(path: Path, progress: Progress | None = None) -> Verified:
    """Like `verify`, and also return the damaged files."""
    findings = _Findings()
    try:
        if read_marker(path) is None:
            raise StoreNotFoundError(f"there is no store at {path}; check the path")
    except (CorruptionError, NotAStoreError) as error:
        if isinstance(error, NotAStoreError) and not is_database(path / DATABASE):
            raise
        what = str(error).removeprefix(f"{path / MARKER} ").removeprefix(f"{path} ")
        findings.add(path / MARKER, what, "the store does not open; repair writes it again")
    with _shared_lock(path):
        run = _Run(path, path / DATABASE, findings, _Meter(path, progress), live=False)
        try:
            run.run()
        except OSError as error:
            raise os_error(error, path) from error
    return Verified(findings.lines() + [loss.line() for loss in run.losses], list(findings.faults))


def verify_open(
    path: Path, create_checkpoint: Callable[[str], None], sealer: Sealer, progress: Progress | None = None
) -> list[str]:
    """Verify a store that this process has open for writing, during operation."""
    findings = _Findings()
    try:
        read_marker(path)
    except CorruptionError as error:
        findings.add(path / "STORE", str(error).removeprefix(f"{path / 'STORE'} "), "the store will not open again")
    scratch = path / SCRATCH
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            create_checkpoint(str(scratch / DATABASE))
            run = _Run(path, scratch / DATABASE, findings, _Meter(path, progress), live=True)
            run.run()
            sealer.add(run.sound)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise os_error(error, path) from error
    except BasaltError:
        raise
    except Exception as error:
        raise translate(error, path) from error
    return findings.lines() + [loss.line() for loss in run.losses]


class _Meter:
    """Counts the bytes read, out of the total."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        # SST and blob files are read twice: for their seals and through RocksDB.
        self._total = sum(
            os.lstat(os.path.join(folder, name)).st_size * (2 if is_table(name) else 1)
            for folder, _, names in os.walk(path)
            if os.path.basename(folder) not in (QUARANTINE, SCRATCH)
            for name in names
        )

    def add(self, size_bytes: int) -> None:
        self._done = min(self._done + size_bytes, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        self.add(self._total)


class _Run:
    """One pass over a store. `database` holds the files to read; faults name files in `path`/kv."""

    def __init__(self, path: Path, database: Path, findings: _Findings, meter: _Meter, *, live: bool) -> None:
        self._path = path
        self._database = database
        self._named = path / DATABASE
        self._findings = findings
        self._meter = meter
        self._live = live
        self._tables: dict[str, Table] = {}
        self.sound: dict[str, Sum] = {}
        self.losses: list[Loss] = []

    def run(self) -> None:
        if not self._database.is_dir():
            self._findings.add(self._named, "is missing", "every row is lost: restore a backup")
            return
        self._checksums()
        self._logs()
        sums = self._sums()
        self._blobs()
        self._rows()
        self._seals(sums)
        bad = {path.name for path in self._findings.faults}
        self.sound = {name: found for name, found in sums.items() if name not in bad}
        for path in self._findings.faults:
            if is_table(path.name) and path.name in self._tables:
                self._findings.costs[path] = _cost(self._tables[path.name])
        self._meter.finish()

    def _checksums(self) -> None:
        if self._live or not (self._path / CHECKSUMS).exists():
            return
        try:
            sums = read_checksums(self._path)
        except (CorruptionError, NotAStoreError) as error:
            self._findings.add(self._path / CHECKSUMS, str(error), "the backup cannot be restored as it is")
            return
        for name, what in check_sums(self._path, sums):
            self._findings.add(self._path / name, what, "the backup is incomplete: use another")

    def _logs(self) -> None:
        named = self._named
        oldest = 0
        try:
            manifest = current_manifest(named)
            scan = scan_log(manifest)
            self._log(scan, "no row of the store can be read without it: restore a backup", last=True)
            oldest = oldest_log(manifest)
            if scan.fault is None and not self._live and (short := self._short_manifest()):
                self._findings.add(manifest, short, "the store does not open; repair rebuilds it from the SST files")
        except CorruptionError as error:
            what = str(error).removeprefix(f"{named / 'CURRENT'} ")
            self._findings.add(named / "CURRENT", what, "the store does not open; repair writes it again")
        logs = [log for log in wal_files(named) if wal_number(log) >= oldest]
        for log in logs:
            try:
                self._log(
                    scan_log(log), "writes from there on may be lost: restore a backup or repair", log == logs[-1]
                )
            except FileNotFoundError:
                # Flushed and deleted meanwhile.
                continue

    def _short_manifest(self) -> str:
        """Describe a MANIFEST that ends before durable records. A sealed one is compared with its seal instead."""
        try:
            seals = Seals.read(self._path)
        except CorruptionError:
            seals = None
        return short_manifest(self._path) if seals is None or seals.manifest is None else ""

    def _log(self, scan: LogScan, cost: str, last: bool) -> None:
        self._meter.add(scan.size_bytes)
        fault = scan.fault
        if fault is None or (self._live and last and fault.torn and fault.what.startswith("the file ends")):
            return
        if fault.torn and not self._live:
            cost = f"a torn tail of {scan.size_bytes - fault.cut_at} bytes; without damage, of unconfirmed writes only"
        self._findings.add(scan.path, f"{fault.what} at byte {fault.offset}", cost)

    def _sums(self) -> dict[str, Sum]:
        sums: dict[str, Sum] = {}
        for path in sorted(self._database.iterdir()):
            if is_table(path.name):
                try:
                    sums[path.name] = file_sum(path, self._meter.add)
                except OSError as error:
                    self._findings.add(self._named / path.name, f"cannot be read: {error.strerror}")
        return sums

    def _seals(self, sums: dict[str, Sum]) -> None:
        try:
            seals = Seals.read(self._path)
            if seals is None:
                return
            manifest = None if self._live else check_manifest(self._path, seals)
        except CorruptionError as error:
            if not str(error).startswith(str(self._path / SEALS)):
                return
            self._findings.add(self._path / SEALS, "does not match its checksum", "nothing: open writes it again")
            return
        for name, what in check_small(self._path, seals):
            self._findings.add(
                self._named / name, what, "no row is lost: RocksDB works without it; repair seals it again"
            )
        if manifest is not None and seals.manifest is not None:
            self._findings.add(self._named / seals.manifest[0], manifest)
        for name, found in sums.items():
            sealed = seals.files.get(name)
            if sealed is not None and sealed != found:
                self._findings.add(self._named / name, mismatch(found, sealed))

    def _blobs(self) -> None:
        added = self._added_blobs()
        for path in sorted(self._database.glob("*.blob")):
            self._meter.add(path.stat().st_size)
            if added is not None and int(path.stem) not in added:
                # Left over from a flush that a crash interrupted. RocksDB deletes it at the next open.
                continue
            _, faults = scan_blobs(path)
            for fault in faults:
                self._findings.add(self._named / path.name, _blob_fault(fault))

    def _added_blobs(self) -> set[int] | None:
        """Return the numbers of the blob files in the MANIFEST, None if it cannot be read."""
        try:
            manifest = current_manifest(self._database)
            return added_blobs(manifest) if scan_log(manifest).fault is None else None
        except (CorruptionError, OSError):
            return None

    def _rows(self) -> None:
        """Read every row, past damage."""
        with Scratch("verify") as scratch:
            copy = self._database if self._live else None
            try:
                survey = Survey(self._path, scratch.path / DATABASE, database=copy)
            except CorruptionError as error:
                self._fault(str(error), "")
                return
            body_files: set[str] = set()
            with survey:
                self._tables = survey.views.tables
                for name, table in self._tables.items():
                    if table.is_missing:
                        self._findings.add(self._named / name, "is missing")
                for label in survey.views.families:
                    rows = survey.read(label)
                    if label == Family.BODY_PLACES.label:
                        body_files = self._bodies(survey, rows)
                    self._filters(survey, label, (row[0] for row in rows))
                    self._meter.add(
                        sum(self._size(file) for file, each in self._tables.items() if each.family == label)
                    )
                for gap in survey.losses.gaps:
                    # Faults of body files were added with their paths.
                    if gap.file not in body_files:
                        self._fault(gap.what, gap.family, gap.file)
                if survey.losses.missing_writes:
                    self._findings.add(self._named, survey.losses.missing_writes, "confirmed writes are lost")
                self.losses = survey.describe_losses()

    def _filters(self, survey: Survey, label: str, keys: Iterator[bytes]) -> None:
        """Read all keys, and the bloom filters with some of them. A broker fails at a damaged filter."""
        checked = [key for number, key in enumerate(keys) if number % FILTER_CHECK_ROWS == 0]
        checked += [table.first for table in self._tables.values() if table.family == label]
        if not checked or not BY_LABEL[label].profile.bloom:
            return
        database, family = survey.views.with_filters(label)
        try:
            for key in checked:
                try:
                    family.get(key)
                except Exception as error:
                    self._filter_fault(error)
        finally:
            family.close()
            database.close()

    def _filter_fault(self, error: Exception) -> None:
        # A table that cannot be opened hides its rows too, and was reported with them.
        path = self._named / named_file(str(error), self._database).name
        if path.name in self._tables and path not in self._findings.faults:
            self._findings.add(path, "has a damaged bloom filter", "no row is lost; repair writes it again")

    def _bodies(self, survey: Survey, rows: Iterator[Row]) -> set[str]:
        """Read every large body. Garbage in body files is not read. Return the names of files with faults."""
        names: set[str] = set()
        for fault in survey.check_bodies(rows):
            cost = "its bodies are lost: restore a backup, or repair, which drops their messages"
            if fault.body is not None:
                cost = "no body is lost; repair writes it again"
            self._findings.add(fault.path, fault.what, cost)
            names.add(fault.path.name)
        return names

    def _size(self, file: str) -> int:
        try:
            return (self._database / file).stat().st_size if file.endswith(".sst") else 0
        except FileNotFoundError:
            return 0

    def _fault(self, text: str, family: str, file: str = "") -> None:
        if file:
            self._findings.add(self._named / file, text)
            return
        # RocksDB does not always name the file. If another check found a faulty file in this family, assume it is that
        # one.
        if any(
            path.name in self._tables and self._tables[path.name].family == family for path in self._findings.faults
        ):
            return
        tables = sorted(name for name, table in self._tables.items() if table.family == family)
        whose = f" in family {family}, in one of {', '.join(tables[:10])}" if tables else ""
        self._findings.add(self._named, f"{text}{whose}")


def _cost(table: Table) -> str:
    span = f" between keys {_shown(table.first)} and {_shown(table.last)}" if table.last else ""
    return f"rows of family {table.family}{span} may be lost: restore a backup, or repair"


def _blob_fault(fault: BlobFault) -> str:
    whose = f" (key {_shown(fault.key)})" if fault.key is not None else ""
    return f"{fault.what} at byte {fault.offset}{whose}"


def _shown(key: bytes) -> str:
    return key.hex() if len(key) <= 32 else f"{key[:32].hex()}..."


@contextmanager
def _shared_lock(path: Path) -> Iterator[None]:
    """Keep writers out during the read. A checkpoint has no LOCK and needs none."""
    try:
        fd = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StoreLockedError(
            f"{path} is open for writing; verify it in that process, or verify a checkpoint of it"
        ) from None
    finally:
        os.close(fd)
