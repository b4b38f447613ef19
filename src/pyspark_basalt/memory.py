"""Memory of a worker process, kept between batches instead of given back.

A task makes and drops a few megabytes for every batch. The C library gives freed memory at the top of its heap back to
the kernel and asks for it again, page by page, zeroed: that took a third of a reading task's time. So a process that
reads is told to keep some. Where there is no such setting (not glibc), nothing happens.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Final

KEPT_BYTES_MAX: Final = 64 << 20
"""Freed memory a process keeps: what a few batches are made of."""

LARGE_BYTES: Final = 32 << 20
"""From this size on memory is asked of the kernel for each use: the most glibc allows, and more than a batch has."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


@lru_cache(maxsize=1)
def keep_freed() -> bool:
    """Set it for this process, once; whether it could be."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX) and mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
