"""What to do about a damaged log: before an open, and when an operator asks for a repair.

`check_logs` reads MANIFEST and WAL before RocksDB does and touches nothing. It refuses damage by name, and hands back
the logs whose tail is torn. `cut_tails` copies a torn tail into quarantine and then cuts it, so that RocksDB, asked
for absolute consistency, opens. A crash in between leaves the tail torn, and the next open does the same again.

A torn tail is of writes nobody was told are durable. In the MANIFEST only a file that ends inside a record counts as
torn: its records are synced one by one, so a last record that is there whole and wrong is damage.

`repair` is the operator's word that what is behind the damage may go. It cuts at the last whole record, as a crash at
that moment would have left the store, and keeps the files as they were in quarantine. Tables it does not mend: for
those there are backups.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from basaltmq.errors import CorruptionError, StoreNotFoundError
from basaltmq.store.directory import (
    MARKER,
    SEALS,
    StoreDirectory,
    make_directory,
    os_error,
    read_marker,
    sync_directory,
    sync_file,
    write_durably,
)
from basaltmq.store.manifest import oldest_log
from basaltmq.store.seals import Seals, check_manifest, check_small, is_table
from basaltmq.store.wal import LogScan, current_manifest, scan_log, wal_files, wal_number

REMEDY: Final = (
    "nothing was touched; restore a backup, or run repair to accept the loss of what was written from there on"
)


def check_logs(database: Path) -> list[LogScan]:
    """The logs with torn tails; CorruptionError for damage anywhere else."""
    if not database.exists():
        return []
    if not (database / "CURRENT").exists():
        _require_nothing_to_lose(database)
        return []
    manifest = scan_log(current_manifest(database))
    if manifest.fault is not None and not manifest.is_cut_short:
        remedy = "restore a backup" + (", or run repair to drop its last record" if manifest.fault.torn else "")
        raise CorruptionError(f"{manifest.describe()}; nothing was touched; {remedy}")
    logs = _needed_logs(database)
    _require_torn_only_at_the_end(logs)
    return [scan for scan in (manifest, *logs) if scan.fault is not None]


def cut_tails(directory: StoreDirectory, torn: list[LogScan], report: Callable[[str], None]) -> None:
    """Copy each torn tail into quarantine and cut it."""
    try:
        for scan in torn:
            assert scan.fault is not None
            cut_at = scan.fault.cut_at
            kept = _keep_tail(directory.quarantine, scan.path, cut_at)
            _truncate(scan.path, cut_at)
            report(
                f"{scan.describe()}: a torn tail of {scan.size_bytes - cut_at} bytes, of writes that were not "
                f"confirmed, was moved to {kept}"
            )
    except OSError as error:
        raise os_error(error, directory.path) from error


def repair(path: Path, report: Callable[[str], None] | None = None) -> list[str]:
    """Make a store with damaged logs open again, giving up what is behind the damage. Says what it gave up."""
    if read_marker(path) is None:
        raise StoreNotFoundError(f"there is no store at {path}; {MARKER} is missing")
    done: list[str] = []
    directory = StoreDirectory.hold(path, create=False)
    try:
        directory.claim()
        _repair_current(directory, done)
        _repair_manifest(directory, done)
        _repair_logs(directory, done)
        _repair_seals(directory, done)
    except OSError as error:
        raise os_error(error, path) from error
    finally:
        directory.release()
        for line in done:
            if report is not None:
                report(line)
    return done


def _require_nothing_to_lose(database: Path) -> None:
    """A crash while a store is made leaves no CURRENT; but then there is no log and no table either."""
    for path in sorted(database.iterdir()):
        if is_table(path.name) or path.suffix == ".log":
            raise CorruptionError(
                f"{database / 'CURRENT'} is missing, but {path.name} is there: opening would begin an empty store over "
                "it; nothing was touched; restore a backup, or run repair"
            )


def _needed_logs(database: Path) -> list[LogScan]:
    """The write-ahead logs RocksDB will replay. Older ones are left over, and whatever is in them is in tables."""
    oldest = oldest_log(current_manifest(database))
    return [scan_log(path) for path in wal_files(database) if wal_number(path) >= oldest]


def is_cut_short(scan: LogScan) -> bool:
    """The file ends inside its last record, as one that is being written does."""
    return scan.fault is not None and scan.fault.torn and scan.fault.what.startswith("the file ends")


def _require_torn_only_at_the_end(logs: list[LogScan]) -> None:
    for place, scan in enumerate(logs):
        if scan.fault is None:
            continue
        if not scan.fault.torn:
            raise CorruptionError(f"{scan.describe()}; {REMEDY}")
        later = next((log for log in logs[place + 1 :] if log.records), None)
        if later is not None:
            raise CorruptionError(f"{scan.describe()}, while {later.path.name} after it has records; {REMEDY}")


def _repair_current(directory: StoreDirectory, done: list[str]) -> None:
    try:
        current_manifest(directory.database)
    except CorruptionError as error:
        current = directory.database / "CURRENT"
        manifests = sorted(directory.database.glob("MANIFEST-*"))
        if len(manifests) != 1:
            names = ", ".join(path.name for path in manifests) or "none"
            raise CorruptionError(f"{error}: which MANIFEST is the right one cannot be told ({names})") from None
        if current.exists():
            _keep_whole(directory.quarantine, current)
        write_durably(current, f"{manifests[0].name}\n".encode())
        done.append(f"{current}: written anew to name {manifests[0].name}, the only one there; nothing is lost")


def _repair_manifest(directory: StoreDirectory, done: list[str]) -> None:
    manifest = scan_log(current_manifest(directory.database))
    if manifest.fault is None:
        return
    if not manifest.fault.torn:
        raise CorruptionError(f"{manifest.describe()}; a MANIFEST cannot be repaired: restore a backup")
    kept = _keep_whole(directory.quarantine, manifest.path)
    _truncate(manifest.path, manifest.fault.cut_at)
    done.append(
        f"{manifest.describe()}: its last record was dropped, and with it what it said of the files; "
        f"the file as it was is {kept}"
    )


def _repair_logs(directory: StoreDirectory, done: list[str]) -> None:
    logs = _needed_logs(directory.database)
    first = next((place for place, scan in enumerate(logs) if scan.fault is not None), None)
    if first is None:
        return
    for place, scan in enumerate(logs[first:]):
        if scan.size_bytes == 0:
            continue
        kept = _keep_whole(directory.quarantine, scan.path)
        if place == 0:
            assert scan.fault is not None
            lost = scan.size_bytes - scan.fault.cut_at
            _truncate(scan.path, scan.fault.cut_at)
            done.append(
                f"{scan.describe()}: cut back to its first {scan.records} records; {lost} bytes of writes are given "
                f"up; the file as it was is {kept}"
            )
        else:
            _truncate(scan.path, 0)
            done.append(
                f"{scan.path}: comes after the damage, so its writes ({scan.size_bytes} bytes) are given up; the file "
                f"as it was is {kept}"
            )


def _repair_seals(directory: StoreDirectory, done: list[str]) -> None:
    path = directory.path / SEALS
    try:
        seals = Seals.read(directory.path)
        if seals is None:
            return
        wrong = [f"{name} {what}" for name, what in check_small(directory.path, seals)]
        if manifest := check_manifest(directory.path, seals):
            wrong.append(f"{current_manifest(directory.database).name} {manifest}")
    except CorruptionError as error:
        wrong = [str(error)]
    if wrong:
        kept = _keep_whole(directory.quarantine, path)
        path.unlink()
        sync_directory(directory.path)
        done.append(f"{path}: dropped ({'; '.join(wrong)}); the next open seals what is there; as it was: {kept}")


def _keep_tail(quarantine: Path, path: Path, offset: int) -> Path:
    return _keep(quarantine, path, f"{path.name}.tail-at-{offset}", offset)


def _keep_whole(quarantine: Path, path: Path) -> Path:
    return _keep(quarantine, path, f"{path.name}.whole", 0)


def _keep(quarantine: Path, path: Path, name: str, offset: int) -> Path:
    """Copy a file from `offset` on into quarantine, durably, under a name that is free."""
    make_directory(quarantine)
    kept = quarantine / name
    number = 1
    while kept.exists():
        number += 1
        kept = quarantine / f"{name}.{number}"
    draft = kept.with_name(kept.name + ".new")
    try:
        with open(path, "rb") as source, open(draft, "wb") as copy:
            source.seek(offset)
            shutil.copyfileobj(source, copy, 1 << 20)
        sync_file(draft)
        os.rename(draft, kept)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(quarantine)
    return kept


def _truncate(path: Path, size_bytes: int) -> None:
    os.truncate(path, size_bytes)
    sync_file(path)
