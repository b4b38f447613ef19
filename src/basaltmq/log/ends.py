"""ENDS: the durable end of each lane, and the ceilings of the offsets of each shard, in a file outside the log.

The log alone cannot tell that its end was lost. This file can:

     0        4         8          8 + 16 lane               4096 + 16 shard
    ┌────────┬─────────┬──────────────────────────────┬─────┬─────────────────────────┬─────┐
    │ magic  │ version │ durable end u64, crc u32, 0  │ ... │ ceiling u64, check u64  │ ... │   little-endian
    └────────┴─────────┴──────────────────────────────┴─────┴─────────────────────────┴─────┘

- **Durable end** of a lane: everything below was durable when a sync returned, in the lane's segments or in its ring.
- **Ceiling** of a shard: all offsets that were ever assigned are below it. 0 if unknown. `check` is an exclusive or of
  ceiling, shard and a constant, so it detects a changed bit.

The file is written through a memory map: a system call or a row in RocksDB would cost an append 3 to 12 us. A killed
process loses nothing of it. After a power loss it may hold older values, which claim less; `sync` bounds their age.
Blocks are allocated before a write through the map, because a write to a hole of a full disk kills the process. Shards
that are not written cost nothing: the file has holes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import google_crc32c

from basaltmq.store.directory import sync_directory

ENDS: Final = "ENDS"

_MAGIC: Final = 0x4E455342
"""The bytes "BSEN"."""
_VERSION: Final = 1
_HEAD: Final = Struct("<II")
_LANE: Final = Struct("<QII")
_CEILING: Final = Struct("<QQ")
_U64: Final = Struct("<Q")
_CEILINGS_AT: Final = 4096
_LANES_MAX: Final = (_CEILINGS_AT - _HEAD.size) // _LANE.size
_CHECK: Final = 0x9E3779B97F4A7C15
_CHUNK_BITS: Final = 16
_CHUNK_BYTES: Final = 1 << _CHUNK_BITS
"""Unit of allocation: the ceilings of 4096 shards."""
_MAP_BYTES: Final = 1 << 20
"""The map grows by multiples of this."""


class Ends(NamedTuple):
    """The valid durable ends in ENDS."""

    lanes: dict[int, int]
    faults: list[str]


def read_ends(directory: Path) -> Ends:
    """Read the durable ends. A missing file has none; damaged fields are left out and described."""
    path = directory / ENDS
    found = Ends({}, [])
    try:
        with open(path, "rb") as file:
            raw = file.read(_CEILINGS_AT)
    except FileNotFoundError:
        return found
    except OSError as error:
        found.faults.append(f"{path} cannot be read: {error}")
        return found
    if len(raw) < _CEILINGS_AT or _HEAD.unpack_from(raw) != (_MAGIC, _VERSION):
        found.faults.append(f"{path} is damaged: it is too short or has a wrong header")
        return found
    for lane in range(_LANES_MAX):
        end, crc, _ = _LANE.unpack_from(raw, _HEAD.size + lane * _LANE.size)
        if crc == google_crc32c.value(_U64.pack(end)):
            found.lanes[lane] = end
        elif end or crc:
            found.faults.append(f"{path} is damaged: the end of lane {lane} does not match its checksum")
    return found


def read_ceilings(directory: Path, faults: list[str] | None = None) -> dict[int, int]:
    """Read all ceilings, by shard. Damaged ones are left out and described in `faults`."""
    found: dict[int, int] = {}
    path = directory / ENDS
    with suppress(OSError), open(path, "rb") as file:
        for begin, end in _data(file.fileno()):
            file.seek(begin)
            raw = file.read(end - begin)
            first = (begin - _CEILINGS_AT) // _CEILING.size
            for shard, (ceiling, check) in enumerate(
                _CEILING.iter_unpack(raw[: len(raw) - len(raw) % _CEILING.size]), first
            ):
                if ceiling ^ shard ^ _CHECK == check:
                    found[shard] = ceiling
                elif (ceiling or check) and faults is not None:
                    faults.append(f"{path} is damaged: the ceiling of shard {shard} does not match its check")
    return found


def _data(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of ceilings in the file that are not holes, at most 1 MiB each."""
    size = os.fstat(fd).st_size
    at = _CEILINGS_AT
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
            stop = os.lseek(fd, at, os.SEEK_HOLE)
        except OSError:
            # No data follows.
            return
        at -= (at - _CEILINGS_AT) % _CEILING.size
        while at < stop:
            end = min(at + _MAP_BYTES, stop)
            yield at, end
            at = end


class EndsFile:
    """ENDS of an open log. Thread-safe; the caller serializes the changes of one shard and of one lane."""

    def __init__(self, directory: Path, report: Callable[[str], None]) -> None:
        ends = read_ends(directory)
        self.found = ends.lanes
        """The durable ends that the previous writer left."""
        for fault in ends.faults:
            report(fault)
        self._path = directory / ENDS
        self._report = report
        self._lock = threading.Lock()
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._chunks: set[int] = set()
        """Chunks with allocated blocks."""
        self._is_current = False
        try:
            self._open()
        except (OSError, ValueError) as error:
            self._fail(error)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.pread(self._fd, _HEAD.size, 0) != _HEAD.pack(_MAGIC, _VERSION):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, _HEAD.pack(_MAGIC, _VERSION) + bytes(_CEILINGS_AT - _HEAD.size), 0)
            os.fsync(self._fd)
            sync_directory(self._path.parent)
        self._remap(os.fstat(self._fd).st_size)

    def _remap(self, size_bytes: int) -> None:
        size_bytes += -size_bytes % _MAP_BYTES
        if os.fstat(self._fd).st_size < size_bytes:
            os.ftruncate(self._fd, size_bytes)
        # Other threads may still write to the former map. It is unmapped with its last reference.
        self._map = mmap.mmap(self._fd, size_bytes)

    def _fail(self, error: Exception) -> None:
        # The log works without the file and only loses a check.
        self._report(f"{self._path} cannot be written: {error}")
        self._map = None

    def lane(self, number: int) -> LaneEnd:
        return LaneEnd(self, number)

    def lanes(self) -> int:
        """Return the number of lanes that had durable bytes."""
        return max((lane + 1 for lane, end in self.found.items() if end), default=0)

    def start(self, ends: Iterable[int]) -> None:
        """Record durable ends from now on. Call it when recovery is complete: until then, the old ends show a loss."""
        self._is_current = True
        for lane, end in enumerate(ends):
            self.note(lane, end)

    def note(self, lane: int, position: int) -> None:
        """Record that a lane is durable up to `position`. Costs 1 us."""
        target = self._map
        if target is not None and self._is_current and lane < _LANES_MAX:
            crc = google_crc32c.value(_U64.pack(position))
            _LANE.pack_into(target, _HEAD.size + lane * _LANE.size, position, crc, 0)

    def put(self, shard: int, ceiling: int) -> None:
        """Record a ceiling."""
        at = _CEILINGS_AT + shard * _CEILING.size
        if at >> _CHUNK_BITS not in self._chunks:
            self._allocate(at)
        target = self._map
        if target is not None:
            _CEILING.pack_into(target, at, ceiling, ceiling ^ shard ^ _CHECK)

    def _allocate(self, at: int) -> None:
        with self._lock:
            if self._map is None:
                return
            chunk = at >> _CHUNK_BITS
            try:
                if at + _CHUNK_BYTES > len(self._map):
                    self._remap(at + _CHUNK_BYTES)
                os.posix_fallocate(self._fd, chunk << _CHUNK_BITS, _CHUNK_BYTES)
            except (OSError, ValueError) as error:
                self._fail(error)
                return
            self._chunks.add(chunk)

    def sync(self) -> None:
        """Make all values durable. Failures are ignored: after a power loss, older values claim less."""
        with suppress(OSError):
            os.fdatasync(self._fd)

    def close(self, *, clear: bool) -> None:
        """Close the file. With `clear`, remove all ceilings."""
        with self._lock:
            self._map = None
            if self._fd >= 0:
                with suppress(OSError):
                    if clear:
                        os.ftruncate(self._fd, _CEILINGS_AT)
                    os.fsync(self._fd)
                os.close(self._fd)
                self._fd = -1


class LaneEnd:
    """The durable end of one lane in ENDS."""

    __slots__ = ("_file", "_number", "found")

    def __init__(self, file: EndsFile, number: int) -> None:
        self._file = file
        self._number = number
        self.found = file.found.get(number, 0)
        """The durable end when the last writer stopped."""

    def note(self, position: int) -> None:
        self._file.note(self._number, position)
