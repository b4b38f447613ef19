"""Opens a store on disk: for writing by one process, or as a read-only view next to the writer.

A refused directory stays unchanged, because all checks come before the first write. The checks are, in order: marker
and lock, WAL files and seals (parsed by Basalt), family list. The writes are: the owner's name, the truncation of a
torn tail, then RocksDB. A view is a read-only RocksDB over files collected elsewhere (`view`); it writes nothing in the
store directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from rocksdict import AccessType, Options, Rdict

from basaltmq.errors import CorruptionError, StoreNotFoundError, UnknownFamilyError
from basaltmq.store.bodies.store import BodyStore
from basaltmq.store.checkpoint import end_checkpoint
from basaltmq.store.directory import CHECKSUMS, StoreDirectory, os_error, read_marker, sync_directory
from basaltmq.store.families import BY_LABEL
from basaltmq.store.integrity.body_frames import BODIES, sync_files
from basaltmq.store.integrity.log_checks import check_logs, cut_tails
from basaltmq.store.integrity.seals import Sealer
from basaltmq.store.integrity.synced import SyncedFile, synced_fault
from basaltmq.store.integrity.wal import wal_files
from basaltmq.store.options import StoreOptions, database_options, family_options
from basaltmq.store.rocks import RocksStore
from basaltmq.store.rocks_errors import translate
from basaltmq.store.rocks_properties import families_of
from basaltmq.store.salvage import excision, swap
from basaltmq.store.salvage.unreadable import Unreadable
from basaltmq.store.view import ATTEMPTS_MAX, ViewFiles


def open_store(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    options: StoreOptions | None = None,
    report: Callable[[str], None] | None = None,
) -> BodyStore:
    """Open the store at `path` for writing. Only one process may hold it; a second gets StoreLockedError at once.

    `report` receives one line per fault that was found and repaired. By default the lines are logged as warnings.
    """
    path = Path(path)
    options = options or StoreOptions()
    report = report or logging.getLogger("basaltmq.store").warning
    directory = StoreDirectory.hold(path, create=create)
    try:
        if swap.finish(path):
            report(f"{path}: completed an interrupted repair")
        sealer = Sealer(path, report)
        sealer.check()
        was_used = directory.database.exists() and not (path / CHECKSUMS).exists()
        if was_used and not sealer.was_closed and (fault := synced_fault(path)):
            report(f"{fault}; if WAL files were lost with it, confirmed writes are missing: compare with a backup")
        torn = check_logs(path, is_new=directory.is_new, was_closed=sealer.was_closed)
        _require_known_families(directory.database, path)
        directory.claim()
        cut_tails(directory, torn, report)
        end_checkpoint(path)
        excision.clear(path)
        if directory.database.exists() and any(log.stat().st_size for log in wal_files(directory.database)):
            # RocksDB flushes rows that it replays from the WAL, so their bodies must be durable before.
            sync_files(path / BODIES)
        database = database_options(options)
        unreadable = Unreadable(path)
        try:
            db = Rdict(str(directory.database), database, family_options(options, unreadable.families))
        except Exception as error:
            translated = translate(error, path)
            raise (
                sealer.name_damaged_files(translated) if isinstance(translated, CorruptionError) else translated
            ) from error
        synced = SyncedFile(path, report)
        store = BodyStore(path, db, options, database, sealer=sealer, synced=synced, unreadable=unreadable)
        # RocksDB syncs the entries of its directory, but not the directory's own entry in its parent.
        sync_directory(path)
    except OSError as error:
        directory.release()
        raise os_error(error, path) from error
    except BaseException:
        directory.release()
        raise
    # Sync the directory entry of the WAL file before SEALS requires the file.
    synced.note(0, check_directory=True)
    sealer.after_open(str(directory.marker.store_id))
    store.on_close(synced.close)
    store.on_close(sealer.after_close)
    store.on_close(directory.release)
    return store


def reopen_store(store: RocksStore) -> None:
    """Open a store again after a failed write or sync, for everything that holds it. Cursors and snapshots end.

    If that fails, the store stays closed, and another call may try again.
    """
    store.close()
    store.continue_as(open_store(store.path, create=False, options=store.options))


def open_view(path: str | os.PathLike[str], *, options: StoreOptions | None = None) -> BodyStore:
    """Open a store or a checkpoint read-only, even while another process writes. `refresh` catches up."""
    path = Path(path)
    options = options or StoreOptions()
    if read_marker(path) is None:
        raise StoreNotFoundError(f"there is no store at {path}; check the path")
    database = database_options(options)
    held: list[ViewFiles] = []

    def gather() -> Rdict:
        for _ in range(ATTEMPTS_MAX):
            files = ViewFiles(path)
            try:
                db = _open_gathered(files, path, database, options)
                missing = files.missing(db, families_of(db))
            except BaseException:
                files.release()
                raise
            if not missing:
                held.append(files)
                return db
            db.close()
            files.release()
        raise CorruptionError(f"{path} lacks {', '.join(missing)}, which its MANIFEST lists; run verify")

    def release(keep: int) -> None:
        while len(held) > keep:
            held.pop(0).release()

    def bodies() -> dict[int, int]:
        return {number: fd for files in held for number, fd in files.bodies.items()}

    store = BodyStore(path, gather(), options, database, reopen=gather, held=bodies)
    store.on_refresh(lambda: release(1))
    store.on_close(lambda: release(0))
    return store


def _open_gathered(files: ViewFiles, path: Path, database: Options, options: StoreOptions) -> Rdict:
    present = _require_known_families(files.database, path)
    database.set_db_log_dir(str(files.logs))
    families = {label: each for label, each in family_options(options).items() if label in present}
    try:
        return Rdict(str(files.database), database, families, access_type=AccessType.read_only(False))
    except Exception as error:
        raise translate(error, path) from error


def _require_known_families(database: Path, path: Path) -> set[str]:
    """Return the families of a database, an empty set if it does not exist yet. Reject unknown families."""
    if not (database / "CURRENT").exists():
        return set()
    try:
        present = Rdict.list_cf(str(database))
    except Exception as error:
        raise translate(error, path) from error
    unknown = sorted(set(present) - set(BY_LABEL))
    if unknown:
        raise UnknownFamilyError(
            f"{path} was written by another version of Basalt and has families that this version does not know: "
            f"{', '.join(unknown)}. Open it with that version."
        )
    return set(present)
