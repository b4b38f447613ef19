"""A segment: one file of a lane, and the descriptors to read it by.

A segment is named by the position of its first byte in the lane, twenty digits, so that names sort as positions do.
It lives through

    write ──roll──> sealing ──synced──> sealed ──cleaned──> deleting (gone from the lane, the file is unlinked)

Only the one in `write` grows. `sealing` is complete but not known to be on disk. What a segment holds beyond its start
and length (times, garbage) is derived from its frames and kept in the index, so it can be lost and rebuilt.

`SegmentFiles` keeps a bounded number of descriptors for readers. A descriptor is closed when nobody refers to it:
a reader in the middle of a pread holds on to its file, whether it was evicted or deleted meanwhile, and nobody waits.
"""

from __future__ import annotations

import enum
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.errors import SegmentGoneError as SegmentGoneError
from basaltmq.store.directory import os_error, sync_directory

SUFFIX: Final = ".log"
POSITION_DIGITS: Final = 20
"""As many as the largest u64 has."""

READ_FILES_MAX: Final = 64
"""Descriptors kept for readers of one lane: 16 GiB of segments at their default size are read without an open."""


POSITION_MAX: Final = (1 << 63) - 1

IOV_MAX: Final = 1024
"""Buffers in one writev, as Linux has it."""


AGAIN_BYTES: Final = 1 << 20
"""Written again at once: it bounds the memory, and the call costs nothing beside it."""


class SegmentState(enum.StrEnum):
    WRITE = "write"
    SEALING = "sealing"
    SEALED = "sealed"
    DELETING = "deleting"


class Segment:
    """One file and how far it goes. `size_bytes` grows only under the lane's lock."""

    __slots__ = ("path", "size_bytes", "start", "started_ms", "state")

    def __init__(self, path: Path, start: int, size_bytes: int, state: SegmentState, started_ms: int) -> None:
        self.path = path
        self.start = start
        self.size_bytes = size_bytes
        self.state = state
        self.started_ms = started_ms

    @property
    def end(self) -> int:
        """The position after its last byte."""
        return self.start + self.size_bytes


class Listed:
    """The segments of a lane at one moment, in order. Never changed: a lane publishes another one."""

    __slots__ = ("segments", "starts")

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.starts = tuple([segment.start for segment in segments])


def segment_name(start: int) -> str:
    return f"{start:0{POSITION_DIGITS}d}{SUFFIX}"


def parse_segment_name(name: str) -> int | None:
    """The position a file name says; None if it is not a segment's."""
    digits = name.removesuffix(SUFFIX)
    if len(digits) != POSITION_DIGITS or not digits.isascii() or not digits.isdigit() or digits == name:
        return None
    return int(digits)


def create_segment(path: Path, start: int, now_ms: int) -> Segment:
    file = path / segment_name(start)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    return Segment(file, start, 0, SegmentState.WRITE, now_ms)


def list_segments(path: Path, now_ms: int) -> list[Segment]:
    """The segments of a lane in order, all taken for sealed. Other files are left alone (see `recovery`)."""
    found = []
    for entry in os.scandir(path):
        start = parse_segment_name(entry.name)
        if start is not None and entry.is_file(follow_symlinks=False):
            if start > POSITION_MAX:
                raise CorruptionError(f"{entry.path} names a position that cannot be; move it away")
            status = entry.stat()
            started_ms = min(now_ms, int(status.st_mtime * 1000))
            found.append(Segment(Path(entry.path), start, status.st_size, SegmentState.SEALED, started_ms))
    found.sort(key=lambda segment: segment.start)
    for segment, following in pairwise(found):
        # Bytes that reach into the next segment were never part of the lane.
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
    """Reads from segments through a bounded number of descriptors."""

    def __init__(self, limit: int = READ_FILES_MAX) -> None:
        self._limit = limit
        self._open: OrderedDict[int, _File] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, segment: Segment, begin: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` from byte `begin` of the segment; fewer only at its end."""
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
        """Have bytes brought into the page cache while the caller does something else. Nothing depends on it."""
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
            # Files are touched in runs, so the order of opening is close to that of use and costs reads nothing.
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
                    f"{segment.path} is missing; put it back, or rebuild the index to see what is lost"
                ) from None
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._open:
                    # Better to read slowly than not at all.
                    self._open.popitem(last=False)
                    continue
                raise os_error(error, segment.path) from error


def _read_on(fd: int, data: bytes, size_bytes: int, begin: int) -> bytes:
    """The kernel may give less than asked for, and not only at the end."""
    parts = [data]
    got = len(data)
    while data and got < size_bytes:
        data = os.pread(fd, size_bytes - got, begin + got)
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def make_directory(path: Path) -> None:
    """Make a directory and those above it so that they survive a power loss."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def write_again(fd: int, begin: int, end: int) -> None:
    """Write bytes of a file over themselves, so that the next sync brings them to the disk, whatever came before."""
    while begin < end:
        data = os.pread(fd, min(end - begin, AGAIN_BYTES), begin)
        if not data:
            return
        begin += os.pwrite(fd, data, begin)


def write_on(fd: int, parts: Sequence[bytes], written: int) -> None:
    """Go on after a short write, or with more buffers than one writev takes."""
    left = [memoryview(part) for part in parts]
    while True:
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if not left:
            return
        left[0] = left[0][written:]
        written = os.writev(fd, left[:IOV_MAX])
