"""The latest offset of each key in a part of a shard, for compaction where no index knows the keys.

Topics that Kafka's producers write to have no key index, so that batches stay closed on their way in. One that is to be
compacted all the same is gone through twice: first every key is noted with its latest offset, here, then what is older
goes. Keys are noted in portions: when there are too many, the pass ends where they were enough, and the next one begins
there. One shard at a time has this; nothing of it is on the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

KEYS_MAX: Final = 250_000
"""Keys of one portion, about 40 MB."""

DIGEST_BYTES: Final = 16
"""Longer keys are known by a hash that two of them do not share by accident."""

NOWHERE: Final = -1


class LatestKeys:
    """What is known of one shard's keys."""

    def __init__(self, shard: int, start: int) -> None:
        self.shard = shard
        self.next_offset = start
        """Frames from here on are not noted yet."""
        self.is_whole = False
        """All of the portion is noted."""
        self._offsets: dict[bytes, int] = {}

    @property
    def is_full(self) -> bool:
        return len(self._offsets) >= KEYS_MAX

    def note(self, latest: Mapping[bytes, int], next_offset: int) -> None:
        """A frame's keys, frames in the order of their offsets."""
        self._offsets.update((_known_by(key), offset) for key, offset in latest.items())
        self.next_offset = next_offset

    def latest(self, key: bytes) -> int:
        return self._offsets.get(_known_by(key), NOWHERE)


def _known_by(key: bytes) -> bytes:
    # Keys that stand for themselves are shorter than a digest, so none is taken for one.
    return key if len(key) < DIGEST_BYTES else blake2b(key, digest_size=DIGEST_BYTES).digest()
