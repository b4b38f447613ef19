"""Opening a store on disk: for writing by one process, or as a read-only view beside it.

The order keeps a refused directory as it was: marker and lock, then the logs and seals read by ourselves, then the
family list, and only then anything is written: the holder's name, a torn tail cut, RocksDB. A view is a
read-only RocksDB on files gathered elsewhere (`view`), and writes nothing at the store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from rocksdict import AccessType, Options, Rdict

from basaltmq.errors import CorruptionError, StoreNotFoundError, UnknownFamilyError
from basaltmq.store.checkpoint import end_checkpoint
from basaltmq.store.directory import StoreDirectory, os_error, read_marker, sync_directory
from basaltmq.store.families import BY_LABEL
from basaltmq.store.integrity.log_checks import check_logs, cut_tails
from basaltmq.store.integrity.seals import Sealer
from basaltmq.store.integrity.synced import SyncedFile
from basaltmq.store.options import StoreOptions, database_options, family_options
from basaltmq.store.rocks import RocksStore, families_of
from basaltmq.store.rocks_errors import translate
from basaltmq.store.salvage import swap
from basaltmq.store.salvage.unreadable import Unreadable
from basaltmq.store.view import ATTEMPTS_MAX, ViewFiles


def open_store(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    options: StoreOptions | None = None,
    report: Callable[[str], None] | None = None,
) -> RocksStore:
    """Open the store at `path` for writing. One process at a time; a second gets StoreLockedError at once.

    `report` hears, in one line each, of what was found not quite right and mended; without it they are logged.
    """
    path = Path(path)
    options = options or StoreOptions()
    report = report or logging.getLogger("basaltmq.store").warning
    directory = StoreDirectory.hold(path, create=create)
    try:
        if swap.finish(path):
            report(f"{path}: an interrupted repair was finished")
        sealer = Sealer(path, report)
        sealer.check()
        torn = check_logs(path, is_new=directory.is_new, was_closed=sealer.was_closed)
        _require_known_families(directory.database, path)
        directory.claim()
        cut_tails(directory, torn, report)
        end_checkpoint(path)
        database = database_options(options)
        unreadable = Unreadable(path)
        try:
            db = Rdict(str(directory.database), database, family_options(options, unreadable.families))
        except Exception as error:
            meaning = translate(error, path)
            raise sealer.blame(meaning) if isinstance(meaning, CorruptionError) else meaning from error
        synced = SyncedFile(path, report)
        store = RocksStore(path, db, options, database, sealer=sealer, synced=synced, unreadable=unreadable)
        # RocksDB syncs the names in its directory, but not the name of the directory.
        sync_directory(path)
    except OSError as error:
        directory.release()
        raise os_error(error, path) from error
    except BaseException:
        directory.release()
        raise
    sealer.after_open(str(directory.marker.store_id))
    synced.note(0, look=True)
    store.on_close(synced.close)
    store.on_close(sealer.after_close)
    store.on_close(directory.release)
    return store


def open_view(path: str | os.PathLike[str], *, options: StoreOptions | None = None) -> RocksStore:
    """Open a store or a checkpoint for reading only, even while another process writes; `refresh` catches up."""
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
        raise CorruptionError(f"{path} lacks {', '.join(missing)}, which its MANIFEST names; verify it")

    def release(keep: int) -> None:
        while len(held) > keep:
            held.pop(0).release()

    store = RocksStore(path, gather(), options, database, reopen=gather)
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
    """The families a database has; none of them if it is yet to be made."""
    if not (database / "CURRENT").exists():
        return set()
    try:
        present = Rdict.list_cf(str(database))
    except Exception as error:
        raise translate(error, path) from error
    unknown = sorted(set(present) - set(BY_LABEL))
    if unknown:
        raise UnknownFamilyError(
            f"{path} holds families this Basalt does not know: {', '.join(unknown)}; use a newer Basalt"
        )
    return set(present)
