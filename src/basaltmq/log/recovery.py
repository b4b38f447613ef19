"""Reading a lane in order: at start, for a rebuild, for verification; and what to do about damage.

`scan` gives every intact frame from a position on, and names what lies between them. Damage is contained by checksums:

- The header is intact, the body is not: shard and offsets are known, the next frame begins where the header says.
- The header is not intact: the next frame is searched for at multiples of 8. The seed in the header's checksum keeps a
  record's content from being taken for a frame. What the broken header most likely said is reported as a guess; the
  truth shows in the run of offsets, where the next frame of the shard leaves a gap (`OffsetRuns`).
- Nothing intact follows up to the end of the lane: a torn tail, the trace of a crash. `repair` cuts it off into
  quarantine, so that appending goes on behind the last intact frame.

Damage in the middle stays where it is: cutting it out would move positions. Files with foreign names go to quarantine.

Memory is bounded by CHUNK_BYTES and the largest frame. Budget: about 6 us per frame beside reading and checksums, with
a copy of its body; 1 us for those taken in bulk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import google_crc32c

from basaltmq.errors import CorruptionError
from basaltmq.log import committed, ring
from basaltmq.log.batches.run import Cut
from basaltmq.log.frame import (
    COLUMNAR,
    HEADER,
    HEADER_BYTES,
    KAFKA,
    MAGIC,
    MAGIC_BYTES,
    RELOCATED,
    Header,
    HeaderFields,
    check_body,
    claimed_header,
    decode_header,
)
from basaltmq.log.lane import Lane
from basaltmq.log.marker import MARKERS
from basaltmq.log.segment import Segment, parse_segment_name
from basaltmq.log.window import CHUNK_BYTES, Window

_crc32c = google_crc32c.value
_extend = google_crc32c.extend


Take: TypeAlias = Callable[[bytes, int, int, int], int]
"""Takes frames in bulk: (bytes read, where a frame begins in them, where frames of interest end, its position in the
lane) -> bytes of the whole intact frames it has dealt with; 0 leaves the first one to the caller. See `intact`.
"""


class Found(NamedTuple):
    """An intact frame."""

    position: int
    header: Header
    body: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that are no intact frames."""

    path: Path
    begin: int
    """Byte in the file."""
    end: int
    position: int
    """Of `begin` in the lane."""
    reason: str
    shard: int | None = None
    base_offset: int | None = None
    last_offset: int | None = None
    certain: bool = False
    """Shard and offsets come from a header that matches its checksum."""

    def __str__(self) -> str:
        where = f"{self.path} bytes {self.begin} to {self.end}: {self.reason}"
        if self.shard is None:
            return where
        likely = "lost" if self.certain else "probably lost"
        return f"{where}; {likely}: shard {self.shard}, offsets {self.base_offset} to {self.last_offset}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Offsets of a shard that are in no frame between two that are there."""

    shard: int
    first_offset: int
    last_offset: int

    def __str__(self) -> str:
        return f"shard {self.shard} has lost offsets {self.first_offset} to {self.last_offset}"


@dataclass(frozen=True, slots=True)
class LostTail:
    """Bytes at the end of a lane that were durable and are gone: a segment was removed or cut off."""

    lane: Path
    end: int
    synced_position: int

    def __str__(self) -> str:
        return (
            f"{self.lane} ends at byte {self.end}, but was durable up to byte {self.synced_position}: confirmed "
            "records are lost. Restore its last segments from a backup"
        )


class OffsetRuns:
    """Finds losses: where a shard's frames do not follow on one another.

    `expected` gives the offset with which a shard's next frame must begin, None if nothing is known of it.
    """

    def __init__(self, expected: Callable[[int], int | None] | None = None) -> None:
        self._next: dict[int, int] = {}
        self._expected = expected

    def follow(self, header: Header) -> Loss | None:
        if header.kind not in (COLUMNAR, KAFKA) or header.flags & RELOCATED:
            return None
        shard = header.shard
        expected = self._next.get(shard)
        if expected is None and self._expected is not None:
            expected = self._expected(shard)
        self._next[shard] = max(expected or 0, header.last_offset + 1)
        if expected is None or header.base_offset <= expected:
            return None
        return Loss(shard, expected, header.base_offset - 1)


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` found and did."""

    damages: list[Damage]
    """Where bytes are no frames, the torn tail included."""
    cut: Path | None
    """Where the torn tail went."""
    quarantined: list[Path]
    """Files that do not belong to a lane."""


def scan(
    lane: Lane,
    position: int,
    damages: list[Damage] | None = None,
    end: int | None = None,
    take: Take | None = None,
) -> Iterator[Found]:
    """Every intact frame at or after `position` (a frame's begin) and before `end`, in the order of the lane.

    What `take` takes does not come out here.
    """
    for segment in lane.segments():
        if segment.end > position and (end is None or segment.start < end):
            yield from _scan_segment(lane, segment, max(0, position - segment.start), damages, end, take)


def intact(seed: int, raw: bytes, at: int, stop: int, cut: Cut | None) -> Iterator[tuple[int, HeaderFields]]:
    """Where each intact frame begins, from `at` on and before `stop`, and what its header says; up to the first one
    that is not, or not all of which is here.
    """
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
    """Visit every intact frame from `position` on, then cut a torn tail off and take foreign files away."""
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
    """Move what is neither a segment nor a marker (nor COMMITTED, nor the ring) out of a lane's directory."""
    moved = []
    for entry in sorted(os.scandir(path), key=lambda each: each.name):
        if parse_segment_name(entry.name) is None and entry.name not in (*MARKERS, committed.NAME, ring.NAME):
            quarantine.mkdir(parents=True, exist_ok=True)
            target = quarantine / f"{path.name}-{entry.name}"
            number = 1
            while target.exists():
                target = quarantine / f"{path.name}-{entry.name}.{number}"
                number += 1
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
                raise _TornError(header, f"the frame ends {frame_end - segment.size_bytes} bytes after the file does")
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
    """A frame with an intact header."""

    def __init__(self, header: Header, reason: str, following: int | None = None) -> None:
        super().__init__(reason)
        self.header = header
        self.following = following


def _past_damage(
    lane: Lane, segment: Segment, window: Window, at: int, size: int, error: CorruptionError
) -> tuple[int, Damage]:
    """Where to go on after bad bytes at `at`, and what to say about them."""
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
        damage = Damage(
            segment.path,
            at,
            following,
            segment.start + at,
            str(error),
            header.shard,
            header.base_offset,
            header.last_offset,
            certain,
        )
    return following, damage


def _claimed_bytes(window: Window, at: int) -> int | None:
    """The body length a broken header claims, if the segment has so many bytes."""
    raw = window.raw[at - window.base : at - window.base + 16]
    if len(raw) < 16:
        return None
    claimed = int.from_bytes(raw[12:16], "little")
    return claimed if at + HEADER_BYTES + claimed <= window.segment.size_bytes else None


def _frame_at(lane: Lane, segment: Segment, at: int) -> bool:
    """Does an intact header stand here?"""
    try:
        decode_header(lane.seed, lane.read(segment.start + at, HEADER_BYTES))
    except CorruptionError:
        return False
    return True


def _next_frame(lane: Lane, segment: Segment, at: int, size: int) -> int:
    """Where the next intact header stands at or after `at`; the end if there is none."""
    while at < size:
        # Chunks overlap by a header, so that none falls between two.
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
