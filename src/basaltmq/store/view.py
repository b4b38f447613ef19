"""The files of a read-only view: a consistent copy of a database that another process may be writing.

RocksDB's secondary instances do not support blob files: the process crashes when an iterator meets one, and RocksDB
documents the limitation. So a view is a read-only RocksDB on its own scratch directory:

    SST and blob files    kept open here; a symlink leads to the open file (/proc/self/fd/N), so that a compaction of
                          the writer cannot remove it. They are immutable once they are named.
    body files            kept open here, in the store's own directory: the files listed before and after the copy
    CURRENT, MANIFEST     copied
    WAL                   copied, from the oldest one required; an incomplete last record is dropped

The order of the steps makes the copy consistent. SST, blob and WAL files are opened first, then the MANIFEST is copied,
then the files created in between are opened. Every file in that MANIFEST existed in one of the two listings, unless it
was created and deleted between them. `missing` detects that once the database is open, and collection starts again. WAL
files are copied last, oldest first, so they continue the MANIFEST's state without a gap. Nothing is written in the
store directory: a view works on a read-only file system.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rocksdict import Rdict

from basaltmq.errors import CorruptionError, LimitExceededError
from basaltmq.store.directory import DATABASE, os_error
from basaltmq.store.integrity.body_frames import BODIES, files_in
from basaltmq.store.integrity.manifest import oldest_log
from basaltmq.store.integrity.seals import is_table
from basaltmq.store.integrity.wal import current_manifest, is_wal, scan_log, wal_number
from basaltmq.store.salvage.views import BLOB_LINE
from basaltmq.store.scratch import Scratch

ATTEMPTS_MAX: Final = 20
"""A file rarely appears and disappears within the milliseconds of one collection. 20 times in a row is a fault."""

FILES_SPARE: Final = 256
"""File handles reserved for other uses when a view raises the limit."""


class ViewFiles:
    """The collected files of one view. `release` closes and removes them."""

    def __init__(self, path: Path) -> None:
        self._source = path / DATABASE
        self._bodies = path / BODIES
        self._held: dict[str, int] = {}
        self.bodies: dict[int, int] = {}
        """Descriptors of the body files, by number."""
        try:
            self._scratch = Scratch("view")
        except OSError as error:
            raise os_error(error, Path(tempfile.gettempdir())) from error
        # A view that is dropped without `release` must not keep files open.
        self._close_files = weakref.finalize(self, _close_files, self._held, self.bodies)
        try:
            self._gather()
        except OSError as error:
            self.release()
            raise os_error(error, Path(error.filename2 or error.filename or self._scratch.path)) from error
        except BaseException:
            self.release()
            raise

    @property
    def database(self) -> Path:
        return self._scratch.path / DATABASE

    @property
    def logs(self) -> Path:
        """The directory for RocksDB's own log."""
        return self._scratch.path

    def missing(self, db: Rdict, families: Iterable[Rdict]) -> list[str]:
        """Return files that the database needs and the scratch directory lacks."""
        needed = {str(file["name"]).removeprefix("/") for file in db.live_files()}
        for family in families:
            for number in BLOB_LINE.findall(family.property_value("rocksdb.sstables") or ""):
                needed.add(f"{int(number):06}.blob")
        return sorted(needed - self._held.keys())

    def release(self) -> None:
        self._scratch.remove()
        self._close_files()

    def _gather(self) -> None:
        self.database.mkdir()
        current_manifest(self._source)
        self._hold()
        self._hold_bodies()
        manifest = current_manifest(self._source)
        copy = self.database / manifest.name
        shutil.copyfile(manifest, copy)
        (self.database / "CURRENT").write_text(f"{manifest.name}\n")
        _cut_unfinished(copy, manifest)
        self._hold()
        oldest = oldest_log(copy)
        for name in sorted(self._held):
            if is_table(name):
                (self.database / name).symlink_to(f"/proc/self/fd/{self._held[name]}")
            elif wal_number(Path(name)) >= oldest:
                shutil.copyfile(f"/proc/self/fd/{self._held[name]}", self.database / name)
                _cut_unfinished(self.database / name, self._source / name)
        self._hold_bodies()

    def _hold_bodies(self) -> None:
        """Open every body file that is not open yet."""
        found = files_in(self._bodies)
        _allow_files(2 * len(found) + len(self._held) + len(self.bodies) + FILES_SPARE)
        for number, path in found.items():
            if number not in self.bodies:
                with contextlib.suppress(FileNotFoundError):
                    self.bodies[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _hold(self) -> None:
        """Open every SST, blob and WAL file that is not open yet."""
        with os.scandir(self._source) as entries:
            names = [entry.name for entry in entries if is_table(entry.name) or is_wal(entry.name)]
        _allow_files(2 * len(names) + len(self._held) + FILES_SPARE)
        for name in names:
            if name not in self._held:
                with contextlib.suppress(FileNotFoundError):
                    self._held[name] = os.open(self._source / name, os.O_RDONLY | os.O_CLOEXEC)


def _close_files(held: dict[str, int], bodies: dict[int, int]) -> None:
    for each in (held, bodies):
        while each:
            os.close(each.popitem()[1])


def _cut_unfinished(copy: Path, original: Path) -> None:
    """Drop a record that the writer has not finished. Raise on damage, naming the original file."""
    scan = scan_log(copy)
    if scan.fault is None:
        return
    if not scan.is_cut_short:
        raise CorruptionError(
            f"{original}: {scan.fault.what} at byte {scan.fault.offset}; "
            "open the store for writing to truncate a torn tail, or repair it"
        )
    os.truncate(copy, scan.fault.cut_at)


def _allow_files(count: int) -> None:
    """Raise the soft limit of open files if it is too low for a view."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or count <= soft:
        return
    if hard != resource.RLIM_INFINITY and count > hard:
        raise LimitExceededError(f"a view needs {count} open files, but the limit is {hard}; raise it (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
