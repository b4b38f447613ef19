"""The data directory of a broker: node store and one directory per virtual host (SPEC E9).

    <data>/node/store/               users, permissions, the list of virtual hosts
    <data>/vhosts/<hash>/.vhost      the name, as a line with a checksum (see store/directory.py)
    <data>/vhosts/<hash>/store/      all data of the virtual host, including its stream log
    <data>/backups/                  backups made through the API
    <data>/RESERVE                   space that is released when the disk is full
    <data>/quarantine/<name>.<n>/    entries of vhosts/ that belong to no virtual host

Names are arbitrary text, so directories are named by a hash of the name. Unknown entries are moved to quarantine and
reported, never deleted.

Both the node store and the `.vhost` files hold the names of virtual hosts, so either one can be lost:

- A missing or damaged `.vhost` file is rewritten, because the hash proves which name the directory has.
- Without a node store, users and permissions are lost. A start would create a new broker with the default user, so it
  is refused. `basalt serve --recover-vhosts` allows it and reads the names from the `.vhost` files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from basaltmq.errors import CorruptionError, NotAStoreError, StorageError
from basaltmq.store.directory import (
    DATABASE,
    LEFT_BY_OTHERS,
    MARKER,
    encode_line,
    first_names,
    is_database,
    make_directory,
    names_in,
    os_error,
    read_line,
    read_marker,
    sync_directory,
    write_durably,
)
from basaltmq.store.space import reserve

NAME_FILE: Final = ".vhost"
STORE: Final = "store"
NODE: Final = "node"
VHOSTS: Final = "vhosts"
QUARANTINE: Final = "quarantine"
BACKUPS: Final = "backups"
"""Directory for backups made through the API, unless `admin.backup_dir` is set."""

SECRET_FILE: Final = "secret"  # noqa: S105
"""Name of the node secret file, next to the node store."""

CERTIFICATE_FILE: Final = "self-signed.pem"
"""Name of the file with the certificate that the broker made for itself."""

NODE_FILES: Final = (STORE, SECRET_FILE, CERTIFICATE_FILE)

HASH_BYTES: Final = 16
"""32 hex digits. Collisions are practically impossible."""

_log: Final = logging.getLogger(__name__)


def directory_name(vhost: str) -> str:
    return hashlib.blake2b(vhost.encode(errors="surrogatepass"), digest_size=HASH_BYTES).hexdigest()


class VHostDirectories:
    """The directories of all virtual hosts of a node."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.root = data / VHOSTS

    @property
    def node_store(self) -> Path:
        return self.data / NODE / STORE

    def require_ours(self, *, recover: bool = False) -> None:
        """Raise if the data directory is not a broker's or lost its node store. Writes nothing."""
        held = names_in(self.data)
        if MARKER in held:
            raise NotAStoreError(
                f"{self.data} is the store of an embedded program, not a broker's data directory; name another "
                "directory with --data-dir"
            )
        if has_database(self.node_store):
            return
        foreign = sorted(set(held) - {NODE, VHOSTS, QUARANTINE, BACKUPS, reserve.NAME})
        foreign += [f"{NODE}/{name}" for name in names_in(self.data / NODE) if name not in NODE_FILES]
        if foreign:
            raise NotAStoreError(
                f"{self.data} is not the data directory of a broker: it contains {first_names(foreign)}; "
                "name an empty or new directory with --data-dir"
            )
        if not recover and (self.has_any() or names_in(self.data / QUARANTINE)):
            raise self.node_lost()

    def node_lost(self) -> CorruptionError:
        return CorruptionError(
            f"{self.node_store} is missing or empty, but {self.data} has virtual hosts; restore {NODE}/ from a backup, "
            "or start once with --recover-vhosts, which creates new users and permissions"
        )

    def move_lost_node_aside(self) -> None:
        """Quarantine an incomplete node store, so that a new one can be created."""
        if names_in(self.node_store) and not has_database(self.node_store):
            _log.warning("moved the incomplete node store to %s", self._quarantine(self.data / NODE))

    def path(self, vhost: str) -> Path:
        return self.root / directory_name(vhost)

    def store(self, vhost: str) -> Path:
        return self.path(vhost) / STORE

    def exists(self, vhost: str) -> bool:
        return self.path(vhost).is_dir()

    def make(self, vhost: str) -> Path:
        """Create the directory durably and return the path for the store."""
        path = self.path(vhost)
        try:
            make_directory(path)
        except OSError as error:
            raise os_error(error, path) from error
        self._write_name(path, vhost)
        return path / STORE

    def check(self, vhost: str) -> Path:
        """Return the path of an existing store. Raises if it is missing or belongs to another virtual host.

        A missing or damaged name file is rewritten.
        """
        path = self.path(vhost)
        if not path.is_dir():
            raise StorageError(f"the directory of vhost {vhost!r}, {path}, is missing; restore it, or delete the vhost")
        try:
            name = read_name(path)
        except CorruptionError as error:
            _log.warning("vhost %r: %s; rewriting the file", vhost, error)
            self._write_name(path, vhost)
            name = vhost
        if name != vhost:
            raise CorruptionError(f"{path} belongs to vhost {name!r}, not to {vhost!r}; restore the right directory")
        if not has_database(path / STORE):
            raise StorageError(
                f"the store of vhost {vhost!r}, {path / STORE}, is missing or empty; restore it from a backup, or "
                "delete the vhost"
            )
        return path / STORE

    def _write_name(self, path: Path, vhost: str) -> None:
        try:
            write_durably(path / NAME_FILE, encode_line({"name": vhost}))
        except OSError as error:
            raise os_error(error, path) from error

    def remove(self, vhost: str) -> None:
        """Delete the directory of a virtual host recursively."""
        path = self.path(vhost)
        try:
            if path.exists():
                shutil.rmtree(path)
                sync_directory(self.root)
        except OSError as error:
            raise os_error(error, path) from error

    def has_any(self) -> bool:
        return bool(names_in(self.root))

    def names(self) -> list[str]:
        """Return the virtual hosts that have a directory with a readable name file."""
        found = []
        for each in names_in(self.root):
            try:
                name = read_name(self.root / each)
            except StorageError:
                continue
            if directory_name(name) == each:
                found.append(name)
        return found

    def quarantine_unknown(self, known: Iterable[str]) -> list[str]:
        """Quarantine entries that belong to no virtual host. Return one line about each."""
        if not self.root.is_dir():
            return []
        expected = {directory_name(vhost) for vhost in known}
        report = []
        try:
            for entry in sorted(os.scandir(self.root), key=lambda each: each.name):
                if entry.name in LEFT_BY_OTHERS:
                    continue
                if entry.name in expected and entry.is_dir(follow_symlinks=False):
                    continue
                report.append(self._move_aside(Path(entry.path)))
        except OSError as error:
            raise os_error(error, self.root) from error
        return report

    def _move_aside(self, path: Path) -> str:
        try:
            name = f"of vhost {read_name(path)!r}, which does not exist"
            remedy = f"to serve it, stop the broker, move it back to {path} and start once with --recover-vhosts"
        except StorageError:
            name = f"without a readable {NAME_FILE} file"
            remedy = (
                f"to serve it, move it back to {path} while the broker runs, and create the virtual host by its name"
            )
        return f"{path} is {name}; it was moved to {self._quarantine(path)}; {remedy}"

    def _quarantine(self, path: Path) -> Path:
        """Move a path to quarantine, durably. Return its new path."""
        try:
            make_directory(self.data / QUARANTINE)
            number = 0
            while (target := self.data / QUARANTINE / f"{path.name}.{number}").exists():
                number += 1
            os.rename(path, target)
            sync_directory(path.parent)
            sync_directory(self.data / QUARANTINE)
        except OSError as error:
            raise os_error(error, path) from error
        return target


def has_database(store: Path) -> bool:
    """Whether the path holds a store that has been opened before."""
    database = store / DATABASE
    return read_marker(store) is not None and ((database / "CURRENT").exists() or is_database(database))


def read_name(path: Path) -> str:
    """Return the name in a directory's name file."""
    try:
        record = read_line(path / NAME_FILE, "rewrite or restore it")
    except FileNotFoundError:
        raise CorruptionError(f"{path} has no {NAME_FILE} file") from None
    except OSError as error:
        raise os_error(error, path / NAME_FILE) from error
    name = record.get("name")
    if not isinstance(name, str):
        raise CorruptionError(f"{path / NAME_FILE} contains no name")
    return name
