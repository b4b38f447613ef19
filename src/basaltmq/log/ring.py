"""RING: a file of fixed size in which frames are durable before their segment is.

A sync of a growing file has the file system's journal written too: where blocks lie, how long the file is. A sync of
bytes written over others needs none of that and takes half the time or less. So frames that writers wait for are
written here, over zeros or over frames that are durable in their segment since; the segment gets them right after the
writers were told, and is synced in the background before their place here is used again.

    slots of 4096 bytes; an entry begins with one

     0       4       8          16        24       28      32
     | magic | crc   | position | segment | bytes  | 0 u32 | whole frames, `bytes` of them ...
     | u32   | u32   | u64      | u64     | u32    |       |

All little-endian. The CRC32C covers what follows it up to the frames and begins with the lane's seed; the frames have
checksums of their own; `segment` is where the segment that they lie in begins. No two entries share a slot, so a write
that is torn damages only what nobody was promised.

After a crash `replay` puts every entry that is whole where it belongs. That is right for old ones too: a position is
given out once while a ring lives, so what an entry says about it is what the segment must say. It is written even where
the segment reads so already: after a sync that failed, the page cache shows what the disk may never have got, and
another sync would find nothing to do.

A write that is torn may leave the head of an old entry before frames of a later one, or the other way round, and where
their bodies are the same, each frame still matches its checksum. So offsets of a shard have to rise within an entry,
and one whose place in its segment holds other whole frames is passed over: an entry is written over only when its own
are durable there.

The ring is removed when a lane is opened, after its frames are durable in their segments and before anything is
appended, and at a clean close. An entry that is damaged is a loss only if its segment lost the frames too, and is found
there like any other.

An entry is written and synced by one call (RWF_DSYNC): between two, another thread may take the interpreter's lock.
Where there is no such call, it is a write and a sync. Tried and dropped, because it was no faster: past the page cache
(O_DIRECT), from a buffer that is gathered first.

Not here: when to write where (`lane`). Budget: 3 us per entry around the write.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.log.frame import HEADER_BYTES, check_body, decode_header
from basaltmq.log.segment import Segment
from basaltmq.store.directory import sync_directory

NAME: Final = "RING"
DRAFT: Final = "RING.new"
"""While it is filled with zeros."""

MAGIC: Final = 0x47525342
"""The bytes "BSRG"."""

SLOT_BYTES: Final = 4096
"""What disks and page caches write at least."""

_HEAD: Final = Struct("<IIQQII")
_COVERED: Final = Struct("<QQII")
_ZEROS_BYTES: Final = 1 << 20
_PARTS_MAX: Final = 1000
"""Buffers of one write, with room for the head below what Linux takes."""

_extend = google_crc32c.extend


class Ring:
    """The writer's side. One thread at a time appends; `release` may come from another."""

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._fd = fd
        self._flags: int = getattr(os, "RWF_DSYNC", 0)
        """What makes a write durable when it returns; 0 where a sync has to follow."""
        self._at = 0
        self.taken = 0
        """Bytes ever taken, those left over at the end of the file included."""
        self._released = 0

    @classmethod
    def create(cls, lane: Path, size_bytes: int) -> Ring:
        """A ring on disk, of blocks that have been written. OSError if there is no room for it."""
        size_bytes -= size_bytes % SLOT_BYTES
        draft = lane / DRAFT
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            left = size_bytes
            while left:
                left -= os.write(fd, bytes(min(left, _ZEROS_BYTES)))
            os.fdatasync(fd)
            os.rename(draft, lane / NAME)
            sync_directory(lane)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(draft)
            raise
        ring = cls(lane / NAME, fd, size_bytes)
        try:
            # Zeros where there are zeros.
            os.pwritev(fd, [bytes(SLOT_BYTES)], 0, ring._flags)
        except OSError:
            ring._flags = 0
        return ring

    @property
    def used_bytes(self) -> int:
        """Taken and not yet released."""
        return self.taken - self._released

    def append(self, seed: int, position: int, segment: int, parts: Sequence[bytes], size_bytes: int) -> bool:
        """Write frames that lie at `position`, in the segment that begins at `segment`; False if there is no room.

        They are durable on return.
        """
        needed = -(-(_HEAD.size + size_bytes) // SLOT_BYTES) * SLOT_BYTES
        at = self._at
        skipped = 0
        if at + needed > self.size_bytes:
            skipped, at = self.size_bytes - at, 0
        if self.used_bytes + skipped + needed > self.size_bytes:
            return False
        if len(parts) > _PARTS_MAX:
            parts = (b"".join(parts),)
        parts = (_encode_head(seed, position, segment, size_bytes), *parts)
        written = os.pwritev(self._fd, parts, at, self._flags)
        is_whole = written == _HEAD.size + size_bytes
        if not is_whole:
            _write_on(self._fd, b"".join(parts), written, at)
        if not is_whole or not self._flags:
            os.fdatasync(self._fd)
        self._at = at + needed
        self.taken += skipped + needed
        return True

    def release(self, taken: int) -> None:
        """What was taken up to here is durable in its segment."""
        self._released = max(self._released, taken)

    def close(self) -> None:
        os.close(self._fd)


def replay(lane: Path, seed: int, segments: Sequence[Segment]) -> int:
    """Put frames that only the ring holds into their segments and make them durable there; how many entries it took.

    `segments` in order; their sizes grow where frames are added.
    """
    try:
        raw = (lane / NAME).read_bytes()
    except FileNotFoundError:
        return 0
    known = {segment.start: segment for segment in segments}
    restored = 0
    concerned: dict[int, Segment] = {}
    for position, start, begin, size_bytes in _entries(seed, raw):
        segment = known.get(start)
        if segment is None:
            # It was cleaned away.
            continue
        at = position - start
        if _restore(seed, segment, at, raw[begin : begin + size_bytes]):
            segment.size_bytes = max(segment.size_bytes, at + size_bytes)
            restored += 1
        concerned[segment.start] = segment
    for segment in concerned.values():
        with open(segment.path, "rb") as file:
            os.fdatasync(file.fileno())
    return restored


def reach(lane: Path, seed: int) -> int:
    """The position behind the last frame that the ring holds; 0 if there is no ring."""
    try:
        raw = (lane / NAME).read_bytes()
    except FileNotFoundError:
        return 0
    return max((position + size_bytes for position, _, _, size_bytes in _entries(seed, raw)), default=0)


def remove(lane: Path) -> None:
    """Take the ring away. Everything in it must be durable elsewhere."""
    for name in (NAME, DRAFT):
        with suppress(FileNotFoundError):
            os.unlink(lane / name)


def _encode_head(seed: int, position: int, segment: int, size_bytes: int) -> bytes:
    covered = _COVERED.pack(position, segment, size_bytes, 0)
    return _HEAD.pack(MAGIC, _extend(seed, covered), position, segment, size_bytes, 0)


def _decode_head(seed: int, raw: bytes, at: int) -> tuple[int, int, int] | None:
    """(position, where its segment begins, bytes of frames) of the entry at `at`; None if none begins there."""
    magic, crc, position, segment, size_bytes, zero = _HEAD.unpack_from(raw, at)
    if magic != MAGIC or zero or crc != _extend(seed, raw[at + 8 : at + _HEAD.size]):
        return None
    if at + _HEAD.size + size_bytes > len(raw):
        return None
    return position, segment, size_bytes


def _entries(seed: int, raw: bytes) -> list[tuple[int, int, int, int]]:
    """(position, its segment, where its frames begin, their bytes) of every whole entry, by position."""
    found = []
    for at in range(0, len(raw) - SLOT_BYTES + 1, SLOT_BYTES):
        head = _decode_head(seed, raw, at)
        if head is not None and _is_whole(seed, raw, at + _HEAD.size, head[2]):
            found.append((head[0], head[1], at + _HEAD.size, head[2]))
    return sorted(found)


def _is_whole(seed: int, raw: bytes, at: int, size_bytes: int) -> bool:
    """Are these bytes intact frames from the first to the last, of rising offsets in each shard?"""
    end = at + size_bytes
    following: dict[int, int] = {}
    try:
        while at < end:
            header = decode_header(seed, raw, at)
            if header.base_offset < following.get(header.shard, 0):
                return False
            following[header.shard] = header.last_offset + 1
            body = at + HEADER_BYTES
            check_body(header, raw[body : body + header.body_bytes])
            at += header.size_bytes
    except CorruptionError:
        return False
    return at == end


def _restore(seed: int, segment: Segment, at: int, frames: bytes) -> bool:
    """Write frames into their segment, for the next sync; False if it read so already, or holds others there."""
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        held = os.pread(fd, len(frames), at)
        if held != frames and len(held) == len(frames) and _is_whole(seed, held, 0, len(held)):
            return False
        _write_on(fd, frames, 0, at)
    finally:
        os.close(fd)
    return held != frames


def _write_on(fd: int, data: bytes, written: int, at: int) -> None:
    """Write all of `data` at a place, of which some is written."""
    rest = memoryview(data)[written:]
    at += written
    while rest:
        written = os.pwrite(fd, rest, at)
        rest = rest[written:]
        at += written
