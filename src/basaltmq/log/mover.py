"""Writing gathered frames to their segment while the ring makes them durable.

A large group of frames is copied twice: into the ring, and into the page cache of its segment. The second copy needs
neither the interpreter nor the thread that waits for the disk, so another thread makes it meanwhile.

A drain of the ring that finds sixteen megabytes to write keeps the disk from the ring for ten milliseconds. So the disk
is told to begin with what was written once the ring's sync is over (`start_write_back`): it has nothing to do while
the writers make what comes next. It is told of a megabyte at a time, because that takes 60 to 100 us however little it
is, and disturbs the writers. To tell it while a sync runs makes that half as long again. Tried and dropped, because
they were no faster: a ring written past the page cache (O_DIRECT), a move that begins when the ring's copy is made,
another thread that tells the disk as soon as the ring's pages are there.

`begin` and `end` frame the time in which frames are neither gathered nor in their segment; who needs them there waits.
Not here: what may be moved when, and what a failure means (`lane`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Final

MOVED_BYTES_MIN: Final = 64 << 10
"""Frames worth a thread: below, waking it takes longer than the copy."""

WRITE_BACK_BYTES: Final = 1 << 20
"""What the disk is told to begin with at once: told of each group, sixteen writers were 4 to 20 % slower, and of much
more at a time the next sync has to wait.
"""

SYNC_FILE_RANGE_WRITE: Final = 2


class Mover:
    """One move at a time. There is no thread before the first one is given."""

    def __init__(self) -> None:
        self.is_busy = False
        self._busy = threading.Lock()
        self._work: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        # Held while there is nothing to do.
        self._idle = threading.Lock()
        self._idle.acquire()

    def begin(self) -> None:
        """Frames are on their way. Nobody else may begin: the caller holds the lane's lock, and has waited."""
        self._busy.acquire()
        self.is_busy = True

    def end(self) -> None:
        """They have arrived, or never will."""
        self.is_busy = False
        self._busy.release()

    def wait(self) -> None:
        """Return when what was begun has ended."""
        with self._busy:
            pass

    def give(self, work: Callable[[], None]) -> None:
        """Have another thread do what was begun; it ends it. `work` does not raise."""
        self._work = work
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="basalt-move", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No thread to be had: it takes longer, no more.
                self._move(work)
                return
            self._thread = thread
        self._idle.release()

    def close(self) -> None:
        """End the thread. Nothing is under way, and nothing is given any more."""
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
    """Have the kernel begin to write a part of a file to disk, without waiting. Promises nothing."""
    call = _sync_file_range()
    if call is not None:
        call(fd, begin, size_bytes, SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=1)
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's call, which leaves the interpreter's lock to others; None elsewhere."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    return call
