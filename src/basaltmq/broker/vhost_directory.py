"""Directories of virtual hosts (SPEC E9): one each, named by a hash of the name, with a file that says the name.

    <data>/node/store/               users, permissions, the list of virtual hosts
    <data>/vhosts/<hash>/.vhost      the name, as a sealed line (see store/directory.py)
    <data>/vhosts/<hash>/store/      everything of the virtual host, its streams' log included
    <data>/quarantine/<name>.<n>/    what was found among the virtual hosts and belongs to none

Names are any text; the hash makes them safe as names of files. What is found that nobody knows is moved aside and
reported, never deleted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from basaltmq.errors import CorruptionError, StorageError
from basaltmq.store.directory import encode_line, make_directory, os_error, read_line, sync_directory, write_durably

NAME_FILE: Final = ".vhost"
STORE: Final = "store"
NODE: Final = "node"
VHOSTS: Final = "vhosts"
QUARANTINE: Final = "quarantine"

HASH_BYTES: Final = 16
"""32 hex digits: no two names share them."""


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
            write_durably(path / NAME_FILE, encode_line({"name": vhost}))
        except OSError as error:
            raise os_error(error, path) from error
        return path / STORE

    def check(self, vhost: str) -> Path:
        """Where the store of a virtual host that was made before is; an error if it is not there, or is another's."""
        path = self.path(vhost)
        if not path.is_dir():
            raise StorageError(
                f"the directory of vhost {vhost!r}, {path}, is missing; put it back, or delete the vhost"
            )
        name = read_name(path)
        if name != vhost:
            raise CorruptionError(f"{path} says it is of vhost {name!r}, not of {vhost!r}; put the right one back")
        return path / STORE

    def remove(self, vhost: str) -> None:
        """Delete a virtual host's directory with all in it."""
        path = self.path(vhost)
        try:
            if path.exists():
                shutil.rmtree(path)
                sync_directory(self.root)
        except OSError as error:
            raise os_error(error, path) from error

    def quarantine_unknown(self, known: Iterable[str]) -> list[str]:
        """Move aside what belongs to no virtual host; a line about each."""
        if not self.root.is_dir():
            return []
        expected = {directory_name(vhost) for vhost in known}
        report = []
        try:
            for entry in sorted(os.scandir(self.root), key=lambda each: each.name):
                if entry.name in expected and entry.is_dir(follow_symlinks=False):
                    continue
                report.append(self._move_aside(Path(entry.path)))
        except OSError as error:
            raise os_error(error, self.root) from error
        return report

    def _move_aside(self, path: Path) -> str:
        try:
            name = f"of vhost {read_name(path)!r}, which does not exist"
        except (StorageError, OSError):
            name = f"without a readable {NAME_FILE} file"
        make_directory(self.data / QUARANTINE)
        number = 0
        while (target := self.data / QUARANTINE / f"{path.name}.{number}").exists():
            number += 1
        os.rename(path, target)
        sync_directory(self.root)
        sync_directory(self.data / QUARANTINE)
        return f"{path} is {name}; it was moved to {target}"


def read_name(path: Path) -> str:
    """The name a directory's file says."""
    try:
        said = read_line(path / NAME_FILE, "write it again by hand, or restore it")
    except FileNotFoundError:
        raise CorruptionError(f"{path} has no {NAME_FILE} file") from None
    name = said.get("name")
    if not isinstance(name, str):
        raise CorruptionError(f"{path / NAME_FILE} says no name")
    return name
