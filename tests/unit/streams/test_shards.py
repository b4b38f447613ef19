"""Shard rows, and the bounded cache of shard states."""

from __future__ import annotations

import gc
import threading
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.stream_engines import FakeClock

from basaltmq.durability import Durability, parse_durability
from basaltmq.errors import (
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    ShardExistsError,
    ShardNotFoundError,
)
from basaltmq.store.batch import Batch
from basaltmq.store.memory import MemoryStore
from basaltmq.streams.shards import (
    SHADOW,
    SHARDS_PER_BATCH_MAX,
    Engine,
    Recent,
    ShardConfig,
    ShardMeta,
    Shards,
    ShardSpec,
    shard_name,
)

U64 = st.integers(0, (1 << 63) - 1)


def spec(partition: int = 0, topic_id: UUID | None = None, flags: int = 0) -> ShardSpec:
    return ShardSpec(topic_id or uuid4(), partition, Engine.ROCKSDB, flags=flags)


@pytest.mark.spec("B1")
@given(
    meta=st.builds(
        ShardMeta,
        number=U64,
        topic=st.binary(min_size=16, max_size=16),
        partition=st.integers(0, (1 << 31) - 1),
        engine=st.sampled_from(Engine),
        config=st.builds(
            ShardConfig,
            durability=st.sampled_from(Durability),
            retention_ms=st.none() | U64,
            compact=st.booleans(),
            record_bytes_max=st.integers(1, 1 << 30),
        ),
        lane=st.integers(0, (1 << 32) - 1),
        flags=st.integers(0, 0xFFFF),
        start_offset=U64,
        next_offset_min=U64,
        created_ms=U64,
    )
)
def test_a_row_survives_a_round_trip_and_invalid_rows_are_refused(meta: ShardMeta) -> None:
    raw = meta.encode()
    assert ShardMeta.decode(meta.number, raw) == meta
    for cut in (0, 1, 20, len(raw) - 1):
        with pytest.raises(CorruptionError, match=f"shard {meta.number}"):
            ShardMeta.decode(meta.number, raw[:cut])
    for at, value in ((0, 99), (1, 99)):
        with pytest.raises(CorruptionError):
            ShardMeta.decode(meta.number, raw[:at] + bytes((value,)) + raw[at + 1 :])


@pytest.mark.spec("B1")
def test_invalid_queue_name_is_refused() -> None:
    topic_id = uuid4()
    assert shard_name(topic_id, 3) == f"{topic_id}_3"
    with pytest.raises(InvalidArgumentError, match="memory, written, synced"):
        parse_durability("fsync")
    assert parse_durability("synced") is Durability.SYNCED


@pytest.mark.promise("P10")
def test_shard_numbers_are_never_reused_after_deletes_and_reopens() -> None:
    store = MemoryStore()
    seen: set[int] = set()
    for _ in range(4):
        shards = Shards(store, FakeClock())
        metas = shards.create([spec(), spec(1)])
        numbers = {meta.number for meta in metas}
        assert not numbers & seen
        seen |= numbers
        for number in numbers:
            batch = Batch()
            shards.plan_delete(batch, number, derived=False)
            store.write(batch)
            shards.forget(number)
            with pytest.raises(ShardNotFoundError):
                shards.get(number)


@pytest.mark.promise("P10")
def test_concurrent_creates_get_different_numbers() -> None:
    store = MemoryStore()
    shards = Shards(store, FakeClock())
    made: list[int] = []

    def create() -> None:
        for _ in range(25):
            made.extend(meta.number for meta in shards.create([spec(), spec()]))

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(made)) == 200
    assert Shards(store, FakeClock()).create([spec()])[0].number == max(made) + 1


@pytest.mark.spec("B1")
def test_shards_are_found_by_name_and_listed_by_topic() -> None:
    shards = Shards(MemoryStore(), FakeClock(7))
    topic_id = uuid4()
    metas = shards.create([spec(partition, topic_id) for partition in range(300)])
    shards.create([spec()])
    assert shards.find(topic_id, 299) == metas[299]
    assert shards.find(topic_id, 0).created_ms == 7
    assert shards.of_topic(topic_id) == [(meta.partition, meta.number) for meta in metas]
    with pytest.raises(ShardExistsError):
        shards.create([spec(0, topic_id)])
    copy = shards.create([spec(0, topic_id, SHADOW)])[0]
    assert shards.find(topic_id, 0) == metas[0]
    assert copy.number != metas[0].number
    with pytest.raises(ShardNotFoundError, match=f"{topic_id}_300"):
        shards.find(topic_id, 300)
    with pytest.raises(LimitExceededError):
        shards.plan_create(Batch(), [spec()] * (SHARDS_PER_BATCH_MAX + 1))
    with pytest.raises(InvalidArgumentError):
        shards.create([spec(-1)])


@pytest.mark.promise("P3")
def test_offsets_in_a_row_never_decrease() -> None:
    store = MemoryStore()
    shards = Shards(store, FakeClock())
    number = shards.create([spec()])[0].number
    shards.update(number, start_offset=10)
    shards.update(number, start_offset=5, next_offset_min=8)
    shards.update(number, config=ShardConfig(compact=True))
    for reader in (shards, Shards(store, FakeClock())):
        meta = reader.get(number)
        assert (meta.start_offset, meta.next_offset_min, meta.config.compact) == (10, 10, True)


@pytest.mark.spec("D4")
def test_deleted_shards_with_derived_data_are_listed_until_cleaned() -> None:
    store = MemoryStore()
    shards = Shards(store, FakeClock())
    metas = shards.create([spec(), spec()])
    for meta in metas:
        batch = Batch()
        shards.plan_delete(batch, meta.number, derived=True)
        store.write(batch)
    again = Shards(store, FakeClock())
    assert again.deleted(Engine.ROCKSDB) == [(meta.number, 0) for meta in metas]
    assert again.deleted(Engine.SEGMENT) == []


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.promise("P8")
def test_only_recently_used_states_are_cached_and_never_two_of_one_shard() -> None:
    loads: list[int] = []

    def load(number: int) -> Thing:
        loads.append(number)
        return Thing(number)

    recent: Recent[Thing] = Recent(load, 3)
    held = recent.get(1)
    for number in (2, 3, 4, 5):
        recent.get(number)
    assert len(recent) == 3
    assert recent.get(1) is held
    assert loads == [1, 2, 3, 4, 5]
    gc.collect()
    assert {thing.number for thing in recent.loaded()} == {1, 4, 5}
    recent.get(2)
    assert loads == [1, 2, 3, 4, 5, 2]
    assert recent.forget(1) is held
    assert recent.get(1) is not held
