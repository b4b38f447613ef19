"""Index rows of plain frames, made many at a time: what a rebuild spends most of its time on.

A plain frame holds records without tags, headers, expiries and holes, of which all have a key or none, and follows on
its shard's last one. Its rows are the frame's own, one for each key that is to be indexed and, where the largest time
of the shard grows, one by time; `Replay.take` gathers them, the same bytes that `StreamIndex.add` and `flush` make of
it (P6). Budget: 1.4 us per key, of which half is its hash.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from itertools import pairwise, repeat
from operator import add
from struct import unpack_from
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.log.batches.columnar import KEY_DATA, KEY_OFFSETS, VALUE_DATA, VALUE_OFFSETS, directory_of
from basaltmq.log.batches.record import NEVER
from basaltmq.log.frame import PlainFields
from basaltmq.store.keys.queues import frame_keys
from basaltmq.streams.adapter import HASH_BYTES
from basaltmq.streams.engines.segment.index.rows import ENTRY, NO_TAGS, SegmentStats
from basaltmq.streams.engines.segment.state import SegmentShard

WITH_KEYS: Final = (5).to_bytes(2, "little")
"""How a body counts its buffers that has values, keys and times and nothing else."""

_hash: Final = partial(blake2b, digest_size=HASH_BYTES)


def key_hashes(raw: bytes, at: int, length: int, records: int, *, is_wanted: bool) -> set[bytes] | None:
    """What the body at `at` has of keys: their hashes as rows have them, none unless wanted.

    None if the body has anything but values, times and a key for each record, or is not what its frame's header says.
    """
    if raw[at + 4 : at + 6] != WITH_KEYS:
        return None
    try:
        count, extents, size, _ = directory_of(raw, at)
        (values, _), (_, value_bytes) = extents[VALUE_OFFSETS], extents[VALUE_DATA]
        (ends, _), (content, key_bytes) = extents[KEY_OFFSETS], extents[KEY_DATA]
    except (CorruptionError, KeyError):
        return None
    if count != records or size != length:
        return None
    offsets = unpack_from(f"<{count + 1}i", raw, at + ends)
    (first,), (last,) = unpack_from("<i", raw, at + values), unpack_from("<i", raw, at + values + 4 * count)
    if first or last != value_bytes or offsets[0] or offsets[-1] != key_bytes:
        return None
    if not is_wanted:
        return set()
    begin = at + content
    return {_hash(key).digest() for key in {raw[begin + start : begin + end] for start, end in pairwise(offsets)}}


class PlainRows:
    """Rows to be written, the shards that changed, and what is to be summed up by segment.

    By frame there are only a few appends; rows are made of all frames at once, in loops that are not Python's.
    """

    __slots__ = ("by_words", "flags", "frames", "positions", "shards", "sizes")

    def __init__(self) -> None:
        self.frames: list[PlainFields] = []
        self.positions: list[int] = []
        self.sizes: list[int] = []
        self.flags: list[int] = []
        self.by_words: list[bytes] = []
        """Keys of rows without a value: by time, by a record's key."""
        self.shards: dict[int, SegmentShard] = {}

    def rows(self) -> tuple[list[bytes], list[bytes], SegmentStats]:
        """Keys and values of all rows, and what the frames add up to. There is at least one."""
        sizes = self.sizes
        _, _, _, _, numbers, bases, records, deltas, least_ms, largest_ms, stored_ms, _ = zip(*self.frames, strict=True)
        found = frame_keys(numbers, map(add, bases, deltas))
        entries = map(
            ENTRY.pack,
            self.positions,
            bases,
            sizes,
            records,
            largest_ms,
            stored_ms,
            repeat(NO_TAGS),
            repeat(NEVER),
            self.flags,
        )
        values = [*entries, *repeat(b"", len(self.by_words))]
        stats = SegmentStats()
        stats.size_bytes = sum(sizes)
        stats.frames = len(sizes)
        stats.time_min_ms = min(least_ms)
        stats.time_max_ms = max(largest_ms)
        stats.stored_min_ms = min(stored_ms)
        stats.stored_max_ms = max(stored_ms)
        return found + self.by_words, values, stats
