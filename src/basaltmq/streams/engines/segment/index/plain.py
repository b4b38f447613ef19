"""Bulk encoding of index rows for plain frames, which take most of the time of a rebuild.

A plain frame directly follows its shard's last frame. Its records have no tags, headers, expiries or offset gaps, and
either all or none have a key. Its rows are the frame row, one row per indexed key, and a time row if the largest time
of the shard grows. `Replay.take` collects them. The bytes are the same as from `StreamIndex.add` and `flush` (P6).
Cost: 1.4 us per key, half of it for the hash.
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
from basaltmq.store.keys.streams import frame_keys
from basaltmq.streams.adapter import HASH_BYTES
from basaltmq.streams.engines.segment.index.rows import ENTRY, NO_TAGS, SegmentStats
from basaltmq.streams.engines.segment.state import SegmentShard

WITH_KEYS: Final = (5).to_bytes(2, "little")
"""The buffer count of a body that has only values, keys and times."""

_hash: Final = partial(blake2b, digest_size=HASH_BYTES)


def key_hashes(raw: bytes, at: int, length: int, records: int, *, is_wanted: bool) -> set[bytes] | None:
    """Return the hashes of the keys in the body at `at`; empty unless wanted.

    None if the body has other columns than values, times and a key per record, or does not match its frame's header.
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
    """Buffered rows of plain frames, with the changed shards and the segment stats.

    Each frame adds only a few list items. `rows` encodes all frames together with C loops.
    """

    __slots__ = ("bare_keys", "flags", "frames", "positions", "shards", "sizes")

    def __init__(self) -> None:
        self.frames: list[PlainFields] = []
        self.positions: list[int] = []
        self.sizes: list[int] = []
        self.flags: list[int] = []
        self.bare_keys: list[bytes] = []
        """Keys of rows without a value: time rows and key rows."""
        self.shards: dict[int, SegmentShard] = {}

    def rows(self) -> tuple[list[bytes], list[bytes], SegmentStats]:
        """Return the keys and values of all rows and the stats of the frames. Needs at least one frame."""
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
        values = [*entries, *repeat(b"", len(self.bare_keys))]
        stats = SegmentStats()
        stats.size_bytes = sum(sizes)
        stats.frames = len(sizes)
        stats.time_min_ms = min(least_ms)
        stats.time_max_ms = max(largest_ms)
        stats.stored_min_ms = min(stored_ms)
        stats.stored_max_ms = max(stored_ms)
        return found + self.bare_keys, values, stats
