"""Which partition a record goes to: as asked, by its key, or in turns (SPEC B4).

The hash of a key is murmur2 as Kafka's default partitioner computes it, so that a key lands where a Kafka client
would put it. Records without a key go round robin, a batch at a time: one batch to one partition is what makes
batches worth while.
"""

from __future__ import annotations

import itertools
from typing import Final

from basaltmq.errors import InvalidArgumentError

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """The 32-bit murmur2 of Kafka's Java client, unsigned."""
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
    """Chooses partitions for one process: one counter for all topics. Safe to share between threads."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def in_turn(self, partitions: int) -> int:
        # `next` of a count is one step of the interpreter.
        return next(self._turns) % partitions

    def choose(self, partitions: int, key: bytes | None, partition: int | None = None) -> int:
        if partition is not None:
            if not 0 <= partition < partitions:
                raise InvalidArgumentError(f"there is no partition {partition}; the topic has 0 to {partitions - 1}")
            return partition
        return self.in_turn(partitions) if key is None else partition_of_key(key, partitions)
