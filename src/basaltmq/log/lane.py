"""A lane: an append-only run of bytes over segment files.

    positions  0 ............... 268435456 ............... 536870912 ........ end
    files      00000000000000000000.log    00000000000268435456.log    ...

A position is a byte's place in the whole lane; it is given out once and stays what it means until its segment is
deleted. Gaps appear where segments were deleted. `LANE` (and its copy, because without the seed no frame can be
checked) says format, version and seed; `COMMITTED` tells other processes how far the lane is synced.

One writer at a time appends (`append` takes the lock for one writev); any number of threads read with pread and take no
lock of the writer's. What append returned survives a crash of the process, unless it was told to `gather`: frames that
nobody is promised before a sync are kept until one, a read of them, or an append that does not wait, and then written
together, because one large write and its sync cost about half of many small ones. They come before what is appended
later in any case, and no more than GATHERED_BYTES_MAX are kept. `sync` makes everything durable: segments that were
rolled away from first, then the one being written, then the directory, so that `synced_position` never covers a hole.

Any error of a write or a sync poisons the lane: how much reached the file is not known, and only recovery can tell. The
bytes of a failed append are never referred to and are cut off at the next start.

Rolling: by size, so that cleaning can drop files, and by age, so that a quiet lane's old records can go. Age is told by
the clock given; one that goes back only makes a segment younger. Budget of `append`: 2 us around the writev.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import google_crc32c

from basaltmq.errors import CorruptionError, StorageError, StoreClosedError, StorePoisonedError, StoreTooNewError
from basaltmq.log.committed import Committed
from basaltmq.log.segment import (
    READ_FILES_MAX,
    Segment,
    SegmentFiles,
    SegmentGoneError,
    SegmentState,
    parse_segment_name,
    segment_name,
)
from basaltmq.store.directory import os_error, sync_directory, write_durably

FORMAT: Final = "basalt-lane"
FORMAT_VERSION: Final = 1
MARKERS: Final = ("LANE", "LANE.copy")

SEGMENT_BYTES: Final = 256 << 20
"""Small enough that cleaning moves little at a time, large enough that a terabyte is four thousand files."""

SEGMENT_AGE_MS: Final = 24 * 60 * 60 * 1000
"""A day: retention by time cannot be finer than a segment's age."""

IOV_MAX: Final = 1024
"""Buffers in one writev, as Linux has it."""

GATHERED_BYTES_MAX: Final = 1 << 20
"""Frames kept for one write: past a few hundred KB a larger write gains nothing, and what is kept a crash takes."""

POSITION_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Settings of one lane."""

    segment_bytes: int = SEGMENT_BYTES
    segment_age_ms: int = SEGMENT_AGE_MS
    read_files_max: int = READ_FILES_MAX


class Lane:
    """One lane, open for writing. The caller holds the store's lock, so no other process writes here."""

    def __init__(
        self, path: Path, seed: int, segments: list[Segment], clock_ms: Callable[[], int], options: LaneOptions
    ) -> None:
        self.path = path
        self.seed = seed
        self.options = options
        self._clock_ms = clock_ms
        self._segments = segments
        self._starts = [segment.start for segment in segments]
        self._files = SegmentFiles(options.read_files_max)
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._sealing: list[tuple[int, Segment]] = []
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._names_synced = False
        self._error: StorageError | None = None
        self._active = segments[-1]
        self._fd = os.open(self._active.path, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
        self._end = self._active.end
        try:
            self._committed = Committed(path, clock_ms(), self._end)
        except OSError:
            os.close(self._fd)
            raise
        self._roll_at = self._active.start + options.segment_bytes
        self._roll_ms = self._active.started_ms + options.segment_age_ms
        self._synced_position = segments[0].start

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock_ms: Callable[[], int],
        random_u32: Callable[[], int],
        options: LaneOptions | None = None,
    ) -> Lane:
        """Open or make the lane at `path`. Appending makes sense only after `recovery.repair`."""
        options = options or LaneOptions()
        try:
            seed = _read_seed(path)
            if seed is None:
                _make_directory(path)
                seed = random_u32()
                for name in MARKERS:
                    write_durably(path / name, _encode_marker(seed))
            segments = list_segments(path, clock_ms())
            if not segments:
                segments = [_create_segment(path, 0, clock_ms())]
            segments[-1].state = SegmentState.WRITE
            return cls(path, seed, segments, clock_ms, options)
        except OSError as error:
            raise os_error(error, path) from error

    @property
    def start(self) -> int:
        """The first position kept."""
        return self._starts[0]

    @property
    def end(self) -> int:
        """The position of the next byte appended."""
        return self._end

    @property
    def synced_position(self) -> int:
        """Everything below survives a power loss. At first that is nothing: what was found may be in the page cache."""
        return self._synced_position

    @property
    def active_start(self) -> int:
        """Where the segment being written begins."""
        return self._active.start

    def segments(self) -> list[Segment]:
        return list(self._segments)

    def append(self, parts: Sequence[bytes], size_bytes: int, now_ms: int | None = None, gather: bool = False) -> int:
        """Append the parts of one or more whole frames, `size_bytes` in all; the position of the first byte.

        `now_ms` spares the clock where the caller has just read it. `gather` leaves the write to the next sync.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            position = self._end
            if now_ms is None:
                now_ms = self._clock_ms()
            if position + size_bytes > self._roll_at or now_ms >= self._roll_ms:
                self._roll(size_bytes)
                position = self._end
            if gather and self._gathered_bytes + size_bytes <= GATHERED_BYTES_MAX:
                self._gathered += parts
                self._gathered_bytes += size_bytes
            elif self._gathered:
                self._gathered += parts
                self._gathered_bytes += size_bytes
                self._write_gathered()
            else:
                self._write(parts, size_bytes)
            self._active.size_bytes += size_bytes
            self._end = position + size_bytes
        return position

    def write_gathered(self) -> None:
        """Return when everything appended is written: it survives a crash of the process."""
        if self._gathered:
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._write_gathered()

    def _write_gathered(self) -> None:
        parts, size_bytes = self._gathered, self._gathered_bytes
        if parts:
            self._write(parts, size_bytes)
            self._gathered, self._gathered_bytes = [], 0

    def _write(self, parts: Sequence[bytes], size_bytes: int) -> None:
        try:
            written = os.writev(self._fd, parts) if len(parts) <= IOV_MAX else 0
            if written != size_bytes:
                _write_on(self._fd, parts, written)
        except OSError as error:
            meaning = os_error(error, self._active.path)
            self.poison(meaning)
            raise meaning from error

    def sync(self) -> None:
        """Return when everything appended before this call is durable."""
        with self._sync_lock:
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._write_gathered()
                target = self._end
                sealing = list(self._sealing)
                fd = self._fd
                names_synced = self._names_synced
                self._names_synced = True
            if target == self._synced_position and names_synced:
                return
            try:
                for old_fd, _ in sealing:
                    os.fdatasync(old_fd)
                os.fdatasync(fd)
                if not names_synced:
                    sync_directory(self.path)
            except OSError as error:
                meaning = os_error(error, self.path)
                self.poison(meaning)
                raise meaning from error
            with self._lock:
                for old_fd, segment in sealing:
                    os.close(old_fd)
                    segment.state = SegmentState.SEALED
                del self._sealing[: len(sealing)]
                self._synced_position = max(self._synced_position, target)
            self._committed.publish(self._synced_position)

    def read(self, position: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` from `position`, fewer only at the end of its segment."""
        if self._gathered:
            self.write_gathered()
        segment = self.segment_at(position)
        begin = position - segment.start
        return self._files.read(segment, begin, min(size_bytes, segment.size_bytes - begin))

    def will_need(self, segment: Segment, begin: int, size_bytes: int) -> None:
        """A hint that bytes of a segment will be read soon."""
        self._files.will_need(segment, begin, size_bytes)

    def segment_at(self, position: int) -> Segment:
        """The segment that holds a position; SegmentGoneError if it was deleted."""
        while True:
            # Two lists that change one after the other are read without a lock; look again if a change came between.
            starts, segments = self._starts, self._segments
            at = bisect_right(starts, position) - 1
            if at < 0:
                raise SegmentGoneError(f"position {position} of {self.path} lies before the first one kept")
            segment = segments[at]
            if segment.start == starts[at]:
                break
        if position >= segment.end:
            raise SegmentGoneError(f"position {position} of {self.path} is not kept: its segment is gone")
        return segment

    def roll(self) -> None:
        """Begin another segment, if this one holds anything."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._active.size_bytes:
                self._start_segment()

    def roll_if_old(self) -> None:
        """Begin another segment if this one is past its age, which otherwise only an append finds out."""
        if self._clock_ms() >= self._roll_ms:
            self.roll()

    def skip_to(self, position: int) -> None:
        """Begin a segment at `position`, so that no position below it is given out again."""
        with self._lock:
            if position > self._end:
                self._end = position
                self._start_segment()

    def cut(self, position: int, quarantine: Path) -> Path | None:
        """Move everything from `position` on into quarantine; the file it went to. Only before the first append."""
        with self._lock:
            segment = self.segment_at(position) if position < self._end else self._active
            keep = position - segment.start
            if keep == segment.size_bytes:
                return None
            assert segment is self._active, "only the last segment has a tail to cut"
            try:
                quarantine.mkdir(parents=True, exist_ok=True)
                kept = quarantine / f"{self.path.name}-{position:020d}-{segment.size_bytes - keep}.tail"
                with open(segment.path, "rb") as source:
                    source.seek(keep)
                    write_durably(kept, source.read())
                self._committed.lower(position)
                os.ftruncate(self._fd, keep)
                os.fdatasync(self._fd)
            except OSError as error:
                meaning = os_error(error, segment.path)
                self.poison(meaning)
                raise meaning from error
            segment.size_bytes = keep
            self._end = position
            return kept

    def settle(self) -> None:
        """Make durable what was found at the start: a process that crashed may have left it in the page cache only.

        Costs a descriptor and a call per segment; where nothing is dirty the disk is not touched.
        """
        for segment in self.segments():
            try:
                fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                meaning = os_error(error, segment.path)
                self.poison(meaning)
                raise meaning from error
        self.sync()

    def delete(self, segment: Segment) -> None:
        """Delete a sealed segment. Readers in the middle of it finish; later ones get SegmentGoneError."""
        with self._lock:
            assert segment.state is SegmentState.SEALED, f"{segment.path} is in state {segment.state}, not sealed"
            segment.state = SegmentState.DELETING
            kept = [each for each in self._segments if each is not segment]
            self._segments = kept
            self._starts = [each.start for each in kept]
        self._files.forget(segment)
        try:
            os.unlink(segment.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise os_error(error, segment.path) from error

    def open_files(self) -> int:
        """Descriptors held."""
        return len(self._files) + len(self._sealing) + 1

    def poison(self, error: BaseException) -> None:
        if self._error is None:
            self._error = StorePoisonedError(
                f"the lane {self.path} stopped after an I/O error and must be opened again: {error}"
            )

    def close(self) -> None:
        """Sync and let go, unless the lane is poisoned. Closing twice is fine."""
        if isinstance(self._error, StoreClosedError):
            return
        try:
            if self._error is None:
                self.sync()
        finally:
            # A sync that is under way must not find its descriptors closed, or given to another file.
            with self._sync_lock, self._lock:
                self._error = StoreClosedError(f"the lane {self.path} is closed")
                os.close(self._fd)
                self._committed.close()
                for fd, _ in self._sealing:
                    os.close(fd)
                self._sealing.clear()
            self._files.close()

    def _roll(self, size_bytes: int) -> None:
        """Begin another segment if the active one has something and no room, or is too old."""
        if self._active.size_bytes:
            self._start_segment()
        else:
            self._roll_ms = self._clock_ms() + self.options.segment_age_ms
        # A frame larger than a segment gets one of its own, as long as it must be.
        self._roll_at = max(self._roll_at, self._end + size_bytes)

    def _start_segment(self) -> None:
        self._write_gathered()
        now_ms = self._clock_ms()
        try:
            segment = _create_segment(self.path, self._end, now_ms)
            fd = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
        except OSError as error:
            meaning = os_error(error, self.path)
            self.poison(meaning)
            raise meaning from error
        self._active.state = SegmentState.SEALING
        self._sealing.append((self._fd, self._active))
        self._names_synced = False
        self._fd = fd
        self._active = segment
        self._segments = [*self._segments, segment]
        self._starts = [*self._starts, segment.start]
        self._roll_at = self._end + self.options.segment_bytes
        self._roll_ms = now_ms + self.options.segment_age_ms


def read_seed(path: Path) -> int:
    """The seed of an existing lane, for readers beside the writer."""
    seed = _read_seed(path)
    if seed is None:
        raise CorruptionError(f"{path} holds no lane: {' and '.join(MARKERS)} are missing")
    return seed


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


def _make_directory(path: Path) -> None:
    """Make a directory and those above it so that they survive a power loss."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def _create_segment(path: Path, start: int, now_ms: int) -> Segment:
    file = path / segment_name(start)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    return Segment(file, start, 0, SegmentState.WRITE, now_ms)


def _write_on(fd: int, parts: Sequence[bytes], written: int) -> None:
    """Go on after a short write, or with more buffers than one writev takes."""
    left = [memoryview(part) for part in parts]
    while True:
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if not left:
            return
        left[0] = left[0][written:]
        written = os.writev(fd, left[:IOV_MAX])


def _encode_marker(seed: int) -> bytes:
    body = json.dumps({"format": FORMAT, "version": FORMAT_VERSION, "seed": seed}).encode()
    return b"%08x %s\n" % (google_crc32c.value(body), body)


def _read_seed(path: Path) -> int | None:
    """The seed from either marker; None where no lane has been made."""
    damaged = None
    for name in MARKERS:
        try:
            raw = (path / name).read_bytes()
        except FileNotFoundError:
            continue
        crc, _, body = raw.rstrip(b"\n").partition(b" ")
        if crc != b"%08x" % google_crc32c.value(body):
            damaged = path / name
            continue
        said = json.loads(body)
        if said["version"] > FORMAT_VERSION:
            raise StoreTooNewError(
                f"{path} has lane version {said['version']}, this Basalt knows up to {FORMAT_VERSION}: use a newer one"
            )
        return int(said["seed"])
    if damaged is not None:
        raise CorruptionError(f"{damaged} does not match its checksum; restore it from a backup of this store")
    if path.is_dir() and any(parse_segment_name(name) is not None for name in os.listdir(path)):
        raise CorruptionError(f"{path} holds segments but neither {MARKERS[0]} nor {MARKERS[1]}; restore one of them")
    return None
