"""A segment: one file of a lane, and the descriptors to read it.

A segment is named by the position of its first byte in the lane, as 20 digits, so that names sort like positions. Its
states are

    write ──roll──> sealing ──synced──> sealed ──cleaned──> deleting (removed from the lane, the file is unlinked)

Only the segment in `write` grows. A segment in `sealing` is complete but may not be durable. All metadata except start
and length (times, garbage) is derived from the frames and kept in the index, so it can be rebuilt.

`SegmentFiles` keeps a bounded number of descriptors for readers. A descriptor is closed with its last reference. So a
reader inside a pread keeps its file even if it is evicted or deleted meanwhile, without a wait.
"""

from __future__ import annotations

import enum
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

from basaltmq.errors import CorruptionError, SegmentGoneError
from basaltmq.store.directory import os_error

SUFFIX: Final = ".log"
POSITION_DIGITS: Final = 20
"""The number of digits of the largest u64."""

READ_FILES_MAX: Final = 64
"""Descriptors kept for readers of one lane: enough for 16 GiB of segments at their default size."""

POSITION_MAX: Final = (1 << 63) - 1

IOV_MAX: Final = 1024
"""Buffers per writev on Linux."""

REWRITE_BYTES: Final = 1 << 20
"""Bytes rewritten per call: it bounds the memory, and the cost of the call is negligible."""


class SegmentState(enum.StrEnum):
    WRITE = "write"
    SEALING = "sealing"
    SEALED = "sealed"
    DELETING = "deleting"


class Segment:
    """One file and its size. `size_bytes` grows only under the lane's lock."""

    __slots__ = ("path", "size_bytes", "start", "started_ms", "state")

    def __init__(self, path: Path, start: int, size_bytes: int, state: SegmentState, started_ms: int) -> None:
        self.path = path
        self.start = start
        self.size_bytes = size_bytes
        self.state = state
        self.started_ms = started_ms

    @property
    def end(self) -> int:
        """The position after the last byte."""
        return self.start + self.size_bytes


class Listed:
    """An immutable, ordered list of a lane's segments. A change publishes a new list."""

    __slots__ = ("segments", "starts")

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.starts = tuple([segment.start for segment in segments])


def segment_name(start: int) -> str:
    return f"{start:0{POSITION_DIGITS}d}{SUFFIX}"


def parse_segment_name(name: str) -> int | None:
    """Return the position in a file name, None if it is not a segment's name."""
    digits = name.removesuffix(SUFFIX)
    if len(digits) != POSITION_DIGITS or not digits.isascii() or not digits.isdigit() or digits == name:
        return None
    return int(digits)


def create_segment(path: Path, start: int, now_ms: int) -> Segment:
    file = path / segment_name(start)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    return Segment(file, start, 0, SegmentState.WRITE, now_ms)


def list_segments(path: Path, now_ms: int = POSITION_MAX) -> list[Segment]:
    """Return the segments of a lane in order, all marked as sealed. Other files are ignored (see `recovery`).

    A writer may roll or delete segments during the call: only the size of the last one may be out of date.
    """
    found = []
    # List all names before the first size, so that a segment with a successor has its final size.
    for start in sorted(start for name in os.listdir(path) if (start := parse_segment_name(name)) is not None):
        file = path / segment_name(start)
        if start > POSITION_MAX:
            raise CorruptionError(f"{file} has an impossible position in its name; move it out of the lane")
        with suppress(FileNotFoundError):
            status = file.lstat()
            if stat.S_ISREG(status.st_mode):
                started_ms = min(now_ms, int(status.st_mtime * 1000))
                found.append(Segment(file, start, status.st_size, SegmentState.SEALED, started_ms))
    for segment, following in pairwise(found):
        # Bytes beyond the start of the next segment were never part of the lane.
        segment.size_bytes = min(segment.size_bytes, following.start - segment.start)
    return found


class _File:
    """A descriptor that is closed with its last reference."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class SegmentFiles:
    """Reads segments through a bounded number of descriptors."""

    def __init__(self, limit: int = READ_FILES_MAX) -> None:
        self._limit = limit
        self._open: OrderedDict[int, _File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, segment: Segment, begin: int, size_bytes: int) -> bytes:
        """Return up to `size_bytes` from byte `begin` of the segment; fewer only at its end."""
        file = self._open.get(segment.start)
        if file is None:
            file = self._open_file(segment)
        try:
            data = os.pread(file.fd, size_bytes, begin)
            if len(data) < size_bytes:
                data = _read_on(file.fd, data, size_bytes, begin)
        except OSError as error:
            raise os_error(error, segment.path) from error
        return data

    def will_need(self, segment: Segment, begin: int, size_bytes: int) -> None:
        """Request bytes for the page cache. This is only a hint."""
        with suppress(OSError, CorruptionError, SegmentGoneError):
            file = self._open.get(segment.start) or self._open_file(segment)
            os.posix_fadvise(file.fd, begin, size_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self, segment: Segment) -> None:
        with self._lock:
            self._open.pop(segment.start, None)

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def __len__(self) -> int:
        return len(self._open)

    def _open_file(self, segment: Segment) -> _File:
        with self._lock:
            file = self._open.get(segment.start)
            if file is None:
                file = _File(self._open_fd(segment))
                if segment.state is SegmentState.DELETING:
                    return file
                self._open[segment.start] = file
            # Files are used in sequences, so the order of opening approximates the order of use at no cost per read.
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
            return file

    def _open_fd(self, segment: Segment) -> int:
        while True:
            try:
                return os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                if segment.state is SegmentState.DELETING:
                    raise SegmentGoneError(f"{segment.path} was deleted") from None
                raise CorruptionError(
                    f"{segment.path} is missing; restore it from a backup, or rebuild the index to see what is lost"
                ) from None
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._open:
                    # Reading slowly is better than failing.
                    self._open.popitem(last=False)
                    continue
                raise os_error(error, segment.path) from error


def _read_on(fd: int, data: bytes, size_bytes: int, begin: int) -> bytes:
    """Continue a short read, which can happen before the end too."""
    parts = [data]
    got = len(data)
    while data and got < size_bytes:
        data = os.pread(fd, size_bytes - got, begin + got)
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def write_again(fd: int, begin: int, end: int) -> None:
    """Overwrite bytes of a file with themselves, so that the next sync writes them to the disk."""
    while begin < end:
        data = os.pread(fd, min(end - begin, REWRITE_BYTES), begin)
        if not data:
            return
        begin += os.pwrite(fd, data, begin)


def write_on(fd: int, parts: Sequence[bytes], written: int) -> None:
    """Continue after a short write, or with more buffers than one writev accepts."""
    left = [memoryview(part) for part in parts]
    while True:
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if not left:
            return
        left[0] = left[0][written:]
        written = os.writev(fd, left[:IOV_MAX])
