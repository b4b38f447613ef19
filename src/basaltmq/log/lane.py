"""A lane: an append-only run of bytes over segment files.

    positions  0 ............... 268435456 ............... 536870912 ........ end
    files      00000000000000000000.log    00000000000268435456.log    ...

A position is a byte's place in the whole lane; it is given out once and stays what it means until its segment is
deleted. Gaps appear where segments were deleted. `LANE` (and its copy, because without the seed no frame can be
checked) says format, version and seed; `COMMITTED` tells other processes how far the lane is synced.

One writer at a time appends (`append` takes the lock for one writev); any number of threads read with pread and take no
lock of the writer's. Lock-free readers depend on two attributes, each published by one assignment. `_written` only
grows: every byte below it is in its segment file, wherever the bytes above it are (gathered, in the ring, on the way
to the segment). `_listed` is an immutable list of segments. A read that reaches `_written` or beyond takes the lock.
 What append returned survives a crash of the process, unless it was told to `gather`: frames that
nobody is promised before a sync are kept until one, a read of them, or an append that does not wait, and then written
together, because one large write and its sync cost about half of many small ones. They come before what is appended
later in any case, and no more than GATHERED_BYTES_MAX are kept. `sync` makes everything durable: segments that were
rolled away from first, then the one being written, then the directory, so that `synced_position` never covers a hole.

`secure` does so faster where it can: a lane that is synced often gets a ring (see `ring`), and if all that is not
durable is still gathered, the ring takes it instead of the segment. The segment is given it by `tidy`, when those who
waited have been told, or by a read that comes before, which leaves to the ring what awaits a sync; what is large is
moved there meanwhile (see `mover`). A drain in the background syncs the segment each time half of the ring is used; if
that takes too long, or there is more to sync than was gathered, `secure` is a `sync`. The ring is removed only when all
of it is synced in its segment.

Any error of a write or a sync poisons the lane: how much reached the file is not known, and only recovery can tell. The
bytes of a failed append are never referred to and are cut off at the next start. After a failed sync the page cache
shows what no disk may have, and a later sync says nothing; so what was not synced is left in doubt, and `settle` writes
it again at the next start.

Rolling: by size, so that cleaning can drop files, and by age, so that a quiet lane's old records can go. Age is told by
the clock given; one that goes back only makes a segment younger. Budget of `append`: 2 us around the writev.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from basaltmq.errors import StorageError, StoreClosedError, StorePoisonedError, is_disk_full
from basaltmq.log import ring
from basaltmq.log.committed import Committed
from basaltmq.log.lane_options import GATHERED_BYTES_MAX as GATHERED_BYTES_MAX
from basaltmq.log.lane_options import LaneOptions as LaneOptions
from basaltmq.log.marker import MARKERS, encode_marker, find_seed
from basaltmq.log.mover import WRITE_BACK_BYTES, Mover, start_write_back
from basaltmq.log.ring import Ring
from basaltmq.log.segment import (
    IOV_MAX,
    Listed,
    Segment,
    SegmentFiles,
    SegmentGoneError,
    SegmentState,
    create_segment,
    list_segments,
    make_directory,
    write_again,
    write_on,
)
from basaltmq.store.directory import os_error, sync_directory, write_durably


class Lane:
    """One lane, open for writing. The caller holds the store's lock, so no other process writes here."""

    def __init__(
        self, path: Path, seed: int, segments: list[Segment], clock_ms: Callable[[], int], options: LaneOptions
    ) -> None:
        self.path = path
        self.seed = seed
        self.options = options
        self._clock_ms = clock_ms
        self._listed = Listed(segments)
        self._files = SegmentFiles(options.read_files_max)
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._sealing: list[tuple[int, Segment]] = []
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._ringed = self._ringed_bytes = 0
        """Of what is gathered, how many parts and bytes from the front the ring has."""
        self._mover = Mover()
        """Busy while gathered frames are written outside the lane's lock."""
        self._ring: Ring | None = None
        self._ring_wanted = 0
        self._worker: threading.Thread | None = None
        self._names_synced = False
        self._error: StorageError | None = None
        self._active = segments[-1]
        self._fd = os.open(self._active.path, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
        self._end = self._written = self._begun = self._active.end
        """Where the next byte goes, the end of what is in segment files, and the end of what was written back.

        Readers compare with `_written` without the lock, so it advances only after the write has returned.
        """
        try:
            self._committed = Committed(path, clock_ms(), self._end)
        except OSError:
            os.close(self._fd)
            raise
        self._roll_at = self._active.start + options.segment_bytes
        self._roll_ms = self._active.started_ms + options.segment_age_ms
        self._synced_position = self._told_position = segments[0].start

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
        try:
            seed = find_seed(path)
            if seed is None:
                make_directory(path)
                seed = random_u32()
                for name in MARKERS:
                    write_durably(path / name, encode_marker(seed))
            segments = list_segments(path, clock_ms())
            if not segments:
                segments = [create_segment(path, 0, clock_ms())]
            ring.replay(path, seed, segments)
            # Before anything is appended: positions it knows of may be given out again from here on.
            ring.remove(path)
            segments[-1].state = SegmentState.WRITE
            return cls(path, seed, segments, clock_ms, options or LaneOptions())
        except OSError as error:
            raise os_error(error, path) from error

    @property
    def start(self) -> int:
        """The first position kept."""
        return self._listed.starts[0]

    @property
    def end(self) -> int:
        """The position of the next byte appended."""
        return self._end

    @property
    def synced_position(self) -> int:
        """Everything below survives a power loss. At first that is nothing: what was found may be in the page cache."""
        return self._synced_position

    @property
    def is_syncing(self) -> bool:
        return self._sync_lock.locked()

    @property
    def active_start(self) -> int:
        """Where the segment being written begins."""
        return self._active.start

    def segments(self) -> list[Segment]:
        return list(self._listed.segments)

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
                if self._mover.is_busy:
                    self._await_move()
                self._write_out(parts, size_bytes)
            self._active.size_bytes += size_bytes
            self._end = position + size_bytes
        return position

    def write_gathered(self) -> None:
        """Return when everything appended is written: it survives a crash of the process."""
        end = self._end
        if self._written < end:
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._write_gathered()

    def _write_gathered(self) -> None:
        if self._mover.is_busy:
            self._await_move()
        if self._gathered:
            self._write_out(self._gathered, self._gathered_bytes)
            self._gathered, self._gathered_bytes, self._ringed, self._ringed_bytes = [], 0, 0, 0

    def _await_move(self) -> None:
        """Return when what is on its way to the segment is written."""
        self._mover.wait()
        if self._error is not None:
            raise self._error

    def _write_out(self, parts: Sequence[bytes], size_bytes: int) -> None:
        try:
            written = os.writev(self._fd, parts) if len(parts) <= IOV_MAX else 0
            if written != size_bytes:
                write_on(self._fd, parts, written)
        except OSError as error:
            raise self._failed(error, self._active.path) from error
        self._written += size_bytes

    def sync(self) -> None:
        """Return when everything appended before this call is durable."""
        with self._sync_lock:
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._write_gathered()
                target = self._end
                self._begun = target
                taken = 0 if self._ring is None else self._ring.taken
                sealing = list(self._sealing)
                fd = self._fd
                names_synced = self._names_synced
                self._names_synced = True
                is_held = self._ring is not None and self._ring.used_bytes > 0
            # What only the ring makes durable is not enough: whoever asks may be about to remove it.
            if target == self._synced_position and names_synced and not is_held:
                return
            try:
                for old_fd, _ in sealing:
                    os.fdatasync(old_fd)
                os.fdatasync(fd)
                if not names_synced:
                    sync_directory(self.path)
            except OSError as error:
                raise self._failed(error, self.path) from error
            with self._lock:
                for old_fd, segment in sealing:
                    os.close(old_fd)
                    segment.state = SegmentState.SEALED
                del self._sealing[: len(sealing)]
                self._synced_position = max(self._synced_position, target)
            if self._ring is not None:
                self._ring.release(taken)
            self._publish()

    def secure(self) -> None:
        """As `sync`, or faster: then `tidy` has to follow, and who waits for the sync can be told before."""
        with self._sync_lock:
            is_durable = self._secure()
        if not is_durable:
            self.sync()

    def _secure(self) -> bool:
        """Give the ring all that is not durable; False if that cannot be. Under the sync's lock."""
        with self._lock:
            if self._error is not None:
                raise self._error
            gathered = self._gathered
            size_bytes = self._gathered_bytes - self._ringed_bytes
            target = self._end
            if self._sealing or not self._names_synced:
                return False
            if not size_bytes:
                return self._synced_position == target
            if self._synced_position + size_bytes != target:
                return False
            if self._ring is None:
                self._want_ring()
                return False
            start = self._active.start
            parts = gathered[self._ringed :] if self._ringed else list(gathered)
            if size_bytes >= self.options.moved_bytes_min:
                self._move()
        held = self._ring
        try:
            if not held.append(self.seed, target - size_bytes, start, parts, size_bytes):
                return False
        except OSError as error:
            raise self._failed(error, held.path) from error
        with self._lock:
            if self._gathered is gathered:
                # Nobody had it written meanwhile.
                self._ringed += len(parts)
                self._ringed_bytes += size_bytes
            self._synced_position = target
            if 2 * held.used_bytes > held.size_bytes:
                self._work(self._drain)
        return True

    def _move(self) -> None:
        """Have all that is gathered written to the segment meanwhile. Under the lock."""
        if self._mover.is_busy:
            self._await_move()
        parts, size_bytes = self._gathered, self._gathered_bytes
        self._gathered, self._gathered_bytes, self._ringed, self._ringed_bytes = [], 0, 0, 0

        def write() -> None:
            with suppress(StorageError):  # It has poisoned the lane.
                self._write_out(parts, size_bytes)

        self._mover.begin()
        self._mover.give(write)

    def tidy(self) -> None:
        """Write what `secure` left to the segment, and tell other processes. Appends go on meanwhile."""
        if self._told_position == self._synced_position:
            return
        with self._sync_lock:
            with self._lock:
                self._mover.wait()
                if self._error is not None:
                    return
                parts, size_bytes = self._take_ringed()
                fd, start = self._fd, self._active.start
                self._mover.begin()
            try:
                if parts:
                    self._write_out(parts, size_bytes)
                begin, size_bytes = self._begun, self._written - self._begun
                if size_bytes >= WRITE_BACK_BYTES:
                    self._begun = self._written
            finally:
                self._mover.end()
            self._publish()
            if size_bytes >= WRITE_BACK_BYTES:
                # The disk has nothing else to do until the next sync; a drain has the less.
                start_write_back(fd, begin - start, size_bytes)

    def _publish(self) -> None:
        """Tell other processes what is durable. All of it is written to its segment."""
        self._told_position = self._synced_position
        self._committed.publish(self._told_position)

    def _want_ring(self) -> None:
        """Have a ring made once it is worth it. Under the lock."""
        self._ring_wanted += 1
        if self.options.ring_bytes and self._ring_wanted == self.options.ring_after:
            self._work(self._make_ring)

    def _work(self, action: Callable[[], None]) -> None:
        """Do something in the background, unless something is being done. Under the lock."""
        if self._worker is None or not self._worker.is_alive():
            self._worker = threading.Thread(target=action, name="basalt-drain", daemon=True)
            self._worker.start()

    def _make_ring(self) -> None:
        # Without room for it every sync is what it was.
        with suppress(OSError):
            self._ring = Ring.create(self.path, self.options.ring_bytes)

    def _drain(self) -> None:
        """Make durable in its segment what the ring holds, so that its place can be used again."""
        held = self._ring
        assert held is not None, "there is nothing to drain"
        try:
            with self._lock:
                if self._error is not None or self._sealing:
                    # A sync that is due does it.
                    return
                self._write_gathered()
                taken = held.taken
                # Of its own: an error is told once to each file that is open, and a sync must hear of it too.
                fd = os.open(self._active.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self.poison(os_error(error, self.path))
        except StorageError:
            # The lane is poisoned already.
            return
        else:
            held.release(taken)

    def read(self, position: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` from `position`; fewer at the end of its segment, or before frames that await a sync."""
        segment = self.segment_at(position)
        begin = position - segment.start
        size_bytes = min(size_bytes, segment.size_bytes - begin)
        if position + size_bytes > self._written:
            size_bytes = self._bring(position, size_bytes)
        return self._files.read(segment, begin, size_bytes)

    def _bring(self, position: int, size_bytes: int) -> int:
        """Have the frame at `position` in its segment; how many bytes can be read there."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._mover.is_busy:
                self._await_move()
            if position >= self._written + self._ringed_bytes:
                self._write_gathered()
            elif self._ringed:
                # The rest is left for the ring: written, it would take the sync of a segment.
                self._write_out(*self._take_ringed())
            return min(size_bytes, self._written - position) if position < self._written else size_bytes

    def _take_ringed(self) -> tuple[list[bytes], int]:
        """Of what is gathered, the part that the ring has. Under the lock."""
        parts, size_bytes = self._gathered[: self._ringed], self._ringed_bytes
        del self._gathered[: self._ringed]
        self._gathered_bytes -= size_bytes
        self._ringed = self._ringed_bytes = 0
        return parts, size_bytes

    def will_need(self, segment: Segment, begin: int, size_bytes: int) -> None:
        """A hint that bytes of a segment will be read soon."""
        self._files.will_need(segment, begin, size_bytes)

    def segment_at(self, position: int) -> Segment:
        """The segment that holds a position; SegmentGoneError if it was deleted."""
        listed = self._listed
        at = bisect_right(listed.starts, position) - 1
        if at < 0:
            raise SegmentGoneError(f"position {position} of {self.path} lies before the first one kept")
        segment = listed.segments[at]
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
                raise self._failed(error, segment.path) from error
            segment.size_bytes = keep
            self._end = self._written = self._begun = position
            return kept

    def settle(self) -> None:
        """Make durable what was found at the start: a process that crashed may have left it in the page cache only.

        Costs a descriptor and a call per segment; where nothing is dirty the disk is not touched. What a failed sync
        has left in doubt (see `committed`) is written again.
        """
        doubted = self._committed.doubted_from
        for segment in self.segments():
            is_doubted = doubted is not None and segment.end > doubted
            try:
                fd = os.open(segment.path, (os.O_RDWR if is_doubted else os.O_RDONLY) | os.O_CLOEXEC)
                try:
                    if doubted is not None and is_doubted:
                        write_again(fd, max(0, doubted - segment.start), segment.size_bytes)
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                raise self._failed(error, segment.path) from error
        self._committed.believe()
        self.sync()

    def delete(self, segment: Segment) -> None:
        """Delete a sealed segment. Readers in the middle of it finish; later ones get SegmentGoneError."""
        with self._lock:
            assert segment.state is SegmentState.SEALED, f"{segment.path} is in state {segment.state}, not sealed"
            segment.state = SegmentState.DELETING
            self._listed = Listed([each for each in self._listed.segments if each is not segment])
        self._files.forget(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            raise os_error(error, segment.path) from error

    def open_files(self) -> int:
        """Descriptors held."""
        return len(self._files) + len(self._sealing) + 1

    def _failed(self, error: OSError, path: Path) -> StorageError:
        meaning = os_error(error, path)
        self.poison(meaning)
        return meaning

    def poison(self, error: BaseException) -> None:
        if self._error is None:
            self._error = StorePoisonedError(
                f"the lane {self.path} stopped after an I/O error and must be opened again: {error}",
                is_disk_full(error),
            )
            self._committed.doubt(self._synced_position)

    def close(self) -> None:
        """Sync and let go, unless the lane is poisoned. Closing twice is fine."""
        if isinstance(self._error, StoreClosedError):
            return
        try:
            if self._worker is not None:
                self._worker.join()
            if self._error is None:
                self.sync()
        finally:
            # A sync that is under way must not find its descriptors closed, or given to another file.
            with self._sync_lock, self._lock:
                self._mover.wait()
                if self._error is None and self._told_position == self._end:
                    ring.remove(self.path)
                self._error = StoreClosedError(f"the lane {self.path} is closed")
                if self._ring is not None:
                    self._ring.close()
                    self._ring = None
                os.close(self._fd)
                self._committed.close()
                for fd, _ in self._sealing:
                    os.close(fd)
                self._sealing.clear()
            self._mover.close()
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
            segment = create_segment(self.path, self._end, now_ms)
            fd = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
        except OSError as error:
            raise self._failed(error, self.path) from error
        self._written = self._begun = self._end
        self._active.state = SegmentState.SEALING
        self._sealing.append((self._fd, self._active))
        self._names_synced = False
        self._fd = fd
        self._active = segment
        self._listed = Listed([*self._listed.segments, segment])
        self._roll_at = self._end + self.options.segment_bytes
        self._roll_ms = now_ms + self.options.segment_age_ms
