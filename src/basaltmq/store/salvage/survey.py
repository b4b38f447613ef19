"""A survey of a database that no process writes: its readable rows and its losses.

A torn tail of the last WAL file is not a loss, because its writes were never confirmed, unless SYNCED lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import DATABASE
from basaltmq.store.families import Family
from basaltmq.store.integrity.body_frames import BODIES, BodyFault, Place, check_places
from basaltmq.store.integrity.seals import Seals, check_manifest
from basaltmq.store.integrity.synced import missing_writes, short_manifest
from basaltmq.store.salvage.excision import recorded
from basaltmq.store.salvage.files import Files, find_files
from basaltmq.store.salvage.losses import Gap, Losses
from basaltmq.store.salvage.naming import Loss, Naming
from basaltmq.store.salvage.reading import Row, read_family, read_range
from basaltmq.store.salvage.views import Views
from basaltmq.store.salvage.write_batch import BatchNaming


class Survey:
    """Readable rows and losses of a database. `folder` is created for the views and may be removed afterwards."""

    def __init__(self, directory: Path, folder: Path, *, database: Path | None = None) -> None:
        """`database` is a copy to read in place of the store's: a RocksDB checkpoint, which needs no WAL."""
        self.directory = directory
        self.seals = _seals(directory)
        is_copy = database is not None
        database = directory / DATABASE if database is None else database
        fault = "" if is_copy else _manifest_fault(directory, self.seals)
        self.files: Files = find_files(database, self.seals.families, fault)
        if is_copy:
            self.files.logs = []
        self.views = Views(self.files, folder)
        self._excised = recorded(directory)
        self.losses = Losses(manifest_rebuilt=self.files.manifest is None)
        if not is_copy:
            self._check_logs()
        self._check_tables()

    def read(self, label: str) -> Iterator[Row]:
        """Yield every readable row of a family. Unreadable ranges go to `losses`."""
        excised = [gap for gap in self._excised if gap.family == label]
        return read_family(self.views, label, self.losses.gaps, excised)

    def scan(self, family: Family, start: bytes = b"", end: bytes | None = None) -> Iterator[Row]:
        """Yield readable rows without recording the others."""
        if family.label not in self.files.families:
            return iter(())
        return read_range(self.views, family.label, start, end, lambda _: None)

    def check_bodies(self, rows: Iterable[Row]) -> Iterator[BodyFault]:
        """Read the bodies that rows of `body_places` point to. Yield the unreadable ones, which go to `losses`."""
        places: list[tuple[Place, bytes]] = []
        for key, row in rows:
            try:
                places.append((Place.decode(key, row), key))
            except CorruptionError as error:
                fault = BodyFault(self.directory / BODIES, key, str(error))
                self._lose_body(fault)
                yield fault
        for fault in check_places(self.directory / BODIES, ((key, place) for place, key in sorted(places))):
            if fault.body is None:
                self._lose_body(fault)
            yield fault

    def _lose_body(self, fault: BodyFault) -> None:
        gap = Gap(Family.MESSAGE_CONTENT.label, fault.key, fault.key + b"\0", fault.path.name, fault.what)
        self.losses.gaps.append(gap)

    def describe_losses(self) -> list[Loss]:
        """Return the losses, described for operators."""
        losses = self.losses
        found: list[Loss] = []
        if losses.missing_writes:
            text = f"{losses.missing_writes}; the affected queues, topics and objects are unknown"
            found.append(Loss(subject="confirmed writes", text=text, family="", end=None))
        names = BatchNaming({number: label for label, number in self.files.families.items()})
        for path, records in losses.records.items():
            for record in records:
                found += names.losses(path.name, record)
        return found + Naming(self.scan).losses(losses.gaps)

    def close(self) -> None:
        self.views.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_logs(self) -> None:
        was_closed = self.seals.manifest is not None
        if not was_closed:
            manifest = None if self.files.manifest is None else self.files.manifest.path
            self.losses.missing_writes = missing_writes(self.directory, manifest, self.files.logs)
        last = next((scan.path for scan in reversed(self.files.logs) if scan.records or scan.fault), None)
        for path, records in self.views.damaged_logs.items():
            scan = next(scan for scan in self.files.logs if scan.path == path)
            is_torn_end = path == last and scan.fault is not None and scan.fault.torn
            if not is_torn_end or self.losses.missing_writes:
                self.losses.records[path] = records

    def _check_tables(self) -> None:
        """Record SST files without a known family, and those that existed at the last close and are now missing."""
        if self.files.manifest is not None:
            return
        for name, family in self.files.tables.items():
            if not family:
                self.losses.gaps.append(Gap("", b"", None, name, "the file does not name its family"))
        if self.seals.manifest is not None:
            for name in sorted(self.seals.files):
                if name.endswith(".sst") and name not in self.files.tables:
                    self.losses.gaps.append(Gap("", b"", None, name, "the file is missing"))


def _seals(directory: Path) -> Seals:
    try:
        return Seals.read(directory) or Seals()
    except CorruptionError:
        return Seals()


def _manifest_fault(directory: Path, seals: Seals) -> str:
    try:
        wrong = check_manifest(directory, seals)
        if wrong is None and seals.manifest is None:
            wrong = short_manifest(directory)
    except (CorruptionError, OSError):
        # There is no MANIFEST, which `find_files` reports.
        return ""
    return wrong or ""
