"""SEALS: checksums of files that RocksDB protects only partly or not at all.

    small files    IDENTITY, OPTIONS-* and rocksdict-config.json have no checksum. Sealed after open and after
                   set_options.
    sst and blob   RocksDB checks a block when it reads it, and silently ignores a damaged filter or property block.
                   Whole files are sealed at close (up to a budget), by a checkpoint and by verify, never at open.
    MANIFEST       RocksDB accepts a valid prefix as the whole file. Sealed at a clean close, checked at the next open.

    {"files": {"IDENTITY": [size, crc], "000009.sst": [size, crc], ...}, "manifest": ["MANIFEST-000018", size, crc],
     "families": {"messages": 1, ...}, "store_id": "..."}

`families` holds RocksDB's numbers of the families, and `store_id` that of STORE. A repair uses these copies if the
MANIFEST or STORE is lost. All names refer to files in kv/.

A file is sealed only once, so that a later seal cannot approve damage. That works because RocksDB never rewrites a
finished file or reuses a number. `rocksdict-config.json` is the exception: it is rewritten at each open. A deleted file
loses its seal. A file without a seal is not a fault.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import DATABASE, SEALS, encode_line, read_line, sync_file, write_durably
from basaltmq.store.integrity.manifest import family_numbers
from basaltmq.store.integrity.wal import current_manifest, scan_log, wal_files, wal_number

Sum: TypeAlias = tuple[int, int]
"""Size and CRC32C of a file."""

CLOSE_BYTES_MAX: Final = 256 << 20
"""Bytes read at close to seal new files: about 0.1 s, because they are in the page cache."""

_CHUNK_BYTES: Final = 4 << 20
_CONFIG: Final = "rocksdict-config.json"
_REMEDY: Final = "no data is lost: opening the store writes it again"


@dataclass(slots=True)
class Seals:
    """The content of SEALS."""

    files: dict[str, Sum] = field(default_factory=dict)
    manifest: tuple[str, int, int] | None = None
    families: dict[str, int] = field(default_factory=dict)
    store_id: str | None = None
    wal: int | None = None
    """Number of the WAL file that the last open created."""

    def encode(self) -> bytes:
        return encode_line(
            {
                "files": {name: list(sealed) for name, sealed in self.files.items()},
                "manifest": list(self.manifest) if self.manifest else None,
                "families": self.families,
                "store_id": self.store_id,
                "wal": self.wal,
            }
        )

    @classmethod
    def read(cls, directory: Path) -> Seals | None:
        """Return the seals of a store, None if it has none. Raises CorruptionError if they are damaged."""
        path = directory / SEALS
        try:
            content = read_line(path, _REMEDY)
        except FileNotFoundError:
            return None
        try:
            files = {str(name): (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
            manifest = content["manifest"]
            store_id = content.get("store_id")
            wal = content.get("wal")
            return cls(
                files,
                (str(manifest[0]), int(manifest[1]), int(manifest[2])) if manifest else None,
                {str(label): int(number) for label, number in content.get("families", {}).items()},
                None if store_id is None else str(store_id),
                None if wal is None else int(wal),
            )
        except (KeyError, ValueError, TypeError, AttributeError, IndexError):
            raise CorruptionError(f"{path} has an unknown structure; {_REMEDY}") from None


def is_small(name: str) -> bool:
    return name in ("IDENTITY", _CONFIG) or (name.startswith("OPTIONS-") and not name.endswith(".dbtmp"))


def is_table(name: str) -> bool:
    return name.endswith((".sst", ".blob"))


def file_sum(path: Path, progress: Callable[[int], None] | None = None) -> Sum:
    """Return the size and CRC32C of a file."""
    crc = size = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = google_crc32c.extend(crc, chunk)
            size += len(chunk)
            if progress is not None:
                progress(len(chunk))
    return size, crc


def check_small(directory: Path, seals: Seals) -> Iterable[tuple[str, str]]:
    """Yield (name, fault) for every small file that differs from its seal."""
    for name, sealed in seals.files.items():
        if is_small(name):
            try:
                found = file_sum(directory / DATABASE / name)
            except FileNotFoundError:
                # RocksDB keeps only the last two OPTIONS files.
                if not name.startswith("OPTIONS-"):
                    yield name, "is missing"
                continue
            if found != sealed:
                yield name, mismatch(found, sealed)


def mismatch(found: Sum, sealed: Sum) -> str:
    if found[0] != sealed[0]:
        return f"has {found[0]} bytes, but was sealed with {sealed[0]}"
    return f"does not match its seal (CRC32C {found[1]:08x}, sealed {sealed[1]:08x})"


def check_manifest(directory: Path, seals: Seals) -> str | None:
    """Return the fault of the MANIFEST. None if it has none or the store was not closed cleanly."""
    if seals.manifest is None:
        return None
    name, *sealed = seals.manifest
    manifest = current_manifest(directory / DATABASE)
    if manifest.name != name:
        return None
    found = file_sum(manifest)
    return None if list(found) == sealed else mismatch(found, (sealed[0], sealed[1]))


class Sealer:
    """Maintains SEALS of a store that is open for writing. A failure to write SEALS is reported, not raised."""

    def __init__(self, directory: Path, report: Callable[[str], None]) -> None:
        self._directory = directory
        self._report = report
        self._lock = threading.Lock()
        try:
            self._seals = Seals.read(directory) or Seals()
        except CorruptionError as error:
            report(str(error))
            self._seals = Seals()

    @property
    def was_closed(self) -> bool:
        """Whether the store was closed cleanly."""
        return self._seals.manifest is not None

    def check(self) -> None:
        """Check before RocksDB opens: raise if the MANIFEST changed since a clean close, report other faults."""
        if self._seals.files:
            # SEALS implies a database. Without CURRENT, RocksDB would create an empty one.
            current_manifest(self._directory / DATABASE)
        wrong = check_manifest(self._directory, self._seals)
        if wrong is not None:
            assert self._seals.manifest is not None
            manifest = self._directory / DATABASE / self._seals.manifest[0]
            raise CorruptionError(
                f"{manifest} {wrong}; it changed after a clean close, so it is damaged: restore a backup, or run repair"
            )
        for name, what in check_small(self._directory, self._seals):
            self._report(f"{self._directory / DATABASE / name} {what}; RocksDB works without it")

    def name_damaged_files(self, error: CorruptionError) -> CorruptionError:
        """Return an error that names the damaged files by their seals, if RocksDB's error names none."""
        database = self._directory / DATABASE
        if not str(error).startswith(f"{self._directory} "):
            return error
        wrong = []
        for name, sealed in self._seals.files.items():
            path = database / name
            if is_table(name) and path.exists() and (found := file_sum(path)) != sealed:
                wrong.append(f"{path} {mismatch(found, sealed)}")
        named = "; ".join(wrong) or "run verify to find the damaged file"
        return CorruptionError(f"{named}; restore a backup, or run repair ({error})")

    def after_open(self, store_id: str) -> None:
        with self._lock:
            self._seals.files.pop(_CONFIG, None)
            self._seals.manifest = None
            self._seals.families = family_numbers(current_manifest(self._directory / DATABASE))
            self._seals.store_id = store_id
            self._seals.wal = max(map(wal_number, wal_files(self._directory / DATABASE)), default=None)
            self._seal_small()

    def after_options(self) -> None:
        with self._lock:
            self._seal_small()

    def after_close(self) -> None:
        """Seal the MANIFEST, and SST and blob files within the budget, newest first. The database is closed."""
        with self._lock:
            try:
                database = self._directory / DATABASE
                manifest = current_manifest(database)
                if scan_log(manifest).fault is not None:
                    return
                budget = CLOSE_BYTES_MAX
                for path in sorted(database.iterdir(), reverse=True):
                    if is_table(path.name) and path.name not in self._seals.files:
                        budget -= path.stat().st_size
                        if budget < 0:
                            break
                        self._seals.files[path.name] = file_sum(path)
                self._seals.manifest = (manifest.name, *file_sum(manifest))
                self._write()
            except (OSError, CorruptionError) as error:
                self._report(f"{self._directory / SEALS} could not be updated: {error}")

    def add(self, sums: dict[str, Sum]) -> None:
        """Seal SST and blob files that the caller has read without a fault."""
        with self._lock:
            fresh = {name: found for name, found in sums.items() if is_table(name) and name not in self._seals.files}
            if fresh:
                self._seals.files.update(fresh)
                self._write_or_report()

    def of(self, name: str) -> Sum | None:
        with self._lock:
            return self._seals.files.get(name)

    def _seal_small(self) -> None:
        database = self._directory / DATABASE
        try:
            for path in database.iterdir():
                if is_small(path.name) and path.name not in self._seals.files:
                    # RocksDB syncs the files it writes; `rocksdict` does not.
                    sync_file(path)
                    self._seals.files[path.name] = file_sum(path)
        except OSError as error:
            self._report(f"{self._directory / SEALS} could not be updated: {error}")
            return
        self._write_or_report()

    def _write_or_report(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._report(f"{self._directory / SEALS} could not be updated: {error}")

    def _write(self) -> None:
        present = set(os.listdir(self._directory / DATABASE))
        # IDENTITY and the configuration keep their seals when they are missing, because their absence is a fault.
        self._seals.files = {
            name: sealed
            for name, sealed in self._seals.files.items()
            if name in present or not (is_table(name) or name.startswith("OPTIONS-"))
        }
        write_durably(self._directory / SEALS, self._seals.encode())
