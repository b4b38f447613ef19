"""SYNCED: records which writes are durable, so that a missing or truncated WAL file is detected.

RocksDB cannot distinguish a WAL file that lost confirmed records from one that a power loss cut. It also ignores a
missing WAL file. So after each sync the store records the extent of the durable writes:

     0      4            12         20         28        36      38
    ┌──────┬────────────┬──────────┬──────────┬─────────┬───────┬──────────────────┐
    │ crc  │ generation │ sequence │ MANIFEST │ bytes   │ count │ numbers of WALs  │
    │ u32  │ u64        │ u64      │ u64      │ u64     │ u16   │ u64 each         │
    └──────┴────────────┴──────────┴──────────┴─────────┴───────┴──────────────────┘

`sequence` is the RocksDB sequence number of the last logged row change that a sync covered. The MANIFEST has at least
`bytes` bytes. The file has two such slots of 2 KiB, written alternately through a memory map, without a system call per
sync. A killed process loses nothing of it. A power loss may leave an older slot, which only covers fewer writes. The
numbers never exceed what is durable.

File names and sizes are read at most every `CHECK_S`, because each check costs system calls.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from struct import error as struct_error
from typing import Final, NamedTuple

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.store.directory import DATABASE, sync_directory, sync_file
from basaltmq.store.integrity.manifest import oldest_log, sequence_reached
from basaltmq.store.integrity.seals import Seals
from basaltmq.store.integrity.wal import LogScan, current_manifest, is_wal, last_sequence, wal_number

SYNCED: Final = "SYNCED"

CHECK_S: Final = 0.1
"""Interval of the directory check, in seconds. The loss of a WAL file that existed only between two checks is not
detected. RocksDB starts one per 4 MiB or more of writes."""

_SLOT_BYTES: Final = 2048
_CRC: Final = Struct("<I")
_SLOT: Final = Struct("<QQQQH")
_NUMBER: Final = Struct("<Q")
_LOGS_MAX: Final = (_SLOT_BYTES - _CRC.size - _SLOT.size) // _NUMBER.size


class Synced(NamedTuple):
    """The content of a slot."""

    generation: int = 0
    sequence: int = 0
    manifest: int = 0
    manifest_bytes: int = 0
    logs: tuple[int, ...] = ()

    def encode(self) -> bytes:
        logs = self.logs[-_LOGS_MAX:]
        body = _SLOT.pack(self.generation, self.sequence, self.manifest, self.manifest_bytes, len(logs))
        body += b"".join(map(_NUMBER.pack, logs))
        return _CRC.pack(google_crc32c.value(body)) + body

    @classmethod
    def decode(cls, raw: bytes) -> Synced | None:
        try:
            generation, sequence, manifest, manifest_bytes, count = _SLOT.unpack_from(raw, _CRC.size)
            end = _CRC.size + _SLOT.size + count * _NUMBER.size
            logs = [_NUMBER.unpack_from(raw, at)[0] for at in range(_CRC.size + _SLOT.size, end, _NUMBER.size)]
        except struct_error:
            return None
        if _CRC.unpack_from(raw)[0] != google_crc32c.value(raw[_CRC.size : end]):
            return None
        return cls(generation, sequence, manifest, manifest_bytes, tuple(logs))


def read_synced(directory: Path) -> Synced | None:
    """Return the newest valid slot, None if there is none."""
    try:
        raw = (directory / SYNCED).read_bytes()
    except OSError:
        return None
    slots = [Synced.decode(raw[at : at + _SLOT_BYTES]) for at in (0, _SLOT_BYTES)]
    return max((slot for slot in slots if slot is not None), key=lambda slot: slot.generation, default=None)


def synced_fault(directory: Path) -> str:
    """Describe a missing or damaged SYNCED. Empty if it is valid, or if a power loss left it as it was created."""
    path = directory / SYNCED
    try:
        raw = path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if read_synced(directory) is None and raw != bytes(2 * _SLOT_BYTES):
        return f"{path} is damaged"
    return ""


def missing_writes(directory: Path, manifest: Path | None, logs: list[LogScan]) -> str:
    """Describe the durable writes that are missing. Empty if none are known.

    `logs` are the required WAL files. `manifest` is None if the MANIFEST cannot be read.
    """
    synced = read_synced(directory)
    present = {wal_number(scan.path) for scan in logs}
    if synced is None:
        return _missing_by_seals(directory, manifest, present)
    # Without a MANIFEST, assume that WAL files older than all present ones were flushed and deleted.
    oldest = min(present, default=0) if manifest is None else oldest_log(manifest)
    gone = [f"{number:06}.log" for number in synced.logs if number >= oldest and number not in present]
    if gone:
        return f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} missing"
    if manifest is None:
        return ""
    reached = max([sequence_reached(manifest), *(last_sequence(scan.path, scan) for scan in logs)])
    if reached < synced.sequence:
        last = logs[-1].path.name if logs else "the WAL"
        return f"{last} lacks the last {synced.sequence - reached} row changes that were durable"
    return ""


def _missing_by_seals(directory: Path, manifest: Path | None, present: set[int]) -> str:
    """As `missing_writes` if SYNCED is lost: SEALS names the WAL file that the last open created."""
    with contextlib.suppress(CorruptionError):
        seals = Seals.read(directory)
        if seals is None or seals.wal is None:
            return ""
        if manifest is not None and seals.wal >= oldest_log(manifest) and seals.wal not in present:
            return f"{SYNCED} and {seals.wal:06}.log are missing"
        if not present:
            # RocksDB deletes a WAL file only when there is a newer one.
            return f"{SYNCED} and all WAL files are missing"
    return ""


def short_manifest(directory: Path) -> str:
    """Describe a MANIFEST that is too short. Empty if no fault is known."""
    synced = read_synced(directory)
    manifest = current_manifest(directory / DATABASE)
    if synced is None or manifest.name != f"MANIFEST-{synced.manifest:06}":
        return ""
    size_bytes = manifest.stat().st_size
    if size_bytes >= synced.manifest_bytes:
        return ""
    return f"has {size_bytes} bytes, but {synced.manifest_bytes} bytes were durable"


class SyncedFile:
    """Maintains SYNCED for a store that is open for writing. Thread-safe."""

    def __init__(
        self, directory: Path, report: Callable[[str], None], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._database = directory / DATABASE
        self._clock_s = clock_s
        self._checked_s = float("-inf")
        self._changed_ns = 0
        self._last = read_synced(directory) or Synced()
        self._map: mmap.mmap | None = None
        path = directory / SYNCED
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(fd).st_size != 2 * _SLOT_BYTES:
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, bytes(2 * _SLOT_BYTES), 0)
                    os.fsync(fd)
                    sync_directory(directory)
                self._map = mmap.mmap(fd, 2 * _SLOT_BYTES)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            # The store works without the file and only loses a check.
            report(f"{path} cannot be written: {error}")

    def note(self, sequence: int, *, check_directory: bool = False) -> None:
        """Record that everything up to a sequence number is durable."""
        with self._lock:
            if self._map is not None:
                self._note(self._map, sequence, check_directory)

    def _note(self, slots: mmap.mmap, sequence: int, check_directory: bool) -> None:
        manifest, manifest_bytes, logs = self._last.manifest, self._last.manifest_bytes, self._last.logs
        now_s = self._clock_s()
        if check_directory or now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            with contextlib.suppress(OSError, CorruptionError):
                manifest, manifest_bytes, logs = self._check_directory()
        self._last = Synced(
            self._last.generation + 1, max(sequence, self._last.sequence), manifest, manifest_bytes, logs
        )
        slot = self._last.encode()
        at = self._last.generation % 2 * _SLOT_BYTES
        slots[at : at + len(slot)] = slot

    def _check_directory(self) -> tuple[int, int, tuple[int, ...]]:
        manifest, logs = self._last.manifest, self._last.logs
        changed_ns = os.stat(self._database).st_mtime_ns
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            manifest = int(current_manifest(self._database).name.removeprefix("MANIFEST-"))
            logs = tuple(sorted(int(name[:-4]) for name in os.listdir(self._database) if is_wal(name)))
            # A new directory entry may not be durable yet.
            sync_directory(self._database)
        path = self._database / f"MANIFEST-{manifest:06}"
        size_bytes = os.stat(path).st_size
        if size_bytes != self._last.manifest_bytes:
            # RocksDB writes an edit first and syncs it later.
            sync_file(path)
        return manifest, size_bytes, logs

    def close(self) -> None:
        with self._lock:
            if self._map is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._map.flush()
                self._map.close()
                self._map = None
