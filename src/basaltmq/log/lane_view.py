"""A read-only view of a lane next to its writer. It takes no lock and changes no file.

`relist` reads the directory: names first, then sizes, so that every segment except the last is complete in the list.
Between two calls the view is consistent. Segments that the writer deletes stay readable while a descriptor is open, and
raise SegmentGoneError otherwise. Their live records were copied further on in the lane, so the view must catch up. At
most `read_files_max` deleted files stay open, until the next `relist`.

The last bytes may be a partial frame, from a running write or a crash; `recovery.scan` stops before them. COMMITTED
records what is durable. If it is missing or damaged, `sync_to` syncs the data, which any reader may do. A killed writer
may have confirmed frames that are only in its ring (see `lane`). The view sees them after the next writer has moved
them to their segment.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from basaltmq.errors import CorruptionError, StoreReadOnlyError
from basaltmq.log.committed import Mark, read_mark
from basaltmq.log.lane import Lane, LaneOptions
from basaltmq.log.marker import MARKERS, read_seed
from basaltmq.log.segment import (
    POSITION_MAX,
    Listed,
    Segment,
    SegmentFiles,
    SegmentGoneError,
    SegmentState,
    parse_segment_name,
    segment_name,
)
from basaltmq.store.directory import os_error, sync_directory

_FSYNC_MEANINGLESS = (errno.EROFS, errno.EINVAL)
"""Errors of a sync on a read-only file system, where no data waits to be written."""


class LaneView(Lane):
    """A read-only lane. Every write operation raises StoreReadOnlyError."""

    def __init__(self, path: Path, options: LaneOptions | None = None) -> None:
        # Create no writer state: no write descriptor and no COMMITTED.
        self.path = path
        self.seed = read_seed(path)
        self.options = options or LaneOptions()
        self._files = SegmentFiles(self.options.read_files_max)
        self._listed = Listed([])
        self._end = 0
        self._hardened = 0
        self.relist()

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a lane exists here. Segments without a marker count: opening them reports what is missing."""
        try:
            names = os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise os_error(error, path) from error
        return any(name in MARKERS or parse_segment_name(name) is not None for name in names)

    @property
    def start(self) -> int:
        return self._listed.starts[0] if self._listed.starts else 0

    @property
    def active_start(self) -> int:
        return self._listed.starts[-1] if self._listed.starts else 0

    def mark(self) -> Mark | None:
        """Return the writer's mark of the durable end."""
        return read_mark(self.path)

    def relist(self) -> None:
        """Update the list of segments."""
        try:
            starts = sorted(
                start for entry in os.scandir(self.path) if (start := parse_segment_name(entry.name)) is not None
            )
            found = [segment for start in starts if (segment := self._segment(start)) is not None]
        except OSError as error:
            raise os_error(error, self.path) from error
        for segment, following in pairwise(found):
            # Bytes beyond the start of the next segment were never part of the lane.
            segment.size_bytes = min(segment.size_bytes, following.start - segment.start)
        here = {segment.start for segment in found}
        for old in self._listed.segments:
            if old.start not in here:
                self._files.forget(old)
        self._listed = Listed(found)
        self._end = found[-1].end if found else 0

    def _segment(self, start: int) -> Segment | None:
        path = self.path / segment_name(start)
        if start > POSITION_MAX:
            raise CorruptionError(f"{path} has an impossible position in its name; move it out of the lane")
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        return Segment(path, start, status.st_size, SegmentState.SEALED, int(status.st_mtime * 1000))

    def has_changed(self) -> bool:
        """Whether `relist` would find a change. Costs two system calls."""
        segments = self._listed.segments
        if not segments:
            return LaneView.exists(self.path)
        last = segments[-1]
        try:
            grown = os.stat(last.path).st_size != last.size_bytes
        except FileNotFoundError:
            return True
        except OSError as error:
            raise os_error(error, last.path) from error
        # A segment that stopped growing was rolled at its end.
        return grown or (last.size_bytes > 0 and os.path.exists(self.path / segment_name(last.end)))

    def covers(self, begin: int, end: int) -> bool:
        """Whether every byte in [begin, end) is present."""
        for segment in self._listed.segments:
            if begin >= end:
                break
            if segment.start > begin:
                return False
            begin = max(begin, segment.end)
        return begin >= end

    def read(self, position: int, size_bytes: int) -> bytes:
        segment = self.segment_at(position)
        begin = position - segment.start
        try:
            return self._files.read(segment, begin, min(size_bytes, segment.size_bytes - begin))
        except CorruptionError:
            if os.path.exists(segment.path):
                raise
            raise SegmentGoneError(f"{segment.path} was deleted by the writer") from None

    def sync_to(self, position: int) -> int:
        """Sync everything below `position`. Return the position up to which the lane has been synced."""
        if position <= self._hardened:
            return self._hardened
        try:
            for segment in self._listed.segments:
                if segment.end > self._hardened and segment.start < position:
                    _sync_data(segment.path)
            try:
                sync_directory(self.path)
            except OSError as error:
                if error.errno not in _FSYNC_MEANINGLESS:
                    raise
        except OSError as error:
            raise os_error(error, self.path) from error
        self._hardened = position
        return position

    def open_files(self) -> int:
        return len(self._files)

    def close(self) -> None:
        self._files.close()

    def append(self, parts: Sequence[bytes], size_bytes: int, now_ms: int | None = None, gather: bool = False) -> int:
        self._refuse()

    def sync(self) -> None:
        self._refuse()

    def sync_through_ring(self) -> None:
        self._refuse()

    def move_ring_frames(self) -> None:
        self._refuse()

    def roll(self) -> None:
        self._refuse()

    def skip_to(self, position: int) -> None:
        self._refuse()

    def cut(self, position: int, quarantine: Path) -> Path | None:
        self._refuse()

    def settle(self) -> None:
        self._refuse()

    def delete(self, segment: Segment) -> None:
        self._refuse()

    def poison(self, error: BaseException) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreReadOnlyError(f"the lane {self.path} was opened read-only; open the store for writing")


def _sync_data(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Deleted by cleaning, which first syncs the records that it copies.
        return
    try:
        os.fdatasync(fd)
    except OSError as error:
        if error.errno not in _FSYNC_MEANINGLESS:
            raise
    finally:
        os.close(fd)
