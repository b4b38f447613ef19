"""RESERVE: a preallocated file that is deleted when the disk is full.

Without it a full disk blocks consumers too, because an acknowledgement is a write. `release` frees the space, so that
stores can be reopened, consumers can drain their queues, and compaction has room to work. `keep` allocates the file
again. The file's blocks are allocated, not only its size, so that no other process can use them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from basaltmq.store.families import MIB

NAME: Final = "RESERVE"

SIZE_BYTES: Final = 64 * MIB
"""Room for the WAL of a million acknowledgements, or for half a write-buffer budget that recovery flushes to disk."""


class Reserve:
    """The reserve file of one data directory. A size of 0 disables it."""

    def __init__(self, directory: Path, size_bytes: int = SIZE_BYTES) -> None:
        self.path = directory / NAME
        self.size_bytes = size_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes that `keep` would allocate."""
        try:
            return max(0, self.size_bytes - self.path.stat().st_size)
        except FileNotFoundError:
            return self.size_bytes

    def keep(self) -> None:
        """Allocate the file. Without room, raise OSError and leave no file."""
        if not self.size_bytes:
            self.release()
            return
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size > self.size_bytes:
                os.ftruncate(fd, self.size_bytes)
            os.posix_fallocate(fd, 0, self.size_bytes)
        except BaseException:
            self.release()
            raise
        finally:
            os.close(fd)

    def release(self) -> bool:
        """Delete the file. Return whether it existed."""
        with suppress(FileNotFoundError):
            self.path.unlink()
            return True
        return False
