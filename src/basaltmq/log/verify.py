"""Verifies a log: reads every frame of every lane without changing anything.

It can run next to a writer. A frame that is being appended looks torn, as does the tail that a crash left at the end of
a lane. Neither was confirmed, and neither is reported. Bytes below the position in COMMITTED were durable: if they are
torn or missing, they are lost, unless the ring holds them. ENDS holds a copy of the durable end outside the log.
Missing offsets are not reported: cleaning removes records. It removes segments too, so only the index can tell whether
bytes between two segments are lost (`Missing`), and which frames were in lost bytes (`Frames`). Ceilings bound the
offsets of frames that the index lacks (`Ceilings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path

from basaltmq.errors import CorruptionError
from basaltmq.log import ring
from basaltmq.log.committed import read_mark
from basaltmq.log.ends import read_ceilings, read_ends
from basaltmq.log.frame import COLUMNAR, KAFKA, RELOCATED
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import Damage, Found, LostBytes, LostTail, scan
from basaltmq.log.segment import Segment

Progress = Callable[[int, int], None]
Names = Callable[[], Mapping[int, str]]
"""Returns the names of shards. Called only if a damaged frame is found."""
Missing = Callable[[int, Sequence[Segment], int], list[tuple[int, int]]]
"""Returns the lost byte ranges between the segments of a lane, given its number and its durable position. Called only
if there is a gap."""

Frames = Callable[[int, Sequence[tuple[int, int]]], list[list[tuple[int, int, int]]]]
"""Returns shard, first and last offset of the frames in byte ranges of a lane, given its number. Called only if there
are such ranges."""

Ceilings = Callable[[int], Mapping[int, int]]
"""Returns the ceilings of a lane's shards: all offsets ever assigned are below. Called only if bytes are lost."""


def verify_log(
    path: Path,
    progress: Progress | None = None,
    names: Names | None = None,
    missing: Missing | None = None,
    frames: Frames | None = None,
    ceilings: Ceilings | None = None,
) -> list[str]:
    """Return one line per damaged byte range, with the segment, the bytes and, if known, shards and offsets."""
    ends = read_ends(path.parent)
    faults = list(ends.faults)
    read_ceilings(path.parent, faults)
    for number, end in ends.lanes.items():
        directory = path / f"{number:04d}"
        if end and not LaneView.exists(directory):
            faults.append(str(LostTail(directory, 0, end)))
            faults += _possible_losses(directory, end, {}, names, ceilings)
    if not path.is_dir():
        return faults
    lanes: list[tuple[LaneView, int]] = []
    losses: dict[Path, list[LostTail | LostBytes]] = {}
    for directory in sorted(each for each in path.iterdir() if each.is_dir()):
        # Read the mark before listing the segments: next to a writer they only grow.
        mark = read_mark(directory)
        try:
            if LaneView.exists(directory):
                lane = LaneView(directory)
                synced = 0 if mark is None else mark.synced_position
                lanes.append((lane, synced))
                lost = losses[directory] = _lost_end(lane, max(synced, ends.lanes.get(int(directory.name), 0)))
                if missing is not None and _has_gap(lane):
                    between = missing(int(directory.name), lane.segments(), synced)
                    lost += [LostBytes(directory, *each) for each in between]
        except CorruptionError as error:
            faults.append(str(error))
    try:
        total = sum(lane.end - lane.start for lane, _ in lanes)
        done = 0
        for lane, synced in lanes:
            damages: list[Damage] = []
            order = _Order(lane)
            for found in scan(lane, lane.start, damages):
                order.follow(found)
                if progress is not None:
                    progress(done + found.position - lane.start, total)
            done += lane.end - lane.start
            faults += order.faults
            damages = [damage for damage in damages if not _is_unconfirmed(damage, lane, synced)]
            broken = sorted([*losses[lane.path], *damages], key=_range)
            named = names() if broken and names is not None else {}
            held: list[list[tuple[int, int, int]]] = [[]] * len(broken)
            if broken and frames is not None:
                held = frames(int(lane.path.name), [_range(each) for each in broken])
            faults += [_line(each, offsets, named) for each, offsets in zip(broken, held, strict=True)]
            hidden = [_range(each)[1] for each in broken if not (isinstance(each, Damage) and each.certain)]
            if hidden:
                following = order.following
                for shard, _, last in chain.from_iterable(held):
                    first, position = following.get(shard, (0, 0))
                    following[shard] = (max(first, last + 1), position)
                faults += _possible_losses(lane.path, max(hidden), following, names, ceilings)
        if progress is not None:
            progress(total, total)
    finally:
        for lane, _ in lanes:
            lane.close()
    return faults


class _Order:
    """Finds segments whose frames are out of order, because files were exchanged or copied."""

    def __init__(self, lane: LaneView) -> None:
        self._lane = lane
        self._next: dict[int, int] = {}
        """Offset after the last frame, by shard."""
        self.following: dict[int, tuple[int, int]] = {}
        """Offset after the last frame, copies included, and the position of the shard's last frame."""
        self._segment: Path | None = None
        self.faults: list[str] = []

    def follow(self, found: Found) -> None:
        header = found.header
        if header.kind not in (COLUMNAR, KAFKA):
            return
        known, _ = self.following.get(header.shard, (0, 0))
        self.following[header.shard] = (max(known, header.last_offset + 1), found.position)
        if header.flags & RELOCATED:
            return
        if header.base_offset >= self._next.get(header.shard, 0):
            self._next[header.shard] = header.last_offset + 1
            return
        path = self._lane.segment_at(found.position).path
        if path != self._segment:
            self._segment = path
            self.faults.append(
                f"{path}: shard {header.shard} has offsets {header.base_offset} to {header.last_offset} after offset "
                f"{self._next[header.shard] - 1}: segments were exchanged or copied. Restore their names, or run "
                "basalt pipeline rebuild-index"
            )


def _lost_end(lane: LaneView, synced: int) -> list[LostTail | LostBytes]:
    """Describe the durable bytes after the last segment that the ring does not hold."""
    gaps = ring.gaps(lane.path, lane.seed, lane.end, synced)
    if gaps:
        # Next to a writer, frames may have moved from the ring to their segment since the segments were listed.
        lane.relist()
    return [
        LostTail(lane.path, max(begin, lane.end), synced) if end == synced else LostBytes(lane.path, begin, end)
        for begin, end in gaps
        if end > lane.end
    ]


def _possible_losses(
    path: Path,
    hidden: int,
    following: Mapping[int, tuple[int, int]],
    names: Names | None,
    ceilings: Ceilings | None,
) -> list[str]:
    """Describe offsets that may be lost: of shards without a frame after the lost bytes, up to their ceilings.

    The lost bytes end at `hidden`.
    """
    found = {} if ceilings is None else ceilings(int(path.name))
    named = names() if found and names is not None else {}
    lines = []
    for shard, ceiling in sorted(found.items()):
        first, position = following.get(shard, (0, 0))
        if first < ceiling and position < hidden:
            lines.append(
                f"{path}: shard {shard}{_named(shard, named)} may have lost offsets from {first} up to {ceiling - 1}; "
                f"after the next start, new records get offsets from {ceiling} on"
            )
    return lines


def _has_gap(lane: LaneView) -> bool:
    segments = lane.segments()
    return bool(segments) and (
        lane.start > 0 or any(each.end < following.start for each, following in pairwise(segments))
    )


def _range(broken: Damage | LostTail | LostBytes) -> tuple[int, int]:
    """Return the begin and end of the damage, as positions in the lane."""
    if isinstance(broken, Damage):
        return broken.position, broken.position + broken.end - broken.begin
    return (broken.end, broken.synced_position) if isinstance(broken, LostTail) else (broken.begin, broken.end)


def _line(
    broken: Damage | LostTail | LostBytes, frames: Sequence[tuple[int, int, int]], names: Mapping[int, str]
) -> str:
    """Describe lost bytes with their shards and offsets: those of the header, then those of the index."""
    parts = [str(broken)]
    own = None
    if isinstance(broken, Damage) and broken.shard is not None:
        own = (broken.shard, broken.base_offset, broken.last_offset)
        parts[0] += _named(broken.shard, names)
    parts += [
        f"lost: shard {shard}, offsets {first} to {last}{_named(shard, names)}"
        for shard, first, last in frames
        if (shard, first, last) != own
    ]
    return "; ".join(parts)


def _named(shard: int, names: Mapping[int, str]) -> str:
    return f" ({names[shard]})" if shard in names else ""


def _is_unconfirmed(damage: Damage, lane: LaneView, synced: int) -> bool:
    """Whether damaged bytes are a torn tail without any durable data."""
    end = damage.position + damage.end - damage.begin
    if end < lane.end:
        return False
    return damage.position >= synced or not ring.gaps(lane.path, lane.seed, damage.position, min(end, synced))
