"""The directory of a store on disk: who may open it, and what it holds.

    STORE         one line of JSON with its CRC32C: format, version, store id. Written first, so that a directory
                  without it is either empty or not ours.
    LOCK          held with flock by the one process that writes; its text names the holder.
    kv/           the RocksDB database.
    quarantine/   what could not be read or placed; never deleted by Basalt.

Nothing here is touched before the checks have passed: a directory that is refused is left as it was found.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

import google_crc32c

from basaltmq.errors import (
    CorruptionError,
    DiskFullError,
    NotAStoreError,
    StorageError,
    StoreLockedError,
    StoreNotFoundError,
    StoreReadOnlyError,
    StoreTooNewError,
)

FORMAT: Final = "basalt-store"
FORMAT_VERSION: Final = 1
"""Of the directory itself; every store inside has a version of its own."""

MARKER: Final = "STORE"
MARKER_DRAFT: Final = "STORE.new"
LOCK: Final = "LOCK"
DATABASE: Final = "kv"
QUARANTINE: Final = "quarantine"


@dataclass(frozen=True, slots=True)
class Marker:
    """What STORE says."""

    store_id: UUID
    version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        body = json.dumps({"format": FORMAT, "version": self.version, "store_id": str(self.store_id)})
        return f"{google_crc32c.value(body.encode()):08x} {body}\n".encode()

    @classmethod
    def decode(cls, raw: bytes, path: Path) -> Marker:
        crc, _, body = raw.rstrip(b"\n").partition(b" ")
        if crc != b"%08x" % google_crc32c.value(body):
            raise CorruptionError(f"{path} does not match its checksum; restore it from a backup of this store")
        said = json.loads(body)
        if said["format"] != FORMAT:
            raise NotAStoreError(f"{path} says format {said['format']!r}, not {FORMAT!r}")
        if said["version"] > FORMAT_VERSION:
            raise StoreTooNewError(
                f"{path.parent} has directory version {said['version']}, this Basalt knows up to {FORMAT_VERSION}: "
                "open it with a newer Basalt"
            )
        return cls(UUID(said["store_id"]), said["version"])


def read_marker(path: Path) -> Marker | None:
    """The marker of the store at `path`; None if the path is empty or missing, so that a store may begin there."""
    try:
        present = sorted(entry.name for entry in os.scandir(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise NotAStoreError(f"{path} is a file; a store is a directory") from None
    if MARKER in present:
        return Marker.decode((path / MARKER).read_bytes(), path / MARKER)
    if set(present) - {MARKER_DRAFT, LOCK}:
        raise NotAStoreError(
            f"{path} is not a Basalt store: it has no {MARKER} file but holds {', '.join(present[:3])}"
            f"{', ...' if len(present) > 3 else ''}; name an empty or new directory"
        )
    return None


class StoreDirectory:
    """A store's directory, held for writing by this process until `release`."""

    def __init__(self, path: Path, marker: Marker, lock_fd: int, *, is_new: bool) -> None:
        self.path = path
        self.marker = marker
        self.is_new = is_new
        self._lock_fd = lock_fd

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def quarantine(self) -> Path:
        return self.path / QUARANTINE

    @classmethod
    def hold(cls, path: Path, *, create: bool) -> StoreDirectory:
        """Check the directory, take its lock and, if it is empty and `create`, make it a store."""
        marker = read_marker(path)
        if marker is None and not create:
            raise StoreNotFoundError(f"there is no store at {path}; create one, or check the path")
        try:
            if marker is None:
                path.mkdir(parents=True, exist_ok=True)
            lock_fd = _lock(path)
        except OSError as error:
            raise os_error(error, path) from error
        try:
            is_new = marker is None
            if marker is None:
                marker = Marker(uuid4())
                write_durably(path / MARKER, marker.encode())
        except OSError as error:
            os.close(lock_fd)
            raise os_error(error, path) from error
        return cls(path, marker, lock_fd, is_new=is_new)

    def release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _lock(path: Path) -> int:
    if not os.access(path, os.W_OK):
        raise StoreReadOnlyError(f"{path} is not writable by this user; open it read-only, or change its permissions")
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise StoreLockedError(
            f"{path} is open for writing by process {holder}; stop it, or open the store read-only"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def write_durably(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that after a crash it is there whole or the old state is."""
    draft = path.with_name(path.name + ".new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(draft, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def os_error(error: OSError, path: Path) -> StorageError:
    """What an operating system error means to the user of a store."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"no space left for {path}: {error.strerror}; free some and open the store again")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreReadOnlyError(f"{path} cannot be written: {error.strerror}; open it read-only")
    return StorageError(f"{path}: {error.strerror or error}")
