"""COMMITTED: a small file in which the writer of a lane tells other processes how far the lane is durable.

     0       4       8       16                24
     | magic | crc   | epoch | synced position |
     | u32   | u32   | u64   | u64             |      little-endian; the CRC32C covers what follows it

Everything below the synced position survives a power loss. How far the lane is written needs no telling: a frame that
is whole in its file is. The epoch rises with each process that opens the lane for writing, so that a reader knows that
recovery may have cut the lane back under it.

After an error of a write or a sync the magic is another one: what lies beyond the position is in doubt. The page cache
may show it, the disk may never get it, and a later sync has nothing to say about it; so the next writer writes it again
before anything of it counts as durable.

The file is written after each sync, in place and never synced itself: after a crash it says the truth or less. Where a
lane is cut back the position is lowered first, so it never says more either. A reader that meets a write half done sees
a wrong checksum and looks again. Missing or damaged, it says nothing: the next sync of a writer makes it again, and
until then a reader has to make durable what it shows (see `lane_view`).
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import google_crc32c

NAME: Final = "COMMITTED"

MAGIC: Final = 0x4D435342
"""The bytes "BSCM"."""

DOUBTED: Final = 0x54445342
"""The bytes "BSDT"; no change of one byte makes one of the two of the other."""

READ_ATTEMPTS: Final = 5
"""A write takes a microsecond; so many wrong checksums in a row are damage."""

_ROW: Final = Struct("<IIQQ")
_FRONT: Final = Struct("<II")
_COVERED: Final = Struct("<QQ")


class Mark(NamedTuple):
    """What COMMITTED says."""

    epoch: int
    synced_position: int
    is_doubted: bool = False
    """Whether what lies beyond it may be in the page cache only, for good."""


def encode_mark(mark: Mark) -> bytes:
    covered = _COVERED.pack(mark.epoch, mark.synced_position)
    return _FRONT.pack(DOUBTED if mark.is_doubted else MAGIC, google_crc32c.value(covered)) + covered


def decode_mark(raw: bytes) -> Mark | None:
    """None if it is not what was written."""
    if len(raw) != _ROW.size:
        return None
    magic, crc, epoch, position = _ROW.unpack(raw)
    if magic not in (MAGIC, DOUBTED) or crc != google_crc32c.value(raw[8:]):
        return None
    return Mark(epoch, position, magic == DOUBTED)


def read_mark(lane: Path) -> Mark | None:
    """What the writer of a lane says; None where it has said nothing, or nothing that can be read."""
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
    """The writer's side, for one opening of a lane. Budget: 4 us per sync, nothing per append."""

    def __init__(self, lane: Path, now_ms: int, end: int) -> None:
        self._path = lane / NAME
        before = read_mark(lane)
        self._epoch = now_ms if before is None else max(now_ms, before.epoch + 1)
        self._position: int | None = None
        self.doubted_from: int | None = None
        """Where bytes begin that have to be written again; None if a sync is all they need."""
        if before is not None and before.is_doubted:
            self.doubted_from = min(before.synced_position, end)
        self._lock = threading.Lock()
        """`doubt` may come from any thread: never after the file is closed, never overwritten by `publish`."""
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if before is not None:
            try:
                self._write(min(before.synced_position, end))
            except OSError:
                os.close(self._fd)
                raise

    def publish(self, position: int) -> None:
        """The lane is durable up to here. A failure is nobody's loss: readers see less, which is true."""
        with self._lock:
            if self.doubted_from is None:
                with suppress(OSError):
                    self._write(position)

    def doubt(self, position: int) -> None:
        """A write or a sync has failed. `position` is what is durable in case nothing has been published."""
        with self._lock:
            if self._fd < 0 or self.doubted_from is not None:
                return
            self.doubted_from = position if self._position is None else self._position
            with suppress(OSError):
                self._write(self.doubted_from)

    def believe(self) -> None:
        """What was in doubt has been written again, and synced."""
        self.doubted_from = None

    def lower(self, position: int) -> None:
        """The lane is about to be cut back to here. This must not fail: the file would say too much."""
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
