"""What a lane may be told about itself, and the limits that hold for every one.

Each number has its reason beside it. Not here: what is done with them (`lane`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from basaltmq.log.mover import MOVED_BYTES_MIN
from basaltmq.log.segment import READ_FILES_MAX

SEGMENT_BYTES: Final = 256 << 20
"""Small enough that cleaning moves little at a time, large enough that a terabyte is four thousand files."""

SEGMENT_AGE_MS: Final = 24 * 60 * 60 * 1000
"""A day: retention by time cannot be finer than a segment's age."""

GATHERED_BYTES_MAX: Final = 1 << 20
"""Frames kept for one write: past a few hundred KB a larger write gains nothing, and what is kept a crash takes."""

RING_BYTES: Final = 32 << 20
"""Of the ring, on disk and in the page cache: half of it takes a fast disk 10 ms, which a drain needs too."""

RING_AFTER: Final = 64
"""Syncs of gathered frames before a lane gets its ring: most lanes never have so many, and making it costs 30 ms."""


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Settings of one lane."""

    segment_bytes: int = SEGMENT_BYTES
    segment_age_ms: int = SEGMENT_AGE_MS
    read_files_max: int = READ_FILES_MAX
    ring_bytes: int = RING_BYTES
    """0 for no ring."""
    ring_after: int = RING_AFTER
    moved_bytes_min: int = MOVED_BYTES_MIN
