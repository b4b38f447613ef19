"""Options of a lane, and the limits of every lane with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from basaltmq.log.mover import MOVED_BYTES_MIN
from basaltmq.log.segment import READ_FILES_MAX

SEGMENT_BYTES: Final = 256 << 20
"""Small enough that cleaning moves little data at a time, large enough that 1 TiB is about 4,000 files."""

SEGMENT_AGE_MS: Final = 24 * 60 * 60 * 1000
"""One day. Retention by time cannot be finer than a segment's age."""

GATHERED_BYTES_MAX: Final = 1 << 20
"""Most bytes gathered for one write. Beyond a few hundred KB nothing is gained, and a crash loses the data."""

RING_BYTES: Final = 32 << 20
"""Size of the ring, on disk and in the page cache. A fast disk writes half of it in 10 ms, as long as a drain takes."""

RING_AFTER: Final = 64
"""Syncs of gathered frames before a lane gets a ring. Most lanes never reach it, and creating a ring takes 30 ms."""


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """Settings of one lane."""

    segment_bytes: int = SEGMENT_BYTES
    segment_age_ms: int = SEGMENT_AGE_MS
    read_files_max: int = READ_FILES_MAX
    ring_bytes: int = RING_BYTES
    """0 disables the ring."""
    ring_after: int = RING_AFTER
    moved_bytes_min: int = MOVED_BYTES_MIN
