"""Finds durable bytes that are missing between the segments of a lane.

Segment cleaning leaves gaps between segments. So do removed or truncated files. The index distinguishes them:

    segment row with more bytes than the file   lost: cleaning deletes the row, durably, before the file
    gap above the checkpoint                    lost: cleaning moves the checkpoint beyond a segment before it deletes
                                                the file
    any other gap                               cleaned

An index without a checkpoint or without its synced position is not complete, so it proves nothing. The end of the lane
is compared with COMMITTED instead (`LostTail`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from basaltmq.log.segment import Segment
from basaltmq.store.api import Reader
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.index.rows import FAMILY, SegmentStats


def missing_bytes(store: Reader, lane: int, segments: Sequence[Segment], durable: int) -> list[tuple[int, int]]:
    """Return the ranges of lost bytes below `durable` and before the last segment, in order. `store` has the index."""
    checkpoint = store.get(FAMILY, stream_keys.log_checkpoint_key(lane))
    if not segments or checkpoint is None or store.get(FAMILY, stream_keys.log_synced_key(lane)) is None:
        return []
    lost = []
    ends = {segment.start: segment.end for segment in segments}
    last = segments[-1].start
    for key, raw in store.scan(FAMILY, *key_parts.prefix_range(b"S")):
        of, start = stream_keys.decode_log_segment_key(key)
        if of == lane and start < last:
            lost.append((ends.get(start, start), start + SegmentStats(raw).size_bytes))
    indexed = int.from_bytes(checkpoint, "big")
    lost += [(max(each.end, indexed), following.start) for each, following in pairwise(segments)]
    return _merged([(begin, min(end, durable)) for begin, end in lost])


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that touch, and drop empty ones."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
