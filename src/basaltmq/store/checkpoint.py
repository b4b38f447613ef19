"""Online backups: creates and restores checkpoints.

    checkpoint/
      STORE        the marker of the source store
      CHECKSUMS    one sealed line: {"format", "version", "store_id", "files": {"kv/000009.sst": [size, crc], ...}}
      kv/          a RocksDB checkpoint: SST files are hard links where the file system allows, WAL files are copies
      log/         if there are streams: sealed segments are hard links, the active one is a copy

Both operations build `{target}.partial-{pid}` next to the target and rename it at the end, after every file and
directory entry is durable. So a crash or a full disk never leaves a partial backup under the target's name. The next
checkpoint or restore to the same target removes partial directories that are not locked and leaves locked ones alone.

A checkpoint opens with `open_view`. Opening it for writing turns it into a store and deletes CHECKSUMS, which would no
longer match. The source store is not affected although hard links share SST files, because RocksDB never modifies a
finished SST file. But a bad sector under a shared file damages both. `restore` copies files.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import google_crc32c

from basaltmq.errors import AlreadyExistsError, BasaltError, CorruptionError, InvalidArgumentError, NotAStoreError
from basaltmq.store.directory import (
    CHECKSUMS,
    DATABASE,
    LOCK,
    MARKER,
    Marker,
    encode_line,
    make_directory,
    os_error,
    read_line,
    read_marker,
    sync_directory,
    sync_file,
    write_durably,
)
from basaltmq.store.integrity.seals import Sealer, Sum, file_sum, is_table, mismatch
from basaltmq.store.rocks_errors import translate

FORMAT: Final = "basalt-checksums"
VERSION: Final = 1
_CHUNK_BYTES: Final = 4 << 20


def write_checkpoint(
    source: Path,
    target: Path,
    create: Callable[[str], None],
    sealer: Sealer | None,
    marker: Marker,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Create a checkpoint of the open store at `source`.

    `create` makes the RocksDB checkpoint at a given path. `add_files` then adds the files next to the database, such as
    a log that is at least as recent.
    """
    with _building(source, target) as draft:
        database = draft / DATABASE
        create(str(database))
        if add_files is not None:
            add_files(draft)
        write_durably(draft / MARKER, marker.encode())
        sums: dict[str, Sum] = {}
        for name in _files_below(draft):
            sync_file(draft / name)
            sums[name] = file_sum(draft / name)
        tables = {Path(name).name: found for name, found in sums.items() if Path(name).parent.name == DATABASE}
        if sealer is not None:
            _require_as_sealed(source, tables, sealer)
            sealer.add(tables)
        write_durably(
            draft / CHECKSUMS,
            encode_line({"format": FORMAT, "version": VERSION, "store_id": str(marker.store_id), "files": sums}),
        )
        _sync_directories(draft)


def restore(checkpoint: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a checkpoint to a new directory, ready to be opened as a store. Refuses a damaged checkpoint."""
    checkpoint, target = Path(checkpoint), Path(target)
    marker = read_marker(checkpoint)
    if marker is None:
        raise NotAStoreError(f"there is no checkpoint at {checkpoint}; check the path")
    sums = read_checksums(checkpoint)
    faults = list(check_sums(checkpoint, sums))
    if faults:
        raise CorruptionError(
            f"{len(faults)} file(s) of the checkpoint are damaged, nothing was restored; use another backup: "
            + "; ".join(f"{checkpoint / name} {what}" for name, what in faults[:5])
        )
    with _building(checkpoint, target) as draft:
        for name, expected in sums.items():
            destination = draft / name
            make_directory(destination.parent)
            found = _copy(checkpoint / name, destination)
            if found != expected:
                raise CorruptionError(f"{checkpoint / name} changed during the copy: {mismatch(found, expected)}")
        _sync_directories(draft)


def read_checksums(checkpoint: Path) -> dict[str, Sum]:
    """Return the checksums in CHECKSUMS, by path inside the checkpoint."""
    path = checkpoint / CHECKSUMS
    remedy = "the files it lists may be intact, but cannot be checked: use another backup"
    try:
        content = read_line(path, remedy)
    except FileNotFoundError:
        raise NotAStoreError(
            f"{checkpoint} has no {CHECKSUMS}: it is not a checkpoint, or it was opened for writing"
        ) from None
    except OSError as error:
        raise os_error(error, path) from error
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise NotAStoreError(
            f"{path} has {content.get('format')!r} version {content.get('version')!r}, not {FORMAT!r} 1"
        )
    try:
        sums = {str(name): (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CorruptionError(f"{path} has an unknown structure; {remedy}") from None
    for name in sums:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise CorruptionError(f"{path} names {name!r}, outside the checkpoint; {remedy}")
    return sums


def check_sums(checkpoint: Path, sums: dict[str, Sum]) -> Iterator[tuple[str, str]]:
    """Yield (name, fault) for every file that differs from CHECKSUMS or is not listed in it."""
    for name, expected in sums.items():
        try:
            found = file_sum(checkpoint / name)
        except FileNotFoundError:
            yield name, "is missing"
            continue
        except OSError as error:
            yield name, f"cannot be read: {error.strerror}"
            continue
        if found != expected:
            yield name, mismatch(found, expected)
    for name in _files_below(checkpoint):
        if name not in sums and name not in (CHECKSUMS, LOCK):
            yield name, f"is not in {CHECKSUMS}"


def end_checkpoint(directory: Path) -> None:
    """Delete CHECKSUMS: a checkpoint opened for writing becomes a store."""
    path = directory / CHECKSUMS
    try:
        if path.exists():
            path.unlink()
            sync_directory(directory)
    except OSError as error:
        raise os_error(error, directory) from error


@contextmanager
def _building(source: Path, target: Path) -> Iterator[Path]:
    """Yield a draft directory next to `target`; rename it to `target` on success and remove it on failure."""
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise AlreadyExistsError(f"{target} exists; choose a path that does not")
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
        raise InvalidArgumentError(f"{target} is inside {source}; choose a path outside of it")
    draft = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        make_directory(target.parent)
        _remove_abandoned(target)
        draft.mkdir(mode=0o700)
    except OSError as error:
        # An existing draft belongs to another process.
        raise os_error(error, target) from error
    fd = -1
    try:
        fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield draft
        os.fsync(fd)
        os.rename(draft, target)
        sync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            raise os_error(error, target) from error
        if isinstance(error, Exception) and not isinstance(error, BasaltError):
            raise translate(error, target) from error
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _remove_abandoned(target: Path) -> None:
    # Only names with a process id are drafts; other names with the same prefix may be user files.
    ours = re.compile(re.escape(target.name) + r"\.partial-[0-9]+")
    for path in list(target.parent.iterdir()):
        if not ours.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        except BlockingIOError:
            raise AlreadyExistsError(f"{target} is being created as {path.name}; wait until that is done") from None
        finally:
            os.close(fd)


def _require_as_sealed(source: Path, tables: dict[str, Sum], sealer: Sealer) -> None:
    for name, found in tables.items():
        sealed = sealer.of(name)
        if sealed is not None and is_table(name) and found != sealed:
            raise CorruptionError(
                f"{source / DATABASE / name} {mismatch(found, sealed)}; a backup of it would be damaged as well: "
                "run verify, and restore an earlier backup"
            )


def _files_below(directory: Path) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _sync_directories(directory: Path) -> None:
    for folder, _, _ in os.walk(directory, topdown=False):
        sync_directory(Path(folder))


def _copy(source: Path, target: Path) -> Sum:
    """Copy a file durably, never as a hard link, and return the checksum of the copied bytes."""
    crc = size = 0
    with open(source, "rb", buffering=0) as reading, open(target, "xb") as writing:
        while chunk := reading.read(_CHUNK_BYTES):
            writing.write(chunk)
            crc = google_crc32c.extend(crc, chunk)
            size += len(chunk)
        writing.flush()
        os.fsync(writing.fileno())
    return size, crc
