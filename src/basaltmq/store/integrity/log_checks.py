"""What is done about the logs of a database before it is opened.

`check_logs` reads MANIFEST and WAL before RocksDB does and touches nothing. It refuses damage by name, and hands back
the logs whose tail is torn. `cut_tails` copies a torn tail into quarantine and then cuts it, so that RocksDB, asked
for absolute consistency, opens. A crash in between leaves the tail torn, and the next open does the same again.

A torn tail holds writes that were never confirmed. SYNCED says which were: a log that ends before them is damaged, and
so is one that is missing. In the MANIFEST only a file that ends inside a record counts as torn: its records are synced
one by one, so a last record that is there whole and wrong is damage.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import DATABASE, StoreDirectory, make_directory, os_error, sync_directory, sync_file
from basaltmq.store.integrity.manifest import live_tables, oldest_log
from basaltmq.store.integrity.seals import is_table
from basaltmq.store.integrity.synced import missing_writes, read_synced, short_manifest
from basaltmq.store.integrity.wal import LogScan, current_manifest, scan_log, wal_files, wal_number

REMEDY: Final = "nothing was touched; restore a backup, or run repair, which keeps every row that can be read"


def check_logs(directory: Path, *, is_new: bool, was_closed: bool) -> list[LogScan]:
    """The logs with torn tails; CorruptionError for damage anywhere else.

    `is_new`: the store is being made. `was_closed`: it was closed cleanly, so nothing is in a log only.
    """
    database = directory / DATABASE
    if not (database / "CURRENT").exists():
        synced = None if is_new else read_synced(directory)
        if synced is not None and synced.sequence:
            raise CorruptionError(
                f"{database / 'CURRENT'} is missing, although rows were written: opening would begin an empty store; "
                "nothing was touched; restore a backup, or run repair"
            )
        if database.exists():
            _require_nothing_to_lose(database)
        return []
    manifest = scan_log(current_manifest(database))
    if not was_closed and (wrong := short_manifest(directory)):
        raise CorruptionError(f"{manifest.path} {wrong}; nothing was touched; restore a backup, or run repair")
    if manifest.fault is not None and not manifest.is_cut_short:
        raise CorruptionError(f"{manifest.describe()}; nothing was touched; restore a backup, or run repair")
    _require_tables(database, manifest.path)
    logs = _needed_logs(database)
    _require_torn_only_at_the_end(logs)
    if not was_closed and (missing := missing_writes(directory, manifest.path, logs)):
        raise CorruptionError(f"{database}: {missing}; {REMEDY}")
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


def _require_nothing_to_lose(database: Path) -> None:
    """A crash while a store is made leaves no CURRENT; but then there is no log and no table either."""
    for path in sorted(database.iterdir()):
        if is_table(path.name) or path.suffix == ".log":
            raise CorruptionError(
                f"{database / 'CURRENT'} is missing, but {path.name} is there: opening would begin an empty store over "
                "it; nothing was touched; restore a backup, or run repair"
            )


def _require_tables(database: Path, manifest: Path) -> None:
    """Every table is there, as long as it was. RocksDB would open without, and only then find out."""
    for number, size_bytes in (live_tables(manifest) or {}).items():
        path = database / f"{number:06}.sst"
        try:
            found_bytes = path.stat().st_size
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing; {REMEDY}") from None
        if found_bytes != size_bytes:
            raise CorruptionError(f"{path} has {found_bytes} bytes, not {size_bytes}; {REMEDY}")


def _needed_logs(database: Path) -> list[LogScan]:
    """The write-ahead logs RocksDB will replay. Older ones are left over, and whatever is in them is in tables."""
    oldest = oldest_log(current_manifest(database))
    return [scan_log(path) for path in wal_files(database) if wal_number(path) >= oldest]


def _require_torn_only_at_the_end(logs: list[LogScan]) -> None:
    for place, scan in enumerate(logs):
        if scan.fault is None:
            continue
        if not scan.fault.torn:
            raise CorruptionError(f"{scan.describe()}; {REMEDY}")
        later = next((log for log in logs[place + 1 :] if log.records), None)
        if later is not None:
            raise CorruptionError(f"{scan.describe()}, while {later.path.name} after it has records; {REMEDY}")


def _keep_tail(quarantine: Path, path: Path, offset: int) -> Path:
    return _keep(quarantine, path, f"{path.name}.tail-at-{offset}", offset)


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
