"""Partitioner: chooses a record's partition explicitly, by key hash, or round robin (SPEC B4).

The key hash is the murmur2 of Kafka's default partitioner, so a key maps to the same partition as with a Kafka client.
Records without a key go round robin per batch, because splitting a batch over partitions would lose its benefit.
"""

from __future__ import annotations

import itertools
from typing import Final

from basaltmq.errors import InvalidArgumentError

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """Return the unsigned 32-bit murmur2 hash as Kafka's Java client computes it."""
    length = len(key)
    hashed = (_SEED ^ length) & _MASK
    whole = length & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * _M & _MASK
        k = (k ^ (k >> 24)) * _M & _MASK
        hashed = (hashed * _M & _MASK) ^ k
    if length & 3:
        hashed = (hashed ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    hashed = (hashed ^ (hashed >> 13)) * _M & _MASK
    return hashed ^ (hashed >> 15)


def partition_of_key(key: bytes, partitions: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions


class Partitioner:
    """Chooses partitions. All topics of a process share one round-robin counter. Thread-safe."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def in_turn(self, partitions: int) -> int:
        # `next` on `itertools.count` is atomic under the GIL.
        return next(self._turns) % partitions

    def choose(self, partitions: int, key: bytes | None, partition: int | None = None) -> int:
        if partition is not None:
            if not 0 <= partition < partitions:
                raise InvalidArgumentError(f"there is no partition {partition}; the topic has 0 to {partitions - 1}")
            return partition
        return self.in_turn(partitions) if key is None else partition_of_key(key, partitions)
