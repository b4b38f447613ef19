"""Copies a lane during operation, for a checkpoint of its store.

Sealed segments never change and are hard-linked where the file system allows. The active segment is copied up to the
end of the lane at the start of the copy, which is the end of a complete frame. The caller keeps cleaning from deleting
segments during the copy, and makes the files durable.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from basaltmq.errors import StorageError
from basaltmq.log.lane import Lane
from basaltmq.log.marker import MARKERS
from basaltmq.log.segment import SegmentState

_CHUNK_BYTES: Final = 4 << 20


def copy_lane(lane: Lane, target: Path) -> None:
    """Copy `lane` into the new directory `target`."""
    lane.write_gathered()
    end = lane.end
    segments = [(segment, segment.state) for segment in lane.segments() if segment.start <= end]
    target.mkdir(parents=True)
    for name in MARKERS:
        shutil.copyfile(lane.path / name, target / name)
    for segment, state in segments:
        destination = target / segment.path.name
        if state is SegmentState.SEALED:
            _link(segment.path, destination)
        else:
            _copy(segment.path, destination, min(segment.end, end) - segment.start)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copyfile(source, target)


def _copy(source: Path, target: Path, size_bytes: int) -> None:
    with open(source, "rb", buffering=0) as reading, open(target, "xb") as writing:
        left = size_bytes
        while left:
            chunk = reading.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise StorageError(f"{source} is {left} bytes shorter than the lane requires; run verify")
            writing.write(chunk)
            left -= len(chunk)
