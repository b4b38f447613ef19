"""The files behind a read-only view: one moment of a database that somebody else may be writing.

RocksDB's own way of following a writer, a secondary instance, does not work with blob files: it crashes the process
as soon as an iterator meets one, and its makers say that the two do not go together. So a view is a read-only RocksDB
on a scratch directory of its own:

    tables, blob files    opened here and held; a link leads to the held file (/proc/self/fd/N), so that a compaction of
                          the writer cannot take it away. They are never written again once they are named.
    CURRENT, MANIFEST     copied
    WAL                   copied, from the oldest one needed on; a last record still in the making is left out

Order makes the moment one that was. Files are held first, then the MANIFEST is copied, then what came to be in between
is held: whatever that MANIFEST names existed in one of the two listings, unless it came and went between them. That is
found when the database is open (`missing`), and gathering begins again. Logs are read last, oldest first, so they go
on from the MANIFEST's state without a gap. Nothing is written at the store: a view works on a read-only file system.
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
from basaltmq.store.integrity.manifest import oldest_log
from basaltmq.store.integrity.seals import is_table
from basaltmq.store.integrity.wal import current_manifest, is_wal, scan_log, wal_number
from basaltmq.store.salvage.views import BLOB_LINE
from basaltmq.store.scratch import Scratch

ATTEMPTS_MAX: Final = 20
"""A file that comes and goes within the milliseconds of one gathering is rare; so many are not chance."""

FILES_SPARE: Final = 256
"""File handles left for everything else when the limit is raised for a view."""


class ViewFiles:
    """One gathered moment. `release` lets the files go."""

    def __init__(self, path: Path) -> None:
        self._source = path / DATABASE
        self._held: dict[str, int] = {}
        try:
            self._scratch = Scratch("view")
        except OSError as error:
            raise os_error(error, Path(tempfile.gettempdir())) from error
        # A view that is dropped without being closed must not keep files open.
        self._let_go = weakref.finalize(self, _let_go, self._held)
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
        """Where RocksDB may write its own log."""
        return self._scratch.path

    def missing(self, db: Rdict, families: Iterable[Rdict]) -> list[str]:
        """Files the database needs and the scratch directory does not have."""
        needed = {str(file["name"]).removeprefix("/") for file in db.live_files()}
        for family in families:
            for number in BLOB_LINE.findall(family.property_value("rocksdb.sstables") or ""):
                needed.add(f"{int(number):06}.blob")
        return sorted(needed - self._held.keys())

    def release(self) -> None:
        self._scratch.remove()
        self._let_go()

    def _gather(self) -> None:
        self.database.mkdir()
        current_manifest(self._source)
        self._hold()
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

    def _hold(self) -> None:
        """Open every table and log that is not held yet."""
        with os.scandir(self._source) as entries:
            names = [entry.name for entry in entries if is_table(entry.name) or is_wal(entry.name)]
        _allow_files(2 * len(names) + len(self._held) + FILES_SPARE)
        for name in names:
            if name not in self._held:
                with contextlib.suppress(FileNotFoundError):
                    self._held[name] = os.open(self._source / name, os.O_RDONLY | os.O_CLOEXEC)


def _let_go(held: dict[str, int]) -> None:
    while held:
        os.close(held.popitem()[1])


def _cut_unfinished(copy: Path, original: Path) -> None:
    """Leave out what is being written this moment; refuse damage under the name of the file it is in."""
    scan = scan_log(copy)
    if scan.fault is None:
        return
    if not scan.is_cut_short:
        raise CorruptionError(
            f"{original}: {scan.fault.what} at byte {scan.fault.offset}; "
            "open the store for writing to have a torn tail cut, or repair it"
        )
    os.truncate(copy, scan.fault.cut_at)


def _allow_files(count: int) -> None:
    """Raise the soft limit of open files if it is too low for a view."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or count <= soft:
        return
    if hard != resource.RLIM_INFINITY and count > hard:
        raise LimitExceededError(f"a view needs {count} open files, the limit is {hard}; raise it (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
