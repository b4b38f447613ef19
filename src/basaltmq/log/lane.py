"""A lane: an append-only byte sequence stored in segment files.

    positions  0 ............... 268435456 ............... 536870912 ........ end
    files      00000000000000000000.log    00000000000268435456.log    ...

A position is the place of a byte in the whole lane. It is assigned once and stays valid until its segment is deleted.
Deleted segments leave gaps. `LANE` and its copy hold format, version and seed; without the seed no frame can be
checked. `COMMITTED` publishes to other processes how far the lane is synced.

Threading: one writer at a time appends (`append` holds the lock for one writev). Any number of threads read with pread,
without the writer's lock. They rely on two attributes, each published by a single assignment. `_written` only grows:
every byte below it is in its segment file; bytes above it may be gathered, in the ring, or on the way to the segment.
`_listed` is an immutable list of segments. A read that reaches beyond `_written` takes the lock.

Appended frames survive a process crash on return, except with `gather`. Gathered frames stay in memory until a sync, a
read of them, or an append without `gather`; then one write covers all of them. One large write with its sync costs
about half of many small ones. Gathered frames always precede later appends, and at most GATHERED_BYTES_MAX are kept.

`sync` makes everything durable: first the segments that were rolled, then the active one, then the directory. So
`synced_position` never covers a hole.

`sync_through_ring` is faster where possible. A lane with frequent syncs gets a ring (see `ring`). If all frames that
are not durable are still gathered in memory, it writes them to the ring instead of the segment. After the waiters are
notified, `move_ring_frames` writes them to the segment. A read that comes first writes only the part that the ring
holds, not the part that awaits a sync. Large groups move to the segment in parallel (see `mover`). A background drain
syncs the segment whenever half of the ring is used. If the drain is too slow, or some frames are already written,
`sync_through_ring` falls back to `sync`. The ring is removed only when all of its content is synced in segments.

Any write or sync error poisons the lane: only recovery can tell how much reached the file. Nothing refers to the bytes
of a failed append, and the next start truncates them. After a failed sync the page cache may hold data that the disk
does not, and a later sync reports no error. So unsynced data stays in doubt, and the next start rewrites it (`settle`).

Segments roll by size, so that cleaning can delete files, and by age, so that old records of an idle lane can be
deleted. Age follows the given clock; a clock that goes back only makes a segment younger. `append` adds 2 us to writev.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from basaltmq.errors import SegmentGoneError, StorageError, StoreClosedError, StorePoisonedError, is_disk_full
from basaltmq.log import ring
from basaltmq.log.committed import Committed
from basaltmq.log.ends import LaneEnd
from basaltmq.log.lane_options import GATHERED_BYTES_MAX, LaneOptions
from basaltmq.log.marker import MARKERS, encode_marker, find_seed
from basaltmq.log.mover import WRITE_BACK_BYTES, Mover, start_write_back
from basaltmq.log.ring import Ring
from basaltmq.log.segment import (
    IOV_MAX,
    Listed,
    Segment,
    SegmentFiles,
    SegmentState,
    create_segment,
    list_segments,
    write_again,
    write_on,
)
from basaltmq.store.directory import make_directory, os_error, sync_directory, write_durably


class Lane:
    """A lane, open for writing. The caller holds the store's lock, so no other process writes here."""

    def __init__(
        self,
        path: Path,
        seed: int,
        segments: list[Segment],
        clock_ms: Callable[[], int],
        options: LaneOptions,
        end: LaneEnd | None,
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
        """How many gathered parts and bytes, from the front, are in the ring."""
        self._mover = Mover()
        """Busy while gathered frames are written without the lane's lock."""
        self._ring: Ring | None = None
        self._ring_wanted = 0
        self._worker: threading.Thread | None = None
        self._names_synced = False
        self._error: StorageError | None = None
        self._active = segments[-1]
        self._fd = os.open(self._active.path, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
        self._end = self._written = self._write_back_end = self._active.end
        """The next append position, the end of the data in segment files, and the end of the data with write-back
        started.

        Readers compare with `_written` without the lock, so it advances only after the write has returned.
        """
        try:
            self._committed = Committed(path, clock_ms(), self._end, end)
        except OSError:
            os.close(self._fd)
            raise
        self._roll_at = self._active.start + options.segment_bytes
        self._roll_ms = self._active.started_ms + options.segment_age_ms
        self._synced_position = self._published_position = segments[0].start

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock_ms: Callable[[], int],
        random_u32: Callable[[], int],
        options: LaneOptions | None = None,
        end: LaneEnd | None = None,
    ) -> Lane:
        """Open or create the lane at `path`. Run `recovery.repair` before the first append."""
        try:
            seed = find_seed(path)
            if seed is None:
                make_directory(path)
                seed = random_u32()
                for name in MARKERS:
                    write_durably(path / name, encode_marker(seed))
            segments = list_segments(path, clock_ms())
            ring.replay(path, seed, segments, clock_ms())
            if not segments:
                segments = [create_segment(path, 0, clock_ms())]
            # Remove the ring before the first append, because its positions may be assigned again.
            ring.remove(path)
            segments[-1].state = SegmentState.WRITE
            return cls(path, seed, segments, clock_ms, options or LaneOptions(), end)
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
        """Everything below survives a power loss. Initially the lane's start: existing data may be unsynced."""
        return self._synced_position

    @property
    def durable_before_open(self) -> int:
        """Everything below was durable before this open. A lane that ends earlier has lost its tail."""
        return self._committed.found_position

    @property
    def is_syncing(self) -> bool:
        return self._sync_lock.locked()

    @property
    def active_start(self) -> int:
        """The start of the active segment."""
        return self._active.start

    def segments(self) -> list[Segment]:
        return list(self._listed.segments)

    def append(self, parts: Sequence[bytes], size_bytes: int, now_ms: int | None = None, gather: bool = False) -> int:
        """Append the parts of complete frames, `size_bytes` in total. Return the position of the first byte.

        `now_ms` saves a clock call if the caller has just read the clock. `gather` defers the write to the next sync.
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
        """Write everything gathered. On return, everything appended survives a process crash."""
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
        """Wait until the mover has written its frames to the segment."""
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
                self._write_back_end = target
                taken = 0 if self._ring is None else self._ring.taken
                sealing = list(self._sealing)
                fd = self._fd
                names_synced = self._names_synced
                self._names_synced = True
                is_held = self._ring is not None and self._ring.used_bytes > 0
            # Durability through the ring alone is not enough, because the caller may be about to remove the ring.
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
                self._committed.note(self._synced_position)
            if self._ring is not None:
                self._ring.release(taken)
            self._publish()

    def sync_through_ring(self) -> None:
        """Like `sync`, but through the ring if possible. Call `move_ring_frames` after the waiters are notified."""
        with self._sync_lock:
            is_durable = self._sync_to_ring()
        if not is_durable:
            self.sync()

    def _sync_to_ring(self) -> bool:
        """Write everything that is not durable to the ring. Return False if impossible. The sync lock is held."""
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
                # No other thread has written the gathered frames since.
                self._ringed += len(parts)
                self._ringed_bytes += size_bytes
            self._synced_position = target
            self._committed.note(target)
            if 2 * held.used_bytes > held.size_bytes:
                self._run_in_background(self._drain)
        return True

    def _move(self) -> None:
        """Write all gathered frames to the segment in another thread. The lock is held."""
        if self._mover.is_busy:
            self._await_move()
        parts, size_bytes = self._gathered, self._gathered_bytes
        self._gathered, self._gathered_bytes, self._ringed, self._ringed_bytes = [], 0, 0, 0

        def write() -> None:
            with suppress(StorageError):  # The error has already poisoned the lane.
                self._write_out(parts, size_bytes)

        self._mover.begin()
        self._mover.run(write)

    def move_ring_frames(self) -> None:
        """Write the frames that are only in the ring to the segment, and publish. Appends may run in parallel."""
        if self._published_position == self._synced_position:
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
                begin, size_bytes = self._write_back_end, self._written - self._write_back_end
                if size_bytes >= WRITE_BACK_BYTES:
                    self._write_back_end = self._written
            finally:
                self._mover.end()
            self._publish()
            if size_bytes >= WRITE_BACK_BYTES:
                # The disk is idle until the next sync, so start the write-back now and leave less to the drain.
                start_write_back(fd, begin - start, size_bytes)

    def _publish(self) -> None:
        """Publish the synced position to other processes. Everything below it is in its segment."""
        self._published_position = self._synced_position
        self._committed.publish(self._published_position)

    def _want_ring(self) -> None:
        """Create a ring once enough syncs would have used it. The lock is held."""
        self._ring_wanted += 1
        if self.options.ring_bytes and self._ring_wanted == self.options.ring_after:
            self._run_in_background(self._make_ring)

    def _run_in_background(self, action: Callable[[], None]) -> None:
        """Run an action in the background, unless one is running. The lock is held."""
        if self._worker is None or not self._worker.is_alive():
            self._worker = threading.Thread(target=action, name="basalt-drain", daemon=True)
            self._worker.start()

    def _make_ring(self) -> None:
        # Without disk space for a ring, every sync goes to the segment.
        with suppress(OSError):
            self._ring = Ring.create(self.path, self.options.ring_bytes)

    def _drain(self) -> None:
        """Sync the ring's content in its segment, so that its space can be reused."""
        held = self._ring
        assert held is not None, "there is nothing to drain"
        try:
            with self._lock:
                if self._error is not None or self._sealing:
                    # The pending sync covers it.
                    return
                self._write_gathered()
                taken = held.taken
                # Use a separate descriptor: the kernel reports an error once per open file, and a sync must see it too.
                fd = os.open(self._active.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self.poison(os_error(error, self.path))
        except StorageError:
            # The lane is already poisoned.
            return
        else:
            held.release(taken)

    def read(self, position: int, size_bytes: int) -> bytes:
        """Return up to `size_bytes` from `position`: fewer at the segment's end, or before frames that await a sync."""
        segment = self.segment_at(position)
        begin = position - segment.start
        size_bytes = min(size_bytes, segment.size_bytes - begin)
        if position + size_bytes > self._written:
            size_bytes = self._write_to_segment(position, size_bytes)
        return self._files.read(segment, begin, size_bytes)

    def _write_to_segment(self, position: int, size_bytes: int) -> int:
        """Write the frame at `position` to its segment. Return the number of bytes that can be read there."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._mover.is_busy:
                self._await_move()
            if position >= self._written + self._ringed_bytes:
                self._write_gathered()
            elif self._ringed:
                # Leave the rest for the ring: writing it now would require a sync of the segment.
                self._write_out(*self._take_ringed())
            return min(size_bytes, self._written - position) if position < self._written else size_bytes

    def _take_ringed(self) -> tuple[list[bytes], int]:
        """Remove and return the gathered parts that the ring holds. The lock is held."""
        parts, size_bytes = self._gathered[: self._ringed], self._ringed_bytes
        del self._gathered[: self._ringed]
        self._gathered_bytes -= size_bytes
        self._ringed = self._ringed_bytes = 0
        return parts, size_bytes

    def will_need(self, segment: Segment, begin: int, size_bytes: int) -> None:
        """Hint that bytes of a segment will be read soon."""
        self._files.will_need(segment, begin, size_bytes)

    def segment_at(self, position: int) -> Segment:
        """Return the segment that holds a position. Raises SegmentGoneError if it was deleted."""
        listed = self._listed
        at = bisect_right(listed.starts, position) - 1
        if at < 0:
            raise SegmentGoneError(f"position {position} of {self.path} is before the first position kept")
        segment = listed.segments[at]
        if position >= segment.end:
            raise SegmentGoneError(f"position {position} of {self.path} is not kept: its segment was deleted")
        return segment

    def segment_start(self, position: int) -> int:
        """Return the start of the segment that holds a position, or -1 if it was deleted."""
        try:
            return self.segment_at(position).start
        except SegmentGoneError:
            return -1

    def roll(self) -> None:
        """Start a new segment if the active one is not empty."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._active.size_bytes:
                self._start_segment()

    def roll_if_old(self) -> None:
        """Start a new segment if the active one is too old. Otherwise only an append would check that."""
        if self._clock_ms() >= self._roll_ms:
            self.roll()

    def skip_to(self, position: int) -> None:
        """Start a segment at `position`, so that no position below it is assigned again."""
        with self._lock:
            if position > self._end:
                self._end = position
                self._start_segment()

    def cut(self, position: int, quarantine: Path) -> Path | None:
        """Move everything from `position` on into quarantine and return its file. Only before the first append."""
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
            self._end = self._written = self._write_back_end = position
            return kept

    def settle(self) -> None:
        """Sync the data found at start: it may be in the page cache only. Write doubted data again (`committed`)."""
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
        self._committed.clear_doubt()
        self.sync()

    def delete(self, segment: Segment) -> None:
        """Delete a sealed segment. Running reads complete; later ones get SegmentGoneError."""
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
        return len(self._files) + len(self._sealing) + 1

    def _failed(self, error: OSError, path: Path) -> StorageError:
        meaning = os_error(error, path)
        self.poison(meaning)
        return meaning

    def poison(self, error: BaseException) -> None:
        if self._error is None:
            self._error = StorePoisonedError(
                f"the lane {self.path} stopped after an I/O error; open the store again: {error}",
                is_disk_full(error),
            )
            self._committed.doubt(self._synced_position)

    def close(self) -> None:
        """Sync, unless the lane is poisoned, and close. Idempotent."""
        if isinstance(self._error, StoreClosedError):
            return
        try:
            if self._worker is not None:
                self._worker.join()
            if self._error is None:
                self.sync()
        finally:
            # A running sync must not find its descriptors closed or reused for another file.
            with self._sync_lock, self._lock:
                self._mover.wait()
                if self._error is None and self._published_position == self._end:
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
        """Start a new segment if the active one is not empty and is full or too old."""
        if self._active.size_bytes:
            self._start_segment()
        else:
            self._roll_ms = self._clock_ms() + self.options.segment_age_ms
        # A frame larger than a segment gets its own segment of the required size.
        self._roll_at = max(self._roll_at, self._end + size_bytes)

    def _start_segment(self) -> None:
        self._write_gathered()
        now_ms = self._clock_ms()
        try:
            segment = create_segment(self.path, self._end, now_ms)
            fd = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
        except OSError as error:
            raise self._failed(error, self.path) from error
        self._written = self._write_back_end = self._end
        self._active.state = SegmentState.SEALING
        self._sealing.append((self._fd, self._active))
        self._names_synced = False
        self._fd = fd
        self._active = segment
        self._listed = Listed([*self._listed.segments, segment])
        self._roll_at = self._end + self.options.segment_bytes
        self._roll_ms = now_ms + self.options.segment_age_ms
