"""RING: a file of fixed size that makes frames durable before their segment is synced.

A sync of a growing file also writes the file system's journal (block allocation, file length). A sync of overwritten
bytes does not, and takes half the time or less. So frames with waiting writers go here, over zeros or over frames that
are already durable in their segment. The segment gets them right after the writers are notified. It is synced in the
background before their space here is reused.

    slots of 4096 bytes; an entry starts at a slot

     0       4       8          16        24       28      32
     | magic | crc   | position | segment | bytes  | 0 u32 | complete frames, `bytes` long ...
     | u32   | u32   | u64      | u64     | u32    |       |

All fields are little-endian. The CRC32C covers the fields after it, up to the frames, and starts with the lane's seed.
The frames have their own checksums. `segment` is the start position of the frames' segment. No two entries share a
slot, so a torn write damages only unconfirmed data.

After a crash `replay` writes every valid entry to its place in the segment. That is correct for old entries too: a
position is assigned only once during the life of a ring, so an entry and its segment must agree. `replay` writes even
if the segment already reads the same. After a failed sync, the page cache may show data that never reached the disk,
and another sync would do nothing.

A torn write may combine the head of an old entry with frames of a later one, or vice versa. If their bodies are equal,
each frame still matches its checksum. So offsets of a shard must rise within an entry. An entry is skipped if its place
in the segment holds other valid frames, because an entry is overwritten only when its frames are durable there.

The ring is removed when a lane is opened, after its frames are durable in their segments and before the first append,
and at a clean close. A damaged entry is a loss only if the segment lost the frames too, and recovery finds that there.

One call writes and syncs an entry (RWF_DSYNC); between two calls another thread could take the GIL. Without RWF_DSYNC
it is a write and a sync. O_DIRECT with a buffer that collects the parts was tried and was not faster.

`lane` decides when to use the ring. An entry costs 3 us in addition to the write.
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
from basaltmq.log.segment import Segment, create_segment
from basaltmq.store.directory import sync_directory

NAME: Final = "RING"
DRAFT: Final = "RING.new"
"""The name while the file is filled with zeros."""

MAGIC: Final = 0x47525342
"""The bytes "BSRG"."""

SLOT_BYTES: Final = 4096
"""The smallest unit that disks and page caches write."""

_HEAD: Final = Struct("<IIQQII")
_COVERED: Final = Struct("<QQII")
_ZEROS_BYTES: Final = 1 << 20
_PARTS_MAX: Final = 1000
"""Buffers per write: with the head it stays below the limit of Linux."""

_extend = google_crc32c.extend


class Ring:
    """The writer's side. One thread at a time appends; another may call `release`."""

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._fd = fd
        self._flags: int = getattr(os, "RWF_DSYNC", 0)
        """RWF_DSYNC, or 0 where a separate sync must follow the write."""
        self._at = 0
        self.taken = 0
        """Total bytes used so far, including the unused rest at the end of the file."""
        self._released = 0

    @classmethod
    def create(cls, lane: Path, size_bytes: int) -> Ring:
        """Create a ring on disk with written blocks. Raises OSError if there is no space."""
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
            # Overwrite zeros with zeros, to test the flag.
            os.pwritev(fd, [bytes(SLOT_BYTES)], 0, ring._flags)
        except OSError:
            ring._flags = 0
        return ring

    @property
    def used_bytes(self) -> int:
        """Bytes used and not yet released."""
        return self.taken - self._released

    def append(self, seed: int, position: int, segment: int, parts: Sequence[bytes], size_bytes: int) -> bool:
        """Write frames durably that belong at `position`, in the segment starting at `segment`. False without room."""
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
        """Record that everything up to `taken` is durable in its segment."""
        self._released = max(self._released, taken)

    def close(self) -> None:
        os.close(self._fd)


def replay(lane: Path, seed: int, segments: list[Segment], now_ms: int) -> int:
    """Write the ring's frames to their segments, durably. Return the number of entries that changed a segment.

    `segments` are in order. Their sizes grow where frames are added. A missing last segment is created again.
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
        if segment is None and segments and start < segments[-1].start:
            # Cleaning has deleted the segment.
            continue
        if segment is None:
            # Cleaning never deletes the last segment, so its file is lost.
            segment = known[start] = create_segment(lane, start, now_ms)
            segments.append(segment)
        at = position - start
        if _restore(seed, segment, at, raw[begin : begin + size_bytes]):
            segment.size_bytes = max(segment.size_bytes, at + size_bytes)
            restored += 1
        concerned[segment.start] = segment
    for segment in concerned.values():
        with open(segment.path, "rb") as file:
            os.fdatasync(file.fileno())
    return restored


def gaps(lane: Path, seed: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the byte ranges between two positions that the ring does not hold."""
    try:
        raw = (lane / NAME).read_bytes()
    except FileNotFoundError:
        raw = b""
    found = []
    for position, _, _, size_bytes in _entries(seed, raw):
        if begin < min(position, end):
            found.append((begin, min(position, end)))
        begin = max(begin, position + size_bytes)
    return [*found, (begin, end)] if begin < end else found


def remove(lane: Path) -> None:
    """Remove the ring. All of its content must be durable elsewhere."""
    for name in (NAME, DRAFT):
        with suppress(FileNotFoundError):
            os.unlink(lane / name)


def _encode_head(seed: int, position: int, segment: int, size_bytes: int) -> bytes:
    covered = _COVERED.pack(position, segment, size_bytes, 0)
    return _HEAD.pack(MAGIC, _extend(seed, covered), position, segment, size_bytes, 0)


def _decode_head(seed: int, raw: bytes, at: int) -> tuple[int, int, int] | None:
    """Return (position, segment start, bytes of frames) of the entry at `at`, None if there is no entry."""
    magic, crc, position, segment, size_bytes, zero = _HEAD.unpack_from(raw, at)
    if magic != MAGIC or zero or crc != _extend(seed, raw[at + 8 : at + _HEAD.size]):
        return None
    if at + _HEAD.size + size_bytes > len(raw):
        return None
    return position, segment, size_bytes


def _entries(seed: int, raw: bytes) -> list[tuple[int, int, int, int]]:
    """Return (position, segment start, start of the frames, their bytes) of every valid entry, by position."""
    found = []
    for at in range(0, len(raw) - SLOT_BYTES + 1, SLOT_BYTES):
        head = _decode_head(seed, raw, at)
        if head is not None and _is_whole(seed, raw, at + _HEAD.size, head[2]):
            found.append((head[0], head[1], at + _HEAD.size, head[2]))
    return sorted(found)


def _is_whole(seed: int, raw: bytes, at: int, size_bytes: int) -> bool:
    """Whether these bytes are intact frames throughout, with rising offsets in each shard."""
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
    """Write frames into their segment, without a sync. Return False if they were there already, or if others are."""
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
    """Write the rest of `data` at `at`, of which `written` bytes are written."""
    rest = memoryview(data)[written:]
    at += written
    while rest:
        written = os.pwrite(fd, rest, at)
        rest = rest[written:]
        at += written
