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

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from basaltmq.errors import CorruptionError, SegmentGoneError, StoreReadOnlyError
from basaltmq.log.committed import Mark, read_mark
from basaltmq.log.lane import Lane
from basaltmq.log.lane_options import LaneOptions
from basaltmq.log.marker import MARKERS, read_seed
from basaltmq.log.segment import (
    Listed,
    Segment,
    SegmentFiles,
    list_segments,
    parse_segment_name,
    segment_name,
)
from basaltmq.store.directory import SYNC_MEANINGLESS, os_error, sync_data, sync_directory


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
        self._synced_end = 0
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
            found = list_segments(self.path)
        except OSError as error:
            raise os_error(error, self.path) from error
        here = {segment.start for segment in found}
        for old in self._listed.segments:
            if old.start not in here:
                self._files.forget(old)
        self._listed = Listed(found)
        self._end = found[-1].end if found else 0

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
        if position <= self._synced_end:
            return self._synced_end
        try:
            for segment in self._listed.segments:
                if segment.end > self._synced_end and segment.start < position:
                    # Cleaning syncs the records that it copies before it deletes the file.
                    sync_data(segment.path)
            try:
                sync_directory(self.path)
            except OSError as error:
                if error.errno not in SYNC_MEANINGLESS:
                    raise
        except OSError as error:
            raise os_error(error, self.path) from error
        self._synced_end = position
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
