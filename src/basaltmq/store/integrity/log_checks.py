"""Checks the MANIFEST and the WAL files before RocksDB opens, and truncates torn tails.

`check_logs` reads them without a change. It raises on damage, naming the file, and returns the logs with a torn tail.
`cut_tails` copies a torn tail into quarantine and truncates it, so that RocksDB opens with absolute consistency. After
a crash in between, the tail is still torn and the next open repeats both steps.

A torn tail holds only unconfirmed writes. SYNCED records the confirmed ones: a WAL file that ends before them, or that
is missing, is damage. In the MANIFEST only a file that ends inside a record counts as torn. Its records are synced one
by one, so a complete but invalid last record is damage. A write whose large body is not on disk counts as torn, too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import (
    DATABASE,
    StoreDirectory,
    make_directory,
    os_error,
    sync_directory,
    sync_file,
    unused_name,
)
from basaltmq.store.integrity.body_tails import without_bodies_cut
from basaltmq.store.integrity.manifest import live_tables, oldest_log
from basaltmq.store.integrity.seals import is_table
from basaltmq.store.integrity.synced import missing_writes, read_synced, short_manifest
from basaltmq.store.integrity.wal import LogScan, current_manifest, scan_log, wal_files, wal_number

REMEDY: Final = "nothing was changed; restore a backup, or run repair, which keeps every readable row"


def check_logs(directory: Path, *, is_new: bool, was_closed: bool) -> list[LogScan]:
    """Return the logs with torn tails. Raises CorruptionError for any other damage.

    `is_new`: the store is being created. `was_closed`: it was closed cleanly, so no row is only in the WAL.
    """
    database = directory / DATABASE
    if not (database / "CURRENT").exists():
        synced = None if is_new else read_synced(directory)
        if synced is not None and synced.sequence:
            raise CorruptionError(
                f"{database / 'CURRENT'} is missing, although rows were written: opening would create an empty store; "
                f"{REMEDY}"
            )
        if database.exists():
            _require_nothing_to_lose(database)
        return []
    manifest = scan_log(current_manifest(database))
    if not was_closed and (wrong := short_manifest(directory)):
        raise CorruptionError(f"{manifest.path} {wrong}; {REMEDY}")
    if manifest.fault is not None and not manifest.is_cut_short:
        raise CorruptionError(f"{manifest.describe()}; {REMEDY}")
    _require_tables(database, manifest.path)
    logs = _needed_logs(database)
    _require_torn_only_at_the_end(logs)
    if not was_closed and (missing := missing_writes(directory, manifest.path, logs)):
        raise CorruptionError(f"{database}: {missing}; {REMEDY}")
    # Also after a close, because a store that failed before has its last rows in the WAL.
    logs = without_bodies_cut(directory, manifest.path, logs)
    # The newest first: a crash between two truncations must not leave a gap.
    return [scan for scan in (*reversed(logs), manifest) if scan.fault is not None]


def cut_tails(directory: StoreDirectory, torn: list[LogScan], report: Callable[[str], None]) -> None:
    """Copy each torn tail into quarantine and truncate it."""
    try:
        for scan in torn:
            assert scan.fault is not None
            cut_at = scan.fault.cut_at
            kept = _keep_tail(directory.quarantine, scan.path, cut_at)
            os.truncate(scan.path, cut_at)
            sync_file(scan.path)
            report(
                f"{scan.describe()}: moved a torn tail of {scan.size_bytes - cut_at} bytes of unconfirmed writes "
                f"to {kept}"
            )
    except OSError as error:
        raise os_error(error, directory.path) from error


def _require_nothing_to_lose(database: Path) -> None:
    """Raise if CURRENT is missing but data exists. A crash during creation leaves neither WAL nor SST files."""
    for path in sorted(database.iterdir()):
        if is_table(path.name) or path.suffix == ".log":
            raise CorruptionError(
                f"{database / 'CURRENT'} is missing, but {path.name} exists: opening would create an empty store over "
                f"it; {REMEDY}"
            )


def _require_tables(database: Path, manifest: Path) -> None:
    """Raise if an SST file is missing or has the wrong size. RocksDB would detect that only after the open."""
    for number, size_bytes in (live_tables(manifest) or {}).items():
        path = database / f"{number:06}.sst"
        try:
            found_bytes = path.stat().st_size
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing; {REMEDY}") from None
        if found_bytes != size_bytes:
            raise CorruptionError(f"{path} has {found_bytes} bytes, not {size_bytes}; {REMEDY}")


def _needed_logs(database: Path) -> list[LogScan]:
    """Return the WAL files that RocksDB will replay. The rows of older ones are already in SST files."""
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
            raise CorruptionError(f"{scan.describe()}, but the later {later.path.name} has records; {REMEDY}")


def _keep_tail(quarantine: Path, path: Path, offset: int) -> Path:
    """Copy a file from `offset` into quarantine durably, under an unused name."""
    make_directory(quarantine)
    kept = unused_name(quarantine / f"{path.name}.tail-at-{offset}")
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
