"""COMMITTED: a small file that publishes the durable end of a lane to other processes.

     0       4       8       16                24
     | magic | crc   | epoch | synced position |
     | u32   | u32   | u64   | u64             |      little-endian; the CRC32C covers epoch and position

Everything below the synced position survives a power loss. The written end needs no record: a frame that is complete in
its file is written. Each process that opens the lane for writing increases the epoch, so that a reader can detect that
recovery may have truncated the lane.

After a write or sync error the file gets a different magic: data beyond the position is in doubt. It may be visible in
the page cache without ever reaching the disk, and a later sync reports no error. So the next writer writes that data
again before it counts as durable.

The file is updated in place after each sync and is never synced itself. After a crash its position is correct or too
low. Before a lane is truncated the position is lowered, so it is never too high. A reader that races with an update
sees a wrong checksum and retries. If the file is missing or damaged, the writer's next sync creates it again; until
then a reader must sync the data that it shows (see `lane_view`).
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import google_crc32c

from basaltmq.log.ends import LaneEnd

NAME: Final = "COMMITTED"

MAGIC: Final = 0x4D435342
"""The bytes "BSCM"."""

DOUBTED: Final = 0x54445342
"""The bytes "BSDT". No one-byte change turns one magic into the other."""

READ_ATTEMPTS: Final = 5
"""An update takes 1 us, so this many wrong checksums in a row are damage."""

_ROW: Final = Struct("<IIQQ")
_FRONT: Final = Struct("<II")
_COVERED: Final = Struct("<QQ")


class Mark(NamedTuple):
    """The content of COMMITTED."""

    epoch: int
    synced_position: int
    is_doubted: bool = False
    """Whether data beyond the position may never reach the disk."""


def encode_mark(mark: Mark) -> bytes:
    covered = _COVERED.pack(mark.epoch, mark.synced_position)
    return _FRONT.pack(DOUBTED if mark.is_doubted else MAGIC, google_crc32c.value(covered)) + covered


def decode_mark(raw: bytes) -> Mark | None:
    """Return the mark, None if it is not valid."""
    if len(raw) != _ROW.size:
        return None
    magic, crc, epoch, position = _ROW.unpack(raw)
    if magic not in (MAGIC, DOUBTED) or crc != google_crc32c.value(raw[8:]):
        return None
    return Mark(epoch, position, magic == DOUBTED)


def read_mark(lane: Path) -> Mark | None:
    """Return the writer's mark of a lane, None if it is missing or unreadable."""
    for _ in range(READ_ATTEMPTS):
        try:
            with open(lane / NAME, "rb") as file:
                raw = file.read(_ROW.size + 1)
        except OSError:
            return None
        mark = decode_mark(raw)
        if mark is not None:
            return mark
    return None


class Committed:
    """The mark of a lane that is open for writing. Costs 4 us per sync, nothing per append."""

    def __init__(self, lane: Path, now_ms: int, end: int, durable_end: LaneEnd | None = None) -> None:
        self._path = lane / NAME
        before = read_mark(lane)
        self._epoch = now_ms if before is None else max(now_ms, before.epoch + 1)
        self._position: int | None = None
        self._durable_end = durable_end
        self.found_position = max(
            0 if before is None else before.synced_position, 0 if durable_end is None else durable_end.found
        )
        """The durable end when the last writer stopped, even if the lane is shorter now."""
        self.doubted_from: int | None = None
        """Start of the data that must be written again, None if a sync is enough."""
        if before is not None and before.is_doubted:
            self.doubted_from = min(before.synced_position, end)
        self._lock = threading.Lock()
        """Protects the file, because `doubt` may run on any thread, also beside `publish` and `close`."""
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if before is not None:
            try:
                self._write(min(before.synced_position, end))
            except OSError:
                os.close(self._fd)
                raise

    def note(self, position: int) -> None:
        """Record the durable end in ENDS, before the waiters are notified. It may be in the ring only."""
        if self._durable_end is not None:
            self._durable_end.note(position)

    def publish(self, position: int) -> None:
        """Publish that the lane is durable up to `position`. A failure is harmless: readers see a lower position."""
        with self._lock:
            if self.doubted_from is None:
                with suppress(OSError):
                    self._write(position)

    def doubt(self, position: int) -> None:
        """Record that a write or a sync failed. `position` is the durable end if nothing has been published."""
        with self._lock:
            if self._fd < 0 or self.doubted_from is not None:
                return
            self.doubted_from = position if self._position is None else self._position
            with suppress(OSError):
                self._write(self.doubted_from)

    def clear_doubt(self) -> None:
        """Record that the data in doubt has been written again and synced."""
        self.doubted_from = None

    def lower(self, position: int) -> None:
        """Lower the position before the lane is truncated. It must not fail, or the file would claim too much."""
        if self._position is not None and self._position > position:
            try:
                self._write(position)
            except OSError:
                self._path.unlink()

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1

    def _write(self, position: int) -> None:
        os.pwrite(self._fd, encode_mark(Mark(self._epoch, position, self.doubted_from is not None)), 0)
        self._position = position
