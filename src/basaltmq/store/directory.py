"""The directory of a store on disk: who may open it, and what it holds.

    STORE         one sealed line (see below): format, version, store id. Written first, so that a directory without
                  it is either empty or not ours.
    LOCK          held with flock by the one process that writes; its text names the holder.
    SEALS         one sealed line: checksums of files RocksDB does not protect itself (`seals`).
    CHECKSUMS     only in a checkpoint: size and CRC32C of every file in it (`checkpoint`).
    kv/           the RocksDB database.
    quarantine/   what could not be read or placed; never deleted by Basalt.

A sealed line is `{CRC32C of the JSON, 8 hex digits} {JSON}\\n`.

Nothing here is touched before the checks have passed: a directory that is refused is left as it was found, down to
the text in LOCK. `claim` ends the checks.
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
"""Of the directory itself; every store inside has a version of its own."""

MARKER: Final = "STORE"
MARKER_DRAFT: Final = "STORE.new"
LOCK: Final = "LOCK"
SEALS: Final = "SEALS"
CHECKSUMS: Final = "CHECKSUMS"
DATABASE: Final = "kv"
QUARANTINE: Final = "quarantine"

LEFT_BY_OTHERS: Final = frozenset(
    {"lost+found", ".DS_Store", ".directory", ".gitignore", ".gitkeep", ".keep", ".snapshot", ".zfs"}
)
"""Names that file systems, desktops and version control leave in a directory that is empty for its user. Other hidden
files count: a home directory has nothing else at first."""

LINE_BYTES_MAX: Final = 256 << 20
"""A sealed line at most; two million files of 100 bytes each, far more than a store has."""

NAMES_SHOWN_MAX: Final = 3
"""Of what a refused directory holds: enough to recognise it."""


def encode_line(said: Mapping[str, Any]) -> bytes:
    body = json.dumps(said)
    return f"{google_crc32c.value(body.encode()):08x} {body}\n".encode()


def decode_line(raw: bytes, path: Path, remedy: str) -> dict[str, Any]:
    """What a sealed line says; CorruptionError if it is not what was written."""
    crc, _, body = raw.removesuffix(b"\n").partition(b" ")
    if crc != b"%08x" % google_crc32c.value(body):
        raise CorruptionError(f"{path} does not match its checksum; {remedy}")
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        # The checksum of nothing is zero, and anybody can make one.
        raise CorruptionError(f"{path} holds no JSON; {remedy}") from None
    if not isinstance(said, dict):
        raise CorruptionError(f"{path} holds {type(said).__name__}, not an object; {remedy}")
    return said


def read_line(path: Path, remedy: str) -> dict[str, Any]:
    """Read and decode the sealed line at `path`; FileNotFoundError if there is none."""
    with open(path, "rb") as file:
        raw = file.read(LINE_BYTES_MAX + 1)
    if len(raw) > LINE_BYTES_MAX:
        raise CorruptionError(f"{path} is over {LINE_BYTES_MAX} bytes; {remedy}")
    return decode_line(raw, path, remedy)


@dataclass(frozen=True, slots=True)
class Marker:
    """What STORE says."""

    store_id: UUID
    version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        return encode_line({"format": FORMAT, "version": self.version, "store_id": str(self.store_id)})

    @classmethod
    def decode(cls, raw: bytes, path: Path) -> Marker:
        said = decode_line(raw, path, "restore it from a backup of this store")
        if said.get("format") != FORMAT:
            raise NotAStoreError(f"{path} says format {said.get('format')!r}, not {FORMAT!r}")
        version = said.get("version")
        if not isinstance(version, int) or version < 1:
            raise CorruptionError(f"{path} says version {version!r}; restore it from a backup of this store")
        if version > FORMAT_VERSION:
            raise StoreTooNewError(
                f"{path.parent} has directory version {version}, this Basalt knows up to {FORMAT_VERSION}: "
                "open it with a newer Basalt"
            )
        try:
            return cls(UUID(said["store_id"]), version)
        except (KeyError, ValueError, AttributeError, TypeError):
            raise CorruptionError(f"{path} has no store id; restore it from a backup of this store") from None


def names_in(path: Path) -> list[str]:
    """What a directory holds, in order, without `LEFT_BY_OTHERS`; nothing if it is missing."""
    try:
        return sorted(set(os.listdir(path)) - LEFT_BY_OTHERS)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        file = next((each for each in (path, *path.parents) if each.exists()), path)
        raise NotAStoreError(f"{file} is a file; a store is a directory") from None
    except OSError as error:
        raise os_error(error, path) from error


def some(names: Sequence[str]) -> str:
    """A few names, for an error message."""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (", ..." if len(names) > NAMES_SHOWN_MAX else "")


def read_marker(path: Path) -> Marker | None:
    """The marker of the store at `path`; None if the path is empty or missing, so that a store may begin there."""
    present = names_in(path)
    try:
        if MARKER in present:
            return Marker.decode((path / MARKER).read_bytes(), path / MARKER)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        raise NotAStoreError(f"{path / MARKER} is a directory; in a store it is a file") from None
    except OSError as error:
        raise os_error(error, path) from error
    if set(present) - {MARKER_DRAFT, LOCK}:
        raise NotAStoreError(
            f"{path} has lost its {MARKER} file: restore it from a backup, or run `basalt store repair`"
            if is_database(path / DATABASE)
            else f"{path} is not a Basalt store: it has no {MARKER} file but holds {some(present)}; "
            "name an empty or new directory"
        )
    return None


class StoreDirectory:
    """A store's directory, held for writing by this process until `release`."""

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
        """Check the directory, take its lock and, if it is empty and `create`, make it a store."""
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
            # Somebody may have made it, or removed it, before the lock was ours.
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
        """The checks have passed: name this process in LOCK."""
        assert self._lock is not None
        try:
            self._lock.claim()
        except OSError as error:
            raise os_error(error, self.path) from error

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def is_database(path: Path) -> bool:
    """Whether a directory holds files of RocksDB."""
    return path.is_dir() and any(each.suffix in (".sst", ".blob", ".log") for each in path.iterdir())


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Hold the lock of a directory whose STORE cannot be read."""
    lock = _take_lock(path)
    try:
        yield
    finally:
        lock.release()


class _Lock:
    """LOCK, held. If it was made for this and never claimed, it goes again."""

    def __init__(self, path: Path, fd: int, *, made: bool) -> None:
        self._path = path
        self._fd = fd
        self._made = made
        in_child(self._let_go)

    def claim(self) -> None:
        self._made = False
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._fd < 0:
            return
        if self._made:
            self._path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        """Also in a forked child, whose handle would hold the lock past the end of its parent."""
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
        made = not path.exists()
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
        # Whoever held it may have removed it before letting go; then this is the lock of nothing.
        if _is_at(fd, path):
            return _Lock(path, fd, made=made)
        os.close(fd)


def _locked(directory: Path, holder: str) -> str:
    if holder == str(os.getpid()):
        return f"{directory} is open for writing in this process ({holder}) already; use that store, or close it first"
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
    """Make a directory and what is missing above it, durably; for this user alone, since stores hold secrets."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync_directory(each.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that after a crash it is there whole or the old state is."""
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
    """Make what is in a file durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
        return StoreReadOnlyError(
            f"{path} does not allow this: {error.strerror}; open it read-only, or change its permissions"
        )
    return StorageError(f"{path}: {error.strerror or error}")
