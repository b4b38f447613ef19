"""Repair: makes a damaged store open again with every readable row, and lists the losses.

The damaged database is never written. Its rows are copied into a new one next to it (`salvage.copying`), and its body
files are linked. The planes
then make the rows of the copy consistent (`reconcile`). The copy is verified and replaces the old database, which moves
to quarantine unchanged (`salvage.swap`). A crash before the swap leaves the store as it was.

    1  complete a swap that a crash interrupted
    2  STORE: write it again if it is lost and a Basalt database lies next to it
    3  verify. If there is no fault, only the planes check their rows. Files that need no rows (CURRENT, SEALS, files
       that SEALS covers) are rebuilt, and torn tails are truncated
    4  check the free space, copy, reconcile, verify the copy
    5  swap: exactly the verified files replace the database

Without `accept_loss`, the steps are the same except for the swap, and the copy is removed: a dry run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from uuid import UUID, uuid4

import msgspec

from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    DiskFullError,
    NotAStoreError,
    StoreNotFoundError,
)
from basaltmq.store.api import Store
from basaltmq.store.bodies.store import BodyStore
from basaltmq.store.directory import (
    DATABASE,
    MARKER,
    QUARANTINE,
    SEALS,
    Marker,
    StoreDirectory,
    is_database,
    lock_directory,
    make_directory,
    os_error,
    read_marker,
    unused_name,
    write_durably,
)
from basaltmq.store.integrity.body_frames import BODIES, link_files
from basaltmq.store.integrity.log_checks import check_logs
from basaltmq.store.integrity.seals import Sealer, Seals, check_small, is_small, is_table
from basaltmq.store.integrity.wal import is_wal
from basaltmq.store.open import open_store
from basaltmq.store.salvage import swap
from basaltmq.store.salvage.copying import copy_rows
from basaltmq.store.salvage.excision import KEPT
from basaltmq.store.salvage.files import find_files
from basaltmq.store.salvage.losses import Losses
from basaltmq.store.salvage.naming import Loss
from basaltmq.store.salvage.survey import Survey
from basaltmq.store.salvage.unreadable import UNREADABLE
from basaltmq.store.salvage.verify import Progress, inspect, verify
from basaltmq.store.space.free_space import free_bytes

SPARE_BYTES: Final = 64 << 20
"""Free space required beyond the size of the database: WAL, indexes and file system blocks."""

ROUNDS_MAX: Final = 5
"""Most rounds in which the planes reconcile the copy. Usually one is enough, and a second confirms it."""

Reconcile: TypeAlias = Callable[[Store, Losses, Path], list[Loss]]
"""Makes the rows of a store consistent and returns the losses. The path is the store's directory."""


@dataclass(slots=True)
class Repaired:
    """The result of a repair or of a dry run."""

    done: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    kept: Path | None = None
    """The directory with the damaged files and the list of all losses."""
    remaining: list[str] = field(default_factory=list)
    """Faults that verify still finds."""


def repair(
    path: Path, *, accept_loss: bool = True, reconcile: Reconcile | None = None, progress: Progress | None = None
) -> Repaired:
    """Make a damaged store open again. Without `accept_loss`, report the losses and change nothing."""
    outcome = Repaired()
    try:
        _restore_marker(path, outcome, accept_loss=accept_loss)
        if outcome.remaining:
            return outcome
        directory = StoreDirectory.hold(path, create=False)
        try:
            directory.claim()
            if swap.finish(path):
                outcome.done.append("completed an interrupted repair")
            swap.clear(path)
        finally:
            directory.release()
        found = inspect(path)
        if found.files and all(_is_small(file.name) for file in found.files):
            if not accept_loss:
                outcome.remaining = found.lines
                return outcome
            _repair_small(path, outcome)
            found = inspect(path)
        if accept_loss and _is_torn_only(path, found.files):
            open_store(path, create=False, report=outcome.done.append).close()
            found = inspect(path)
        if not found.lines:
            _reconcile_intact(path, outcome, reconcile, accept_loss=accept_loss)
            return outcome
        _rebuild(path, found.lines, outcome, reconcile, progress, accept_loss=accept_loss)
    except OSError as error:
        raise os_error(error, path) from error
    return outcome


def _restore_marker(path: Path, outcome: Repaired, *, accept_loss: bool) -> None:
    """Write STORE again if it is lost and a Basalt database lies next to it."""
    try:
        if read_marker(path) is None:
            raise StoreNotFoundError(f"there is no store at {path}; check the path")
    except (CorruptionError, NotAStoreError) as error:
        if not is_database(path / DATABASE):
            raise
        if not accept_loss:
            outcome.remaining.append(f"{error}; repair writes it again")
            return
        with lock_directory(path):
            marker = Marker(_store_id(path))
            damaged = path / MARKER
            if damaged.is_file():
                os.rename(damaged, unused_name(_quarantine(path) / f"{MARKER}.whole"))
            write_durably(damaged, marker.encode())
        outcome.done.append(f"{path / MARKER}: written again for store {marker.store_id}; nothing is lost")


def _store_id(path: Path) -> UUID:
    try:
        seals = Seals.read(path)
        if seals is not None and seals.store_id is not None:
            return UUID(seals.store_id)
    except (CorruptionError, ValueError):
        pass
    return uuid4()


def _is_small(name: str) -> bool:
    """Whether a file can be rebuilt without any row."""
    return name in (SEALS, "CURRENT") or is_small(name)


def _is_torn_only(path: Path, files: list[Path]) -> bool:
    """Whether the only faults are torn tails of logs, with unconfirmed writes."""
    try:
        sealer = Sealer(path, lambda _: None)
        sealer.check()
        torn = check_logs(path, is_new=False, was_closed=sealer.was_closed)
    except BasaltError:
        return False
    return bool(files) and {*files} <= {scan.path for scan in torn}


def _repair_small(path: Path, outcome: Repaired) -> None:
    """Rebuild wrong seals, and CURRENT if the MANIFEST that it should name is intact."""
    directory = StoreDirectory.hold(path, create=False)
    try:
        directory.claim()
        seals: Seals | None = None
        try:
            seals = Seals.read(path)
        except CorruptionError as error:
            os.rename(path / SEALS, unused_name(_quarantine(path) / f"{SEALS}.whole"))
            outcome.done.append(f"{path / SEALS}: {error}; moved it to quarantine")
        files = find_files(path / DATABASE, {})
        if files.manifest is not None and files.manifest_fault:
            current = path / DATABASE / "CURRENT"
            if current.exists():
                os.rename(current, unused_name(_quarantine(path) / "CURRENT.whole"))
            write_durably(current, f"{files.manifest.path.name}\n".encode())
            outcome.done.append(f"{current}: written again with {files.manifest.path.name}; nothing is lost")
        if seals is not None:
            wrong = dict(check_small(path, seals))
            for name in wrong:
                del seals.files[name]
            if wrong:
                write_durably(path / SEALS, seals.encode())
                wrong_files = ", ".join(f"{name} {what}" for name, what in wrong.items())
                outcome.done.append(f"{path / SEALS}: sealed again at the next open ({wrong_files}); nothing is lost")
    finally:
        directory.release()


def _quarantine(path: Path) -> Path:
    make_directory(path / QUARANTINE)
    return path / QUARANTINE


def _reconcile_intact(path: Path, outcome: Repaired, reconcile: Reconcile | None, *, accept_loss: bool) -> None:
    """Make the rows of a store with intact files consistent."""
    if reconcile is None or not accept_loss:
        return
    losses = Losses()
    with _Closing(open_store(path, create=False)) as store:
        outcome.losses += _reconcile(store, losses, path, reconcile)
    outcome.done += losses.recovered
    if outcome.losses:
        outcome.done.append(f"{path}: made inconsistent rows consistent")
        outcome.remaining = verify(path)


def _reconcile(store: Store, losses: Losses, path: Path, reconcile: Reconcile) -> list[Loss]:
    found: list[Loss] = []
    for _ in range(ROUNDS_MAX):
        more = [loss for loss in reconcile(store, losses, path) if loss not in found]
        found += more
        if not more:
            return found
    raise CorruptionError(f"{path}: rows are still inconsistent after {ROUNDS_MAX} rounds; restore a backup")


def _rebuild(
    path: Path,
    faults: list[str],
    outcome: Repaired,
    reconcile: Reconcile | None,
    progress: Progress | None,
    *,
    accept_loss: bool,
) -> None:
    directory = StoreDirectory.hold(path, create=False)
    try:
        directory.claim()
        if not (path / DATABASE).is_dir():
            raise CorruptionError(f"{path / DATABASE} is missing, so there is nothing to repair; restore a backup")
        size_bytes = _require_space(path)
        scratch = path / swap.SCRATCH
        copy = scratch / swap.COPY
        make_directory(copy)
        try:
            write_durably(copy / MARKER, directory.marker.encode())
            with Survey(path, scratch / "views") as survey:
                _copy(survey, copy, path, outcome, reconcile, progress, size_bytes)
            if not accept_loss:
                return
            left = verify(copy)
            if left:
                raise CorruptionError(f"the repaired copy of {path} has faults, nothing was changed: {left[0]}")
            number, outcome.kept = swap.quarantine_of(path)
            make_directory(outcome.kept)
            lines = [f"{fault}\n" for fault in faults]
            write_durably(outcome.kept / "faults.txt", "".join(lines).encode())
            write_durably(
                outcome.kept / swap.LOSSES, b"".join(msgspec.json.encode(each) + b"\n" for each in outcome.losses)
            )
            shutil.rmtree(scratch / "views", ignore_errors=True)
            for name in (UNREADABLE, KEPT):
                if (path / QUARANTINE / name).exists():
                    os.rename(path / QUARANTINE / name, outcome.kept / name)
            swap.take_over(path, number)
        finally:
            if not (path / swap.REPAIR).exists():
                swap.clear(path)
    finally:
        directory.release()


def _copy(
    survey: Survey,
    copy: Path,
    path: Path,
    outcome: Repaired,
    reconcile: Reconcile | None,
    progress: Progress | None,
    size_bytes: int,
) -> None:
    done_bytes = 0

    def copied(more_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes = min(done_bytes + more_bytes, size_bytes)
        if progress is not None:
            progress(done_bytes, size_bytes)

    link_files(path / BODIES, copy / BODIES)
    with _Closing(open_store(copy, create=False)) as store:
        rows = copy_rows(survey, store, copied)
        store.recount_bodies()
        outcome.losses += survey.describe_losses()
        if reconcile is not None:
            outcome.losses += _reconcile(store, survey.losses, path, reconcile)
    outcome.done.append(f"{path / DATABASE}: rebuilt from {rows} readable rows")
    outcome.done += survey.losses.recovered
    copied(size_bytes)


class _Closing:
    """Closes a store without masking the error that ended its use."""

    def __init__(self, store: BodyStore) -> None:
        self._store = store

    def __enter__(self) -> BodyStore:
        return self._store

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._store.close()
        except BasaltError:
            if kind is None:
                raise


def _require_space(path: Path) -> int:
    """Return the bytes that a copy may need. Raises DiskFullError if they are not free."""
    database = path / DATABASE
    size_bytes = sum(each.stat().st_size for each in database.iterdir() if is_table(each.name) or is_wal(each.name))
    missing_bytes = size_bytes + SPARE_BYTES - free_bytes(path)
    if missing_bytes > 0:
        raise DiskFullError(
            f"a repair of {path} copies up to {size_bytes} bytes and keeps the damaged files; "
            f"free {missing_bytes} more bytes and run it again"
        )
    return size_bytes
