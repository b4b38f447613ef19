"""Directories of virtual hosts (SPEC E9): one each, named by a hash of the name, with a file that says the name.

    <data>/node/store/               users, permissions, the list of virtual hosts
    <data>/vhosts/<hash>/.vhost      the name, as a sealed line (see store/directory.py)
    <data>/vhosts/<hash>/store/      everything of the virtual host, its streams' log included
    <data>/backups/                  backups made through the API
    <data>/RESERVE                   space that is released when the disk is full
    <data>/quarantine/<name>.<n>/    what was found among the virtual hosts and belongs to none

Names are any text; the hash makes them safe as names of files. What is found that nobody knows is moved aside and
reported, never deleted.

The node store and the `.vhost` files name the virtual hosts twice, so one of the two may be lost:

- A `.vhost` file that is missing or damaged is written again, because the hash proves which name the directory has.
- Without a node store nobody knows users and permissions. A start would make a new broker with the default user, so it
  is refused. `basalt serve --recover-vhosts` does it on request and takes the names from the `.vhost` files.
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
    make_directory,
    names_in,
    os_error,
    read_line,
    read_marker,
    some,
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
"""Backups made through the API, unless `admin.backup_dir` names another directory."""

SECRET_FILE: Final = "secret"  # noqa: S105
"""Beside the node's store."""

HASH_BYTES: Final = 16
"""32 hex digits: no two names share them."""

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
        """Refuse a data directory that is not a broker's, or lost its node store. Nothing is written."""
        held = names_in(self.data)
        if MARKER in held:
            raise NotAStoreError(
                f"{self.data} is the store of an embedded program, not a broker's data: name another directory with "
                "--data-dir"
            )
        if has_database(self.node_store):
            return
        foreign = sorted(set(held) - {NODE, VHOSTS, QUARANTINE, BACKUPS, reserve.NAME})
        foreign += [f"{NODE}/{name}" for name in names_in(self.data / NODE) if name not in (STORE, SECRET_FILE)]
        if foreign:
            raise NotAStoreError(
                f"{self.data} is not the data directory of a broker, but holds {some(foreign)}; name an empty or new "
                "directory with --data-dir"
            )
        if not recover and (self.has_any() or names_in(self.data / QUARANTINE)):
            raise self.node_lost()

    def node_lost(self) -> CorruptionError:
        return CorruptionError(
            f"{self.node_store} is missing or empty, but there are virtual hosts in {self.data}; restore {NODE}/ from "
            f"a backup, or start once with --recover-vhosts, which makes new users and permissions"
        )

    def move_lost_node_aside(self) -> None:
        """Make room for a new node store if there is only a remnant of the old one."""
        if names_in(self.node_store) and not has_database(self.node_store):
            _log.warning("the rest of the node store was moved to %s", self._quarantine(self.data / NODE))

    def path(self, vhost: str) -> Path:
        return self.root / directory_name(vhost)

    def store(self, vhost: str) -> Path:
        return self.path(vhost) / STORE

    def exists(self, vhost: str) -> bool:
        return self.path(vhost).is_dir()

    def make(self, vhost: str) -> Path:
        """Make the directory, durably; where the store goes."""
        path = self.path(vhost)
        try:
            make_directory(path)
        except OSError as error:
            raise os_error(error, path) from error
        self._write_name(path, vhost)
        return path / STORE

    def check(self, vhost: str) -> Path:
        """Where the store of a virtual host that was made before is; an error if it is not there, or is another's.

        A missing or damaged name file is written again.
        """
        path = self.path(vhost)
        if not path.is_dir():
            raise StorageError(
                f"the directory of vhost {vhost!r}, {path}, is missing; put it back, or delete the vhost"
            )
        try:
            name = read_name(path)
        except CorruptionError as error:
            _log.warning("vhost %r: %s; the file was written again", vhost, error)
            self._write_name(path, vhost)
            name = vhost
        if name != vhost:
            raise CorruptionError(f"{path} says it is of vhost {name!r}, not of {vhost!r}; put the right one back")
        if not has_database(path / STORE):
            raise StorageError(
                f"the store of vhost {vhost!r}, {path / STORE}, is missing or empty; put it back from a backup, or "
                "delete the vhost"
            )
        return path / STORE

    def _write_name(self, path: Path, vhost: str) -> None:
        try:
            write_durably(path / NAME_FILE, encode_line({"name": vhost}))
        except OSError as error:
            raise os_error(error, path) from error

    def remove(self, vhost: str) -> None:
        """Delete a virtual host's directory with all in it."""
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
        """Virtual hosts that have a directory with a readable name file."""
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
        """Move aside what belongs to no virtual host; a line about each."""
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
            remedy = f"to serve it, restore its {NAME_FILE} file from a backup, move it back and use --recover-vhosts"
        return f"{path} is {name}; it was moved to {self._quarantine(path)}; {remedy}"

    def _quarantine(self, path: Path) -> Path:
        """Move something aside, durably; where it is now."""
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
    """Whether there is a store at the path that was open before."""
    return read_marker(store) is not None and (store / DATABASE / "CURRENT").exists()


def read_name(path: Path) -> str:
    """The name a directory's file says."""
    try:
        said = read_line(path / NAME_FILE, "write it again by hand, or restore it")
    except FileNotFoundError:
        raise CorruptionError(f"{path} has no {NAME_FILE} file") from None
    except OSError as error:
        raise os_error(error, path / NAME_FILE) from error
    name = said.get("name")
    if not isinstance(name, str):
        raise CorruptionError(f"{path / NAME_FILE} says no name")
    return name
