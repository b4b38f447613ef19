"""The latest offset of each key in a range of a shard, for compaction without a key index.

Topics of Kafka producers have no key index, so that their batches need no decoding. Compaction of such a topic reads
each range twice: first it collects the latest offset per key here, then it removes older records. If there are too many
keys, the pass ends there and the next pass continues. Only one shard at a time has this map, and it is never on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

KEYS_MAX: Final = 250_000
"""Maximum keys per pass, about 40 MB."""

DIGEST_BYTES: Final = 16
"""Keys of at least this length are stored as a hash of this length."""

NOWHERE: Final = -1


class LatestKeys:
    """The latest offsets of one shard's keys."""

    def __init__(self, shard: int, start: int) -> None:
        self.shard = shard
        self.next_offset = start
        """Frames from this offset on are not collected yet."""
        self.is_whole = False
        """Whether all keys of the pass are collected."""
        self._offsets: dict[bytes, int] = {}

    @property
    def is_full(self) -> bool:
        return len(self._offsets) >= KEYS_MAX

    def note(self, latest: Mapping[bytes, int], next_offset: int) -> None:
        """Add a frame's keys. Frames must come in offset order."""
        self._offsets.update((_known_by(key), offset) for key, offset in latest.items())
        self.next_offset = next_offset

    def latest(self, key: bytes) -> int:
        return self._offsets.get(_known_by(key), NOWHERE)


def _known_by(key: bytes) -> bytes:
    # Keys stored unhashed are shorter than a digest, so they cannot collide with one.
    return key if len(key) < DIGEST_BYTES else blake2b(key, digest_size=DIGEST_BYTES).digest()
