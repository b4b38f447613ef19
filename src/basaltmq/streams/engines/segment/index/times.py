"""The index rows by time: for each frame with which the largest time so far grows, its time and last offset.

    'T' shard | time | last offset -> empty

Read in order, times and offsets both rise, like stairs: the first row at or after a time names the first frame that has
a record of that time or later, and all frames before it are older. The stairs are a function of the live frames alone,
in whatever order they are met: a frame that comes late (a copy made by cleaning) takes away the steps it makes
superfluous, and when the first frames go, those that stood in their shadow get theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.streams.engines.segment.index.rows import Entry
from basaltmq.streams.engines.segment.state import TIME_NONE, SegmentShard

FAMILY: Final = Family.STREAM_INDEX


def insert_time(store: Reader, batch: Batch, shard: SegmentShard, entry: Entry, gone: Collection[bytes]) -> None:
    """Keep rows by time rising in time and offset: one that is reached earlier makes later ones superfluous."""
    number = shard.number
    own = keys.stream_time_key(number, entry.timestamp_max_ms, entry.last_offset)
    start, end = keys.prefix_range(own[:9])
    for key, _ in store.scan(FAMILY, keys.stream_time_key(number, entry.timestamp_max_ms, 0), end):
        if key in gone:
            continue
        _, time_ms, last_offset = keys.decode_stream_time_key(key)
        if last_offset < entry.last_offset:
            return
        if time_ms > entry.timestamp_max_ms:
            break
        batch.delete(FAMILY, key)
    for key, _ in store.scan(FAMILY, start, own, reverse=True):
        if key in gone:
            continue
        if keys.decode_stream_time_key(key)[2] < entry.last_offset:
            break
        batch.delete(FAMILY, key)
    batch.put(FAMILY, own, b"")
    shard.timestamp_max_ms = max(shard.timestamp_max_ms, entry.timestamp_max_ms)


def trim_times(store: Reader, batch: Batch, shard: SegmentShard, start: int, kept: Iterator[Entry]) -> None:
    """Rows of frames that went go; frames that stood in their shadow get theirs."""
    number = shard.number
    first_left: int | None = None
    gone = 0
    for key, _ in store.scan(FAMILY, *keys.prefix_range(b"T" + number.to_bytes(8, "big"))):
        last_offset = keys.decode_stream_time_key(key)[2]
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
            batch.put(FAMILY, keys.stream_time_key(number, largest, entry.last_offset), b"")
    shard.timestamp_max_ms = largest
