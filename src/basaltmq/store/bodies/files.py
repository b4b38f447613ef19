"""The body files of one store: appends, reads, syncs, and which files still have live bytes.

Every method except `read`, `sync` and `remove_dead` is called with the store's lock held.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import google_crc32c

from basaltmq.store.directory import make_directory, os_error, sync_directory
from basaltmq.store.integrity.body_frames import (
    Place,
    Position,
    encode_head,
    file_name,
    files_in,
    frame_bytes,
    read_body,
)

FILE_BYTES_MAX: Final = 128 << 20
"""A file that has reached this size gets no more bodies. Compared with 64 MiB, it halves the number of directory syncs.
One live body keeps at most twice this size from being reclaimed."""

OPEN_MAX: Final = 64
"""Files that stay open for reading."""

IDLE_BYTES_MIN: Final = 32 << 20
"""A current file without live bytes is replaced from this size on. With a smaller size, a queue that is often empty
would start a new file each time."""


class _Handle:
    """An open file, closed when nothing refers to it. Keep a reference while `fd` is in use."""

    __slots__ = ("fd",)

    def __init__(self, path: str | Path, flags: int) -> None:
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)


@dataclass(slots=True)
class BodyFile:
    """One file. `end` is where its last frame ends, `live_bytes` the sum of the frames with a row."""

    number: int
    end: int = 0
    synced_end: int = 0
    live_bytes: int = 0
    rewinds: int = 0
    """How often `undo` moved the end back. The next append then overwrites bytes that a sync may have covered."""
    is_stuck: bool = False
    """Whether a frame cannot be read, so live bodies cannot be moved out of the file."""


class Pin:
    """While a pin exists, dead files are kept. Snapshots, scans and backups hold one."""

    __slots__ = ("__weakref__",)


class BodyFiles:
    """Files below one directory. Writable unless `held` returns the open files of a view (number -> descriptor)."""

    def __init__(self, directory: Path, *, held: Callable[[], Mapping[int, int]] | None = None) -> None:
        self.directory = directory
        self._held = held
        self.files: dict[int, BodyFile] = {}
        self.dead: set[int] = set()
        """Files without live bytes, as of a durable write. They can be removed."""
        self.durable = Position()
        """Bodies before this position are durable."""
        self.pins: weakref.WeakSet[Pin] = weakref.WeakSet()
        self.forgotten: set[int] = set()
        """Removed files that still have a row."""
        self.unsynced_bytes = 0
        self.has_changed = True
        """Whether files may have become dead or half garbage."""
        self._current: BodyFile | None = None
        self._writing: _Handle | None = None
        self._next = 1
        self._is_listed = True
        """Whether the names of all files are durable."""
        self._handles: OrderedDict[int, _Handle] = OrderedDict()
        self._handles_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._kept_before = 0
        """Files with a lower number are neither removed nor emptied."""
        self._before: dict[int, tuple[int, int]] = {}
        """Live bytes and end of each file before the batch changed it."""

    def load(self, live: Mapping[int, int]) -> bool:
        """Take the files on disk, with their live bytes. Return False if the rows do not match the files.

        All files are durable: the open has synced them. A later append starts a new file.
        """
        found = files_in(self.directory)
        for number, path in found.items():
            size_bytes = path.stat().st_size
            self.files[number] = BodyFile(number, size_bytes, size_bytes, live.get(number, 0))
        self._next = max([0, *found, *live]) + 1
        self.durable = Position(self._next, 0)
        self.forgotten = {number for number, live_bytes in live.items() if not live_bytes and number not in found}
        return found.keys() == live.keys() - self.forgotten

    def keep_all(self) -> None:
        """Keep the files that exist, because not all rows that point to them are readable."""
        self._kept_before = max([self._next, *(number + 1 for number in files_in(self.directory))])

    def pin(self) -> Pin:
        pin = Pin()
        self.pins.add(pin)
        return pin

    def size_bytes(self) -> int:
        """Return the size of all files, including garbage."""
        return sum([file.end for file in list(self.files.values())])

    def begin(self) -> None:
        """Start a batch. `undo` returns to this state."""
        self._before.clear()

    def undo(self) -> None:
        """Discard what was appended and released since `begin`."""
        for number, (live_bytes, end) in self._before.items():
            file = self.files[number]
            self.unsynced_bytes -= file.end - end
            file.rewinds += file.end > end
            file.live_bytes, file.end, file.synced_end = live_bytes, end, min(file.synced_end, end)
        self._before.clear()

    def is_due(self) -> bool:
        """Whether a file that changed since `begin` can be removed or emptied."""
        changed = [self.files[number] for number in self._before]
        return any(self._is_dead(file) or self._is_wasteful(file) for file in changed)

    def touched(self) -> dict[int, int]:
        """Return the live bytes of each file that changed since `begin`."""
        return {number: self.files[number].live_bytes for number in self._before}

    def append(self, key: bytes, body: bytes) -> Place:
        """Append a body. It is durable after the next `sync`. Raises StorageError."""
        size = frame_bytes(key, len(body))
        crc = google_crc32c.value(body)
        try:
            file, handle = self._room_for(size)
            _write(handle.fd, [encode_head(key, len(body), crc), body], file.end)
        except OSError as error:
            raise os_error(error, self.directory) from error
        place = Place(file.number, file.end, len(body), crc)
        self._before.setdefault(file.number, (file.live_bytes, file.end))
        file.end += size
        file.live_bytes += size
        self.unsynced_bytes += size
        return place

    def release(self, key: bytes, place: Place) -> None:
        """Count a body as garbage."""
        file = self.files.get(place.file)
        if file is not None:
            self._before.setdefault(file.number, (file.live_bytes, file.end))
            file.live_bytes = max(0, file.live_bytes - frame_bytes(key, place.size))
            self.has_changed = True

    def end_current(self) -> None:
        """Close the current file for appends."""
        self._current = self._writing = None
        self.has_changed = True

    def read(self, key: bytes, place: Place) -> bytes:
        """Read a body and check it. Raises FileNotFoundError if its file is gone, CorruptionError if it is damaged."""
        handle = self._handle(place.file)
        return read_body(handle.fd, f"{self.directory / file_name(place.file)}", key, place)

    def sync(self, lock: AbstractContextManager[object]) -> None:
        """Make durable what was appended before the call."""
        with self._sync_lock:
            with lock:
                unsynced = [file for _, file in sorted(self.files.items()) if file.end > file.synced_end]
                ends = [(file, file.end, file.rewinds) for file in unsynced]
                self.unsynced_bytes = 0
                is_listed, self._is_listed = self._is_listed, True
            for file in unsynced:
                try:
                    handle = self._handle(file.number)
                    os.fdatasync(handle.fd)
                except FileNotFoundError:
                    # A dead file may be removed meanwhile.
                    if file.number in self.files:
                        raise
            if not is_listed:
                sync_directory(self.directory)
            with lock:
                for file, end, rewinds in ends:
                    if file.rewinds == rewinds:
                        file.synced_end = end
                        self.durable = max(self.durable, Position(file.number, end))

    def idle(self) -> set[int]:
        """Return files without live bytes. Once the writes up to now are durable, they can be removed."""
        if not self.has_changed:
            return set()
        dead = {number for number, file in self.files.items() if self._is_dead(file)}
        if self._current is not None and self._current.number in dead:
            self.end_current()
        return dead

    def wasteful(self) -> list[BodyFile]:
        """Return files that have live bytes and are half garbage or more."""
        return [file for file in self.files.values() if self._is_wasteful(file)]

    def _is_dead(self, file: BodyFile) -> bool:
        if file.live_bytes or file.number < self._kept_before:
            return False
        return file is not self._current or file.end >= IDLE_BYTES_MIN

    def _is_wasteful(self, file: BodyFile) -> bool:
        """Whether half of a file is garbage, and the rest can be moved."""
        if file.is_stuck or file is self._current or file.number < self._kept_before:
            return False
        return 0 < file.live_bytes * 2 <= file.end

    def remove_dead(self, lock: AbstractContextManager[object]) -> None:
        """Remove the dead files that no reader may need."""
        with lock:
            numbers = set() if self.pins else set(self.dead)
            self.dead -= numbers
            for number in numbers:
                self.files.pop(number, None)
            self.forgotten |= numbers
        for number in numbers:
            with self._handles_lock:
                self._handles.pop(number, None)
            (self.directory / file_name(number)).unlink(missing_ok=True)

    def close(self) -> None:
        self.end_current()
        with self._handles_lock:
            self._handles.clear()

    def _room_for(self, size: int) -> tuple[BodyFile, _Handle]:
        """Return the file to append to."""
        if self._current is not None and self._writing is not None and self._current.end + size <= FILE_BYTES_MAX:
            return self._current, self._writing
        self.end_current()
        if not self.directory.exists():
            make_directory(self.directory)
        number = self._next
        self._writing = _Handle(self.directory / file_name(number), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._next += 1
        self._is_listed = False
        self._current = self.files[number] = BodyFile(number)
        with self._handles_lock:
            self._handles[number] = self._writing
        return self._current, self._writing

    def _handle(self, number: int) -> _Handle:
        with self._handles_lock:
            handle = self._handles.get(number)
            if handle is not None:
                self._handles.move_to_end(number)
                return handle
            path: str | Path = self.directory / file_name(number)
            if self._held is not None:
                held = self._held()
                if number not in held:
                    raise FileNotFoundError(f"{path} is not part of this view")
                path = f"/proc/self/fd/{held[number]}"
            handle = self._handles[number] = _Handle(path, os.O_RDONLY)
            while len(self._handles) > OPEN_MAX:
                self._handles.popitem(last=False)
            return handle


def _write(fd: int, parts: list[bytes], at: int) -> None:
    """Write all bytes at a position."""
    rest = [memoryview(part) for part in parts]
    while rest:
        written = os.pwritev(fd, rest, at)
        at += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if rest and written:
            rest[0] = rest[0][written:]
