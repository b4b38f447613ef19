"""The directory of a store on disk: layout, marker, and lock.

    STORE         one sealed line (see below): format, version, store id. Written first, so that a directory without
                  it is either empty or not a store.
    LOCK          locked with flock by the writing process; its text is the owner's process id.
    SEALS         one sealed line: checksums of files that RocksDB does not protect itself (`seals`).
    CHECKSUMS     only in a checkpoint: size and CRC32C of every file in it (`checkpoint`).
    kv/           the RocksDB database.
    log/          the commit log of streams (`streams.stored`).
    quarantine/   data that could not be read or placed; never deleted by Basalt.

A sealed line is `{CRC32C of the JSON, 8 hex digits} {JSON}\\n`.

Nothing is modified before all checks have passed: a refused directory stays as it was, including the text in LOCK.
`claim` ends the checks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
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
from basaltmq.store.forks import in_child

FORMAT: Final = "basalt-store"
FORMAT_VERSION: Final = 1
"""Version of the directory layout. Each store inside has its own version."""

MARKER: Final = "STORE"
MARKER_DRAFT: Final = "STORE.new"
LOCK: Final = "LOCK"
SEALS: Final = "SEALS"
CHECKSUMS: Final = "CHECKSUMS"
DATABASE: Final = "kv"
QUARANTINE: Final = "quarantine"
LOG: Final = "log"

LEFT_BY_OTHERS: Final = frozenset(
    {"lost+found", ".DS_Store", ".directory", ".gitignore", ".gitkeep", ".keep", ".snapshot", ".zfs"}
)
"""Names that file systems, desktops and version control create in otherwise empty directories. Other hidden files
count, because a new home directory contains only hidden files."""

LINE_BYTES_MAX: Final = 256 << 20
"""Size limit of a sealed line. It fits two million files at 100 bytes each, far more than a store has."""

SYNC_MEANINGLESS: Final = (errno.EROFS, errno.EINVAL)
"""Errors of a sync on a read-only file system, where no data waits to be written."""

NAMES_SHOWN_MAX: Final = 3
"""Number of file names in the error for a refused directory."""


def encode_line(content: Mapping[str, Any]) -> bytes:
    body = json.dumps(content)
    return f"{google_crc32c.value(body.encode()):08x} {body}\n".encode()


def decode_line(raw: bytes, path: Path, remedy: str) -> dict[str, Any]:
    """Return the content of a sealed line. Raises CorruptionError if it does not match its checksum."""
    crc, _, body = raw.removesuffix(b"\n").partition(b" ")
    if crc != b"%08x" % google_crc32c.value(body):
        raise CorruptionError(f"{path} does not match its checksum; {remedy}")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        # The checksum of empty data is zero, so a matching checksum does not imply JSON.
        raise CorruptionError(f"{path} is not JSON; {remedy}") from None
    if not isinstance(content, dict):
        raise CorruptionError(f"{path} holds a JSON {type(content).__name__}, not an object; {remedy}")
    return content


def read_line(path: Path, remedy: str) -> dict[str, Any]:
    """Read and decode the sealed line at `path`. Raises FileNotFoundError if the file is missing."""
    with open(path, "rb") as file:
        raw = file.read(LINE_BYTES_MAX + 1)
    if len(raw) > LINE_BYTES_MAX:
        raise CorruptionError(f"{path} is over {LINE_BYTES_MAX} bytes; {remedy}")
    return decode_line(raw, path, remedy)


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of STORE."""

    store_id: UUID
    version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        return encode_line({"format": FORMAT, "version": self.version, "store_id": str(self.store_id)})

    @classmethod
    def decode(cls, raw: bytes, path: Path) -> Marker:
        content = decode_line(raw, path, "restore it from a backup of this store")
        if content.get("format") != FORMAT:
            raise NotAStoreError(f"{path} has format {content.get('format')!r}, not {FORMAT!r}")
        version = content.get("version")
        if not isinstance(version, int) or version < 1:
            raise CorruptionError(f"{path} has version {version!r}; restore it from a backup of this store")
        if version > FORMAT_VERSION:
            raise StoreTooNewError(
                f"{path.parent} has directory version {version}, but this Basalt reads up to version {FORMAT_VERSION}; "
                "use a newer Basalt"
            )
        try:
            return cls(UUID(content["store_id"]), version)
        except (KeyError, ValueError, AttributeError, TypeError):
            raise CorruptionError(f"{path} has no store id; restore it from a backup of this store") from None


def names_in(path: Path) -> list[str]:
    """Return the sorted names in a directory, without `LEFT_BY_OTHERS`. A missing directory has none."""
    try:
        return sorted(set(os.listdir(path)) - LEFT_BY_OTHERS)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        file = next((each for each in (path, *path.parents) if each.exists()), path)
        raise NotAStoreError(f"{file} is a file; a store is a directory") from None
    except OSError as error:
        raise os_error(error, path) from error


def first_names(names: Sequence[str]) -> str:
    """Join the first names for an error message."""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")


def read_marker(path: Path) -> Marker | None:
    """Return the marker of the store at `path`, or None if a store may be created there (empty or missing)."""
    present = names_in(path)
    try:
        if MARKER in present:
            return Marker.decode((path / MARKER).read_bytes(), path / MARKER)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise NotAStoreError(f"{path / MARKER} is a directory, not a file; {path} is not a Basalt store") from None
    except OSError as error:
        raise os_error(error, path) from error
    if set(present) - {MARKER_DRAFT, LOCK}:
        raise NotAStoreError(
            f"{path} has lost its {MARKER} file: restore it from a backup, or run `basalt store repair`"
            if is_database(path / DATABASE)
            else f"{path} is not a Basalt store: it has no {MARKER} file but holds {first_names(present)}; "
            "choose an empty or new directory"
        )
    return None


class StoreDirectory:
    """A store's directory, locked for writing by this process until `release`."""

    def __init__(self, path: Path, marker: Marker, lock: _Lock, *, is_new: bool) -> None:
        self.path = path
        self.marker = marker
        self.is_new = is_new
        self._lock: _Lock | None = lock

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def quarantine(self) -> Path:
        return self.path / QUARANTINE

    @classmethod
    def hold(cls, path: Path, *, create: bool) -> StoreDirectory:
        """Check the directory and lock it. If it is empty and `create` is set, make it a store."""
        marker = read_marker(path)
        if marker is None and not create:
            raise StoreNotFoundError(f"there is no store at {path}; create one, or check the path")
        try:
            if marker is None:
                make_directory(path)
            lock = _take_lock(path)
        except OSError as error:
            raise os_error(error, path) from error
        try:
            # Another process may have created or removed it before this process got the lock.
            marker = read_marker(path)
            is_new = marker is None
            if marker is None:
                marker = Marker(uuid4())
                write_durably(path / MARKER, marker.encode())
        except OSError as error:
            lock.release()
            raise os_error(error, path) from error
        except BaseException:
            lock.release()
            raise
        return cls(path, marker, lock, is_new=is_new)

    def claim(self) -> None:
        """Write this process's id to LOCK. Call it after all checks have passed."""
        assert self._lock is not None
        try:
            self._lock.claim()
        except OSError as error:
            raise os_error(error, self.path) from error

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def unused_name(path: Path) -> Path:
    """Return `path`, or the first of `{path}.2`, `{path}.3` ... that does not exist."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def is_database(path: Path) -> bool:
    """Whether a directory contains RocksDB files."""
    return path.is_dir() and any(each.suffix in (".sst", ".blob", ".log") for each in path.iterdir())


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Hold the lock of a directory whose STORE is unreadable."""
    lock = _take_lock(path)
    try:
        yield
    finally:
        lock.release()


class _Lock:
    """A held LOCK file. If this process created it and never claimed it, `release` removes it."""

    def __init__(self, path: Path, fd: int, *, created: bool) -> None:
        self._path = path
        self._fd = fd
        self._created = created
        in_child(self._close)

    def claim(self) -> None:
        self._created = False
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._fd < 0:
            return
        if self._created:
            self._path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        """Close the handle. Also runs in a forked child, whose handle would keep the lock after its parent ends."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _take_lock(directory: Path) -> _Lock:
    for place in (directory, directory / DATABASE):
        if place.exists() and not os.access(place, os.W_OK):
            raise StoreReadOnlyError(
                f"{place} is not writable by this user; open the store read-only, or change its permissions"
            )
    path = directory / LOCK
    while True:
        created = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise StoreLockedError(_locked(directory, holder)) from None
        except OSError:
            os.close(fd)
            raise
        # The previous owner may have removed the file before it unlocked it. Then this lock protects nothing.
        if _is_at(fd, path):
            return _Lock(path, fd, created=created)
        os.close(fd)


def _locked(directory: Path, holder: str) -> str:
    if holder == str(os.getpid()):
        return f"{directory} is already open for writing in this process ({holder}); use that store, or close it first"
    return (
        f"{directory} is open for writing by process {holder or 'unknown'}; "
        "stop it, or open the store read-only with open_view"
    )


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents durably. Only this user gets access: stores hold secrets."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync_directory(each.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: after a crash the file holds the old or the new content."""
    draft = path.with_name(path.name + ".new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_data(path: Path) -> None:
    """Sync the data of a file that another process writes. Ignores a missing file and a read-only file system."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fdatasync(fd)
    except OSError as error:
        if error.errno not in SYNC_MEANINGLESS:
            raise
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def os_error(error: OSError, path: Path) -> StorageError:
    """Return the Basalt error for an operating system error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"no space left for {path}: {error.strerror}; free space and open the store again")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreReadOnlyError(
            f"{path} cannot be written: {error.strerror}; open it read-only, or change its permissions"
        )
    return StorageError(f"{path}: {error.strerror or error}")
