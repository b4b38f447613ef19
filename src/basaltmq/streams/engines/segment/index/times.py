"""Time rows of the index: one for each frame that raises the largest time of its shard.

    'T' shard | time | last offset -> empty

In key order, times and offsets both ascend. The first row at or after a time names the first frame with a record at or
after that time; all earlier frames are older. The rows are a function of the live frames alone, in any insertion order.
A frame inserted late (a copy by segment cleaning) removes the rows that it makes redundant. When the first frames are
removed, later frames that now raise the largest time get rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.index.rows import Entry
from basaltmq.streams.engines.segment.state import TIME_NONE, SegmentShard

FAMILY: Final = Family.STREAM_INDEX


def insert_time(store: Reader, batch: Batch, shard: SegmentShard, entry: Entry, gone: Collection[bytes]) -> None:
    """Insert a frame's time row and remove the later rows that it makes redundant."""
    number = shard.number
    own = stream_keys.stream_time_key(number, entry.timestamp_max_ms, entry.last_offset)
    start, end = key_parts.prefix_range(own[:9])
    for key, _ in store.scan(FAMILY, stream_keys.stream_time_key(number, entry.timestamp_max_ms, 0), end):
        if key in gone:
            continue
        _, time_ms, last_offset = stream_keys.decode_stream_time_key(key)
        if last_offset < entry.last_offset:
            return
        if time_ms > entry.timestamp_max_ms:
            break
        batch.delete(FAMILY, key)
    for key, _ in store.scan(FAMILY, start, own, reverse=True):
        if key in gone:
            continue
        if stream_keys.decode_stream_time_key(key)[2] < entry.last_offset:
            break
        batch.delete(FAMILY, key)
    batch.put(FAMILY, own, b"")
    shard.timestamp_max_ms = max(shard.timestamp_max_ms, entry.timestamp_max_ms)


def trim_times(store: Reader, batch: Batch, shard: SegmentShard, start: int, kept: Iterator[Entry]) -> None:
    """Remove the time rows below `start` and add rows for frames that now raise the largest time."""
    number = shard.number
    first_left: int | None = None
    gone = 0
    for key, _ in store.scan(FAMILY, *key_parts.prefix_range(b"T" + number.to_bytes(8, "big"))):
        last_offset = stream_keys.decode_stream_time_key(key)[2]
        if last_offset >= start:
            first_left = last_offset
            break
        batch.delete(FAMILY, key)
        gone += 1
    if not gone:
        return
    largest = TIME_NONE
    for entry in kept:
        if entry.last_offset == first_left:
            return
        if entry.timestamp_max_ms > largest:
            largest = entry.timestamp_max_ms
            batch.put(FAMILY, stream_keys.stream_time_key(number, largest, entry.last_offset), b"")
    shard.timestamp_max_ms = largest
