"""Read-ahead of shard rows is never stale, with any concurrent writes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.memory import MemoryStore
from basaltmq.streams.engines.segment.row_prefetch import AHEAD_MAX, IN_ORDER_MIN, RowPrefetch

COUNT = 400


class Counting(MemoryStore):
    """Counts the requested rows."""

    def __init__(self) -> None:
        super().__init__()
        self.single = 0
        self.many: list[int] = []

    def get(self, family: Family, key: bytes) -> bytes | None:
        self.single += 1
        return super().get(family, key)

    def get_many(self, family: Family, keys: Sequence[bytes]) -> list[bytes | None]:
        self.many.append(len(keys))
        return super().get_many(family, keys)


def put(store: MemoryStore, shard: int, row: bytes) -> None:
    batch = Batch()
    batch.put(Family.SHARDS, stream_keys.shard_key(shard), row)
    store.write(batch)


def filled() -> Counting:
    store = Counting()
    for shard in range(COUNT):
        put(store, shard, b"row %d" % shard)
    return store


def test_sequential_shards_are_read_ahead() -> None:
    store = filled()
    rows = RowPrefetch(store)
    assert [rows.get(shard) for shard in range(COUNT)] == [b"row %d" % shard for shard in range(COUNT)]
    assert store.single < 2 * IN_ORDER_MIN
    assert max(store.many) == AHEAD_MAX
    assert rows.get(COUNT) is None


def test_shards_in_random_order_are_read_one_by_one() -> None:
    store = filled()
    rows = RowPrefetch(store)
    for shard in range(0, COUNT, 2):
        assert rows.get(shard) == b"row %d" % shard
    assert not store.many


@pytest.mark.promise("P3")
@pytest.mark.parametrize("pause", [1, 7, 100])
def test_a_prefetched_row_is_never_stale(pause: int) -> None:
    rng = random.Random(pause)
    store = filled()
    rows = RowPrefetch(store)
    shard = 0
    for step in range(4000):
        assert rows.get(shard) == MemoryStore.get(store, Family.SHARDS, stream_keys.shard_key(shard))
        shard = shard + 1 if rng.randrange(50) else rng.randrange(COUNT)
        if step % pause == 0:
            number = shard + rng.randrange(3)
            batch = Batch()
            batch.delete(Family.SHARDS, stream_keys.shard_key(number + 1))
            batch.put(Family.SHARDS, stream_keys.shard_key(number), b"changed in step %d" % step)
            store.write(batch)


def test_under_constant_writes_read_ahead_is_rarely_tried() -> None:
    store = filled()
    rows = RowPrefetch(store)
    for shard in range(COUNT):
        rows.get(shard)
        put(store, COUNT + 1, b"another %d" % shard)
    assert sum(store.many) < 2 * COUNT
