"""Verify a log: read every frame of every lane back, changing nothing.

Works beside a writer. A frame that is being appended at the moment looks torn, and so does what a crash left at the
very end of a lane: neither was ever confirmed, and neither is reported. A lane that ends before the position COMMITTED
names has lost its tail, unless the ring holds it. Offsets that are in no frame are not reported
either: where cleaning has been, they are no fault.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from basaltmq.errors import CorruptionError
from basaltmq.log import ring
from basaltmq.log.committed import read_mark
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import Damage, LostTail, scan

Progress = Callable[[int, int], None]


def verify_log(path: Path, progress: Progress | None = None) -> list[str]:
    """One line per damaged run of bytes, naming the segment, the bytes and, as far as known, shard and offsets."""
    if not path.is_dir():
        return []
    faults: list[str] = []
    lanes: list[LaneView] = []
    for directory in sorted(each for each in path.iterdir() if each.is_dir()):
        # Before the segments are listed: beside a writer they only grow.
        mark = read_mark(directory)
        try:
            if LaneView.exists(directory):
                lane = LaneView(directory)
                lanes.append(lane)
                end = max(lane.end, ring.reach(directory, lane.seed))
                if mark is not None and end < mark.synced_position:
                    faults.append(str(LostTail(directory, end, mark.synced_position)))
        except CorruptionError as error:
            faults.append(str(error))
    try:
        total = sum(lane.end - lane.start for lane in lanes)
        done = 0
        for lane in lanes:
            damages: list[Damage] = []
            for found in scan(lane, lane.start, damages):
                if progress is not None:
                    progress(done + found.position - lane.start, total)
            done += lane.end - lane.start
            faults += [str(damage) for damage in damages if damage.position + damage.end - damage.begin < lane.end]
        if progress is not None:
            progress(total, total)
    finally:
        for lane in lanes:
            lane.close()
    return faults
