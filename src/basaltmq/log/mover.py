"""Writes gathered frames to their segment while the ring makes them durable.

A large group of frames is copied twice: to the ring and to the page cache of its segment. The second copy needs neither
the GIL nor the thread that waits for the disk, so another thread makes it in parallel.

A drain of the ring with 16 MiB to write would block the disk for the ring for 10 ms. So the kernel starts write-back
after the ring's sync (`start_write_back`), while the disk is idle and the writers prepare the next group. It covers at
least 1 MiB per call, because a call takes 60 to 100 us for any size and disturbs the writers. Write-back during a sync
makes the sync 50 % longer. Three alternatives were tried and were not faster: a ring with O_DIRECT; a move that starts
when the ring's copy is made; a thread that starts the write-back as soon as the ring's pages are written.

Between `begin` and `end`, frames are neither gathered nor in their segment; threads that need them there must wait.
`lane` decides when to move what, and handles failures.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Final

MOVED_BYTES_MIN: Final = 64 << 10
"""Minimum size of a move in another thread: below it, waking the thread takes longer than the copy."""

WRITE_BACK_BYTES: Final = 1 << 20
"""`sync_file_range` chunk size. Per-group calls cost 4 to 20 % with 16 writers; larger chunks delay the next sync."""

SYNC_FILE_RANGE_WRITE: Final = 2


class Mover:
    """Runs one move at a time. The thread starts with the first move."""

    def __init__(self) -> None:
        self.is_busy = False
        self._busy = threading.Lock()
        self._work: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        # Held while there is no work.
        self._idle = threading.Lock()
        self._idle.acquire()

    def begin(self) -> None:
        """Mark a move as started. The caller holds the lane's lock and has waited for the previous move."""
        self._busy.acquire()
        self.is_busy = True

    def end(self) -> None:
        """Mark the move as finished or failed."""
        self.is_busy = False
        self._busy.release()

    def wait(self) -> None:
        """Wait until the current move has ended."""
        with self._busy:
            pass

    def run(self, work: Callable[[], None]) -> None:
        """Run the started move in the thread, which ends it. `work` must not raise."""
        self._work = work
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="basalt-move", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No thread is available, so run it here. It only takes longer.
                self._move(work)
                return
            self._thread = thread
        self._idle.release()

    def close(self) -> None:
        """End the thread. No move may be running or follow."""
        if self._thread is not None:
            self._work = None
            self._idle.release()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            self._idle.acquire()
            work = self._work
            if work is None:
                return
            self._move(work)

    def _move(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self.end()


def start_write_back(fd: int, begin: int, size_bytes: int) -> None:
    """Make the kernel start to write a part of a file to disk, without waiting. Guarantees nothing."""
    call = _sync_file_range()
    if call is not None:
        call(fd, begin, size_bytes, SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=1)
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's `sync_file_range`, which releases the GIL; None elsewhere."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    return call
