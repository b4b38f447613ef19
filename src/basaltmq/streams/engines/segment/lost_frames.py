"""Finds the frames that the index has in unreadable bytes of a lane.

Damage that reaches over several frames, or that destroys a header, hides shards and offsets. The index still has them,
unless the frames are newer than its last write to disk.

A lost commit of a transaction costs all its records in the shard: without it they count as aborted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.index.rows import FAMILY, IN_TRANSACTION, IS_COMMIT, IS_MARKER, Entry
from basaltmq.streams.shards import ShardMeta

Offsets = tuple[int, int, int]
"""Shard, first offset and last offset."""

_FRAMES: Final = b"O"


def lost_frames(store: Reader, lane: int, ranges: Sequence[tuple[int, int]]) -> list[list[Offsets]]:
    """Return the offsets of each shard in each byte range of a lane. `ranges` are in order. Reads the whole index."""
    begins = [begin for begin, _ in ranges]
    found: list[dict[int, Offsets]] = [{} for _ in ranges]
    lanes: dict[int, bool] = {}
    begun: dict[tuple[int, int], int] = {}
    """First offset of each open transaction, by shard and producer id. Keys are in the order of shards and offsets."""
    for key, raw in store.scan(FAMILY, *key_parts.prefix_range(_FRAMES)):
        try:
            shard, last_offset = stream_keys.decode_frame_key(key)
            entry = Entry.decode(last_offset, raw)
        except BasaltError:
            continue
        first = entry.base_offset
        if entry.flags & IS_MARKER:
            begin = begun.pop((shard, entry.tag_mask), first)
            first = begin if entry.flags & IS_COMMIT else first
        elif entry.flags & IN_TRANSACTION:
            begun.setdefault((shard, entry.tag_mask), first)
        # The last range that begins before the frame ends.
        at = bisect_right(begins, entry.position + entry.size_bytes - 1) - 1
        if at < 0 or ranges[at][1] <= entry.position:
            continue
        if shard not in lanes:
            lanes[shard] = _lane_of(store, shard) == lane
        if lanes[shard]:
            _, known_first, last = found[at].get(shard, (shard, first, last_offset))
            found[at][shard] = (shard, min(known_first, first), max(last, last_offset))
    return [sorted(each.values()) for each in found]


def _lane_of(store: Reader, shard: int) -> int | None:
    raw = store.get(Family.SHARDS, stream_keys.shard_key(shard))
    try:
        return None if raw is None else ShardMeta.decode(shard, raw).lane
    except BasaltError:
        return None
