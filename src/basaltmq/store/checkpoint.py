"""Online backups: a checkpoint, and the way back from it.

    checkpoint/
      STORE        the marker of the store it was taken from
      CHECKSUMS    one sealed line: {"format", "version", "store_id", "files": {"kv/000009.sst": [size, crc], ...}}
      kv/          a RocksDB checkpoint: tables are hard links where the file system allows, logs are copies
      log/         if there are streams: sealed segments are hard links, the one being written is a copy

Both ways the directory is built as `{target}.partial-{pid}` beside the target and renamed at the end, with every file
and name durable before: a crash or a full disk leaves no half backup under the name asked for. A partial directory
that nobody holds is removed by the next checkpoint or restore to the same target; one that is held is left alone.

A checkpoint opens with `open_view`. Opened for writing it becomes a store, and CHECKSUMS goes, as it would not hold
any longer. The store it came from is not disturbed, although tables are shared by hard links: RocksDB never writes
into a finished table. But a bad sector under a shared table is one for both; `restore` copies, and so does whoever
takes a backup to another disk.
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
from basaltmq.store.integrity.seals import Sealer, Sum, file_sum, mismatch
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
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Build a checkpoint of the open store at `source`; `create` makes RocksDB's own at the path it is given.

    `beside` then adds what lies beside the database, a log that is at least as far, into the directory it is given.
    """
    with _building(source, target) as draft:
        database = draft / DATABASE
        create(str(database))
        if beside is not None:
            beside(draft)
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
    """Copy a checkpoint to a directory of its own, ready to be opened as a store. Refuses a damaged checkpoint."""
    checkpoint, target = Path(checkpoint), Path(target)
    marker = read_marker(checkpoint)
    if marker is None:
        raise NotAStoreError(f"there is no checkpoint at {checkpoint}")
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
                raise CorruptionError(f"{checkpoint / name} changed while it was copied: {mismatch(found, expected)}")
        _sync_directories(draft)


def read_checksums(checkpoint: Path) -> dict[str, Sum]:
    """What CHECKSUMS says, by path inside the checkpoint."""
    path = checkpoint / CHECKSUMS
    remedy = "the files it speaks of may be sound, but nothing vouches for them: use another backup"
    try:
        said = read_line(path, remedy)
    except FileNotFoundError:
        raise NotAStoreError(f"{checkpoint} has no {CHECKSUMS}: it is not a checkpoint, or was opened since") from None
    except OSError as error:
        raise os_error(error, path) from error
    if said.get("format") != FORMAT or said.get("version") != VERSION:
        raise NotAStoreError(f"{path} says {said.get('format')!r} version {said.get('version')!r}, not {FORMAT!r} 1")
    try:
        sums = {str(name): (int(size), int(crc)) for name, (size, crc) in said["files"].items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CorruptionError(f"{path} has an unknown form; {remedy}") from None
    for name in sums:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise CorruptionError(f"{path} names {name!r}, outside the checkpoint; {remedy}")
    return sums


def check_sums(
    checkpoint: Path, sums: dict[str, Sum], progress: Callable[[int], None] | None = None
) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) for every file that is not as CHECKSUMS says, and for files it does not know."""
    for name, expected in sums.items():
        try:
            found = file_sum(checkpoint / name, progress)
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
    """A checkpoint that is opened for writing is a store from here on."""
    path = directory / CHECKSUMS
    try:
        if path.exists():
            path.unlink()
            sync_directory(directory)
    except OSError as error:
        raise os_error(error, directory) from error


@contextmanager
def _building(source: Path, target: Path) -> Iterator[Path]:
    """A draft beside `target`, renamed to it when all went well and removed otherwise."""
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise AlreadyExistsError(f"{target} exists; name a path that does not")
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
        raise InvalidArgumentError(f"{target} is inside {source}; name a place outside of it")
    draft = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        make_directory(target.parent)
        _remove_abandoned(target)
        draft.mkdir(mode=0o700)
    except OSError as error:
        # The draft, if there is one, is somebody else's.
        raise os_error(error, target) from error
    fd = -1
    try:
        fd = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield draft
        os.fsync(fd)
        os.rename(draft, target)
        sync_directory(target.parent)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise os_error(error, target) from error
    except BasaltError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise translate(error, target) from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        if fd >= 0:
            os.close(fd)


def _remove_abandoned(target: Path) -> None:
    # Only what bears a process id is ours; a name that merely begins alike may be anybody's.
    ours = re.compile(re.escape(target.name) + r"\.partial-[0-9]+")
    for path in list(target.parent.iterdir()):
        if not ours.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        except BlockingIOError:
            raise AlreadyExistsError(f"{target} is being made already, as {path.name}; wait for it") from None
        finally:
            os.close(fd)


def _require_as_sealed(source: Path, tables: dict[str, Sum], sealer: Sealer) -> None:
    for name, found in tables.items():
        sealed = sealer.of(name)
        if sealed is not None and name.endswith((".sst", ".blob")) and found != sealed:
            raise CorruptionError(
                f"{source / DATABASE / name} {mismatch(found, sealed)}; a backup of it would be damaged too: "
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
    """Copy a file's bytes, durably; never a link. What was copied is what is summed."""
    crc = size = 0
    with open(source, "rb", buffering=0) as reading, open(target, "xb", buffering=0) as writing:
        while chunk := reading.read(_CHUNK_BYTES):
            rest = memoryview(chunk)
            while rest:
                rest = rest[writing.write(rest) :]
            crc = google_crc32c.extend(crc, chunk)
            size += len(chunk)
        os.fsync(writing.fileno())
    return size, crc
