"""Sets glibc's malloc to keep freed memory between batches.

A task allocates and frees a few megabytes per batch. By default glibc returns free memory at the top of the heap to the
kernel, and later faults it in again page by page. That took a third of the time of a reading task. Without glibc this
has no effect.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Final

KEPT_BYTES_MAX: Final = 64 << 20
"""Free memory that a process keeps: a few batches."""

LARGE_BYTES: Final = 32 << 20
"""Allocations from this size use mmap. It is glibc's maximum, and larger than a batch."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


@lru_cache(maxsize=1)
def keep_freed() -> bool:
    """Apply the setting once per process. Return whether it succeeded."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX) and mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
