"""Opening a store on disk: for writing by one process, or as a read-only view beside it.

The order keeps a refused directory as it was: marker and lock, then the logs and seals read by ourselves, then the
family list, and only then anything is written: the holder's name, a torn tail cut, RocksDB. The view keeps RocksDB's
own log in a temporary folder, because it may not write next to the writer's.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rocksdict import AccessType, Rdict

from basaltmq.errors import StoreNotFoundError, UnknownFamilyError
from basaltmq.store.checkpoint import end_checkpoint
from basaltmq.store.directory import DATABASE, StoreDirectory, os_error, read_marker, sync_directory
from basaltmq.store.families import BY_LABEL
from basaltmq.store.options import StoreOptions, database_options, family_options
from basaltmq.store.repair import check_logs, check_logs_in_use, cut_tails
from basaltmq.store.rocks import RocksStore
from basaltmq.store.rocks_errors import translate
from basaltmq.store.seals import Sealer


def open_store(
    path: Path,
    *,
    create: bool = True,
    options: StoreOptions | None = None,
    report: Callable[[str], None] | None = None,
) -> RocksStore:
    """Open the store at `path` for writing. One process at a time; a second gets StoreLockedError at once.

    `report` hears, in one line each, of what was found not quite right and mended; without it they are logged.
    """
    options = options or StoreOptions()
    report = report or logging.getLogger("basaltmq.store").warning
    directory = StoreDirectory.hold(path, create=create)
    try:
        torn = check_logs(directory.database)
        sealer = Sealer(path, report)
        sealer.check()
        _require_known_families(directory.database)
        directory.claim()
        cut_tails(directory, torn, report)
        end_checkpoint(path)
        database = database_options(options)
        try:
            db = Rdict(str(directory.database), database, family_options(options))
        except Exception as error:
            raise translate(error, path) from error
        store = RocksStore(path, db, options, database, sealer=sealer)
        # RocksDB syncs the names in its directory, but not the name of the directory.
        sync_directory(path)
    except OSError as error:
        directory.release()
        raise os_error(error, path) from error
    except BaseException:
        directory.release()
        raise
    sealer.after_open()
    store.on_close(sealer.after_close)
    store.on_close(directory.release)
    return store


def open_view(path: Path, *, options: StoreOptions | None = None) -> RocksStore:
    """Open a store or a checkpoint for reading only, even while another process writes; `refresh` catches up."""
    options = options or StoreOptions(open_files_max=-1)
    if read_marker(path) is None:
        raise StoreNotFoundError(f"there is no store at {path}")
    check_logs_in_use(path / DATABASE)
    _require_known_families(path / DATABASE)
    logs = Path(tempfile.mkdtemp(prefix="basalt-view-"))
    try:
        database = database_options(options, log_directory=logs)
        try:
            db = Rdict(
                str(path / DATABASE), database, family_options(options), access_type=AccessType.secondary(str(logs))
            )
        except Exception as error:
            raise translate(error, path) from error
        store = RocksStore(path, db, options, database, read_only=True)
    except BaseException:
        shutil.rmtree(logs, ignore_errors=True)
        raise
    store.on_close(lambda: shutil.rmtree(logs, ignore_errors=True))
    return store


def _require_known_families(database: Path) -> None:
    if not (database / "CURRENT").exists():
        return
    try:
        present = Rdict.list_cf(str(database))
    except Exception as error:
        raise translate(error, database) from error
    unknown = sorted(set(present) - set(BY_LABEL))
    if unknown:
        raise UnknownFamilyError(
            f"{database.parent} holds families this Basalt does not know: {', '.join(unknown)}; use a newer Basalt"
        )
