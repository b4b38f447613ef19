"""Reads a lane in order, for start, rebuild and verification, and handles damage.

`scan` yields every intact frame from a position on and describes the bytes between them. Checksums contain the damage:

- The header is intact, the body is not: shard and offsets are known, and the next frame starts where the header says.
- The header is damaged: the next frame is searched at multiples of 8. The seed in the header's checksum prevents that
  record content is mistaken for a frame. The likely content of the header is reported as a guess. The actual loss is
  the gap before the shard's next frame.
- No intact frame follows: a torn tail, left by a crash. `repair` moves it to quarantine, so that appends continue after
  the last intact frame.

Damage in the middle stays in place, because removing it would shift positions. Unknown files go to quarantine.

Memory is bounded by CHUNK_BYTES and the largest frame. A frame costs about 6 us in addition to reading and checksums,
including a copy of its body; 1 us if `take` handles it in bulk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.log import committed, ring
from basaltmq.log.frame import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAGIC_BYTES,
    Header,
    HeaderFields,
    check_body,
    claimed_header,
    decode_header,
)
from basaltmq.log.lane import Lane
from basaltmq.log.marker import MARKERS
from basaltmq.log.run import Cut
from basaltmq.log.segment import Segment, parse_segment_name
from basaltmq.log.window import CHUNK_BYTES, Window
from basaltmq.store.directory import unused_name

_crc32c = google_crc32c.value
_extend = google_crc32c.extend

Take: TypeAlias = Callable[[bytes, int, int, int], int]
"""Handles frames in bulk. Its arguments are bytes, the start of a frame in them, the end of the frames of interest, and
the position of the start in the lane. It returns the bytes of intact frames that it handled; 0 leaves the first frame
to the caller. See `intact`."""


class Found(NamedTuple):
    """An intact frame."""

    position: int
    header: Header
    body: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that are not intact frames."""

    path: Path
    begin: int
    """Offset in the file."""
    end: int
    position: int
    """Position of `begin` in the lane."""
    reason: str
    shard: int | None = None
    base_offset: int | None = None
    last_offset: int | None = None
    certain: bool = False
    """Whether shard and offsets come from a header that matches its checksum."""

    def __str__(self) -> str:
        where = f"{self.path} bytes {self.begin} to {self.end}: {self.reason}"
        if self.shard is None:
            return where
        likely = "lost" if self.certain else "probably lost"
        return f"{where}; {likely}: shard {self.shard}, offsets {self.base_offset} to {self.last_offset}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Offsets of a shard that are missing between two existing frames, or at its end."""

    shard: int
    first_offset: int
    last_offset: int
    certain: bool = True
    """False if only the shard's ceiling shows the offsets: not all of them need to have been assigned."""

    def __str__(self) -> str:
        lost = "has lost" if self.certain else "may have lost"
        return f"shard {self.shard} {lost} offsets {self.first_offset} to {self.last_offset}"


@dataclass(frozen=True, slots=True)
class LostTail:
    """Durable bytes missing at the end of a lane, because a segment was removed or truncated."""

    lane: Path
    end: int
    synced_position: int

    def __str__(self) -> str:
        return (
            f"{self.lane} ends at byte {self.end}, but was durable up to byte {self.synced_position}: confirmed "
            "records are lost. Restore its last segments from a backup"
        )


@dataclass(frozen=True, slots=True)
class LostBytes:
    """Durable bytes missing inside a lane, because a segment was removed or truncated."""

    lane: Path
    begin: int
    end: int

    def __str__(self) -> str:
        return (
            f"{self.lane} lacks the bytes {self.begin} to {self.end}, which were durable: confirmed records are lost. "
            "Restore its segments from a backup"
        )


@dataclass(frozen=True, slots=True)
class Repaired:
    """The result of `repair`."""

    damages: list[Damage]
    """Damaged byte ranges, including the torn tail."""
    cut: Path | None
    """The quarantine file with the torn tail."""
    quarantined: list[Path]
    """Files that do not belong to a lane."""


def scan(
    lane: Lane,
    position: int,
    damages: list[Damage] | None = None,
    end: int | None = None,
    take: Take | None = None,
) -> Iterator[Found]:
    """Yield every intact frame at or after `position` (the start of a frame) and before `end`, in lane order.

    Frames that `take` handles are not yielded.
    """
    for segment in lane.segments():
        if segment.end > position and (end is None or segment.start < end):
            yield from _scan_segment(lane, segment, max(0, position - segment.start), damages, end, take)


def intact(seed: int, raw: bytes, at: int, stop: int, cut: Cut | None) -> Iterator[tuple[int, HeaderFields]]:
    """Yield start and header fields of each intact frame from `at` to `stop`, up to the first that is not intact."""
    size = len(raw)
    while at < stop:
        begin = at + HEADER_BYTES
        if begin > size:
            return
        fields = HEADER.unpack_from(raw, at)
        length = fields[3]
        end = begin + length + (-length & 7)
        if fields[0] != MAGIC or end > size or fields[1] != _extend(seed, raw[at + 8 : begin]):
            return
        if fields[13] or fields[14]:
            return
        if fields[2] != _crc32c(raw[begin : begin + length] if cut is None else cut(begin, length)):
            return
        yield at, fields
        at = end


def repair(
    lane: Lane,
    position: int,
    quarantine: Path,
    visit: Callable[[Found], None] | None = None,
    take: Take | None = None,
) -> Repaired:
    """Visit every intact frame from `position` on. Then truncate a torn tail and quarantine unknown files."""
    damages: list[Damage] = []
    intact_end = min(max(position, lane.start), lane.end)

    def take_some(raw: bytes, at: int, stop: int, begin: int) -> int:
        nonlocal intact_end
        taken = 0 if take is None else take(raw, at, stop, begin)
        if taken:
            intact_end = begin + taken
        return taken

    for found in scan(lane, position, damages, take=None if take is None else take_some):
        intact_end = found.position + found.header.size_bytes
        if visit is not None:
            visit(found)
    cut = None
    active = lane.segments()[-1]
    if intact_end < lane.end:
        cut = lane.cut(max(intact_end, active.start), quarantine)
    return Repaired(damages, cut, quarantine_foreign(lane.path, quarantine))


def quarantine_foreign(path: Path, quarantine: Path) -> list[Path]:
    """Move every file except segments, markers, COMMITTED and the ring out of a lane's directory."""
    moved = []
    for entry in sorted(os.scandir(path), key=lambda each: each.name):
        if parse_segment_name(entry.name) is None and entry.name not in (*MARKERS, committed.NAME, ring.NAME):
            quarantine.mkdir(parents=True, exist_ok=True)
            target = unused_name(quarantine / f"{path.name}-{entry.name}")
            os.rename(entry.path, target)
            moved.append(target)
    return moved


def _scan_segment(
    lane: Lane, segment: Segment, begin: int, damages: list[Damage] | None, end: int | None, take: Take | None
) -> Iterator[Found]:
    seed = lane.seed
    size = segment.size_bytes if end is None else min(segment.size_bytes, end - segment.start)
    window = Window(lane, segment, CHUNK_BYTES)
    at = begin
    while at < size:
        window.cover(at, HEADER_BYTES)
        raw, base = window.raw, window.base
        if take is not None:
            taken = take(raw, at - base, size - base, segment.start + at)
            if taken:
                at += taken
                continue
        try:
            header = decode_header(seed, raw, at - base)
            frame_end = at + header.size_bytes
            if frame_end > segment.size_bytes:
                raise _TornError(header, f"the frame ends {frame_end - segment.size_bytes} bytes after the file")
            if frame_end - base > len(raw):
                window.cover(at, header.size_bytes)
                raw, base = window.raw, window.base
            body_at = at - base + HEADER_BYTES
            body = raw[body_at : body_at + header.body_bytes]
            try:
                check_body(header, body)
            except CorruptionError:
                raise _TornError(header, "the body does not match its checksum", frame_end) from None
        except CorruptionError as error:
            following, damage = _past_damage(lane, segment, window, at, size, error)
            if damages is not None:
                damages.append(damage)
            at = following
            continue
        yield Found(segment.start + at, header, body)
        at = frame_end


class _TornError(CorruptionError):
    """A damaged frame with an intact header."""

    def __init__(self, header: Header, reason: str, following: int | None = None) -> None:
        super().__init__(reason)
        self.header = header
        self.following = following


def _past_damage(
    lane: Lane, segment: Segment, window: Window, at: int, size: int, error: CorruptionError
) -> tuple[int, Damage]:
    """Return where to continue after damage at `at`, and its description."""
    header: Header | None
    if isinstance(error, _TornError):
        header = error.header
        following = error.following
        if following is None or (following < size and not _frame_at(lane, segment, following)):
            following = _next_frame(lane, segment, at + 8, size)
        certain = True
    else:
        claimed_bytes = _claimed_bytes(window, at)
        if claimed_bytes is not None:
            window.cover(at, HEADER_BYTES + claimed_bytes)
        header = claimed_header(lane.seed, window.raw, at - window.base)
        following = _next_frame(lane, segment, at + 8, size)
        certain = False
    damage = Damage(segment.path, at, following, segment.start + at, str(error))
    if header is not None:
        first, last = header.base_offset, header.last_offset
        damage = replace(damage, shard=header.shard, base_offset=first, last_offset=last, certain=certain)
    return following, damage


def _claimed_bytes(window: Window, at: int) -> int | None:
    """Return the body length in a damaged header, if the segment has that many bytes."""
    raw = window.raw[at - window.base : at - window.base + 16]
    if len(raw) < 16:
        return None
    claimed = int.from_bytes(raw[12:16], "little")
    return claimed if at + HEADER_BYTES + claimed <= window.segment.size_bytes else None


def _frame_at(lane: Lane, segment: Segment, at: int) -> bool:
    """Whether an intact header is at `at`."""
    try:
        decode_header(lane.seed, lane.read(segment.start + at, HEADER_BYTES))
    except CorruptionError:
        return False
    return True


def _next_frame(lane: Lane, segment: Segment, at: int, size: int) -> int:
    """Return the position of the next intact header at or after `at`, or the end."""
    while at < size:
        # Chunks overlap, so that no magic is split between two.
        raw = lane.read(segment.start + at, min(CHUNK_BYTES, size - at))
        found = raw.find(MAGIC_BYTES)
        while found >= 0:
            if (at + found) % 8 == 0 and _frame_at(lane, segment, at + found):
                return at + found
            found = raw.find(MAGIC_BYTES, found + 1)
        if at + len(raw) >= size:
            break
        at += len(raw) - len(MAGIC_BYTES) + 1
    return size
