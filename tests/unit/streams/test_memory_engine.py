"""The memory engine: retention and compaction run in bounded steps."""

from __future__ import annotations

import random
from uuid import uuid4

import pytest

from basaltmq.durability import Durability
from basaltmq.log.batches.record import Record
from basaltmq.store.memory import MemoryStore
from basaltmq.streams.engines import memory as memory_engine
from basaltmq.streams.engines import retention
from basaltmq.streams.engines.memory import MemoryEngine
from basaltmq.streams.offsets import PersistentOffsets
from basaltmq.streams.shards import Engine, ShardConfig, Shards, ShardSpec
from basaltmq.streams.watermark import Watermarks

STEP = 40


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory_engine, "RECORDS_PER_STEP", STEP)
        monkeypatch.setattr(retention, "RECORDS_PER_STEP", STEP)
        self.now_ms = 1_000_000
        store = MemoryStore()
        self.watermarks = Watermarks(store)
        shards = Shards(store, self.clock)
        offsets = PersistentOffsets(store, self.watermarks.group, self.clock)
        self.engine = MemoryEngine(store, shards, offsets, self.clock)

    def clock(self) -> int:
        return self.now_ms

    def shard(self, config: ShardConfig) -> int:
        return self.engine.create_shard(ShardSpec(uuid4(), 0, Engine.MEMORY, config)).number

    def kept(self, shard: int) -> list[int]:
        return [record.offset for record in self.engine.read_by_offset(shard, 0, 10_000).records()]

    def close(self) -> None:
        self.engine.close()
        self.watermarks.close()


@pytest.mark.spec("B10")
@pytest.mark.promise("P8")
def test_compaction_of_a_large_shard_takes_bounded_steps_and_keeps_the_latest_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    rig = Rig(monkeypatch)
    shard = rig.shard(ShardConfig(durability=Durability.MEMORY, compact=True, tombstone_retention_ms=1_000))
    latest: dict[bytes | None, int] = {}
    keyless: list[int] = []
    for offset in range(1_000):
        # One hot key has most of the records.
        key = chance.choice([b"hot", b"hot", b"hot", b"%d" % chance.randrange(50), None])
        value = None if chance.random() < 0.1 else b"v"
        rig.engine.write(shard, Record(value, key, tags=(b"t%d" % (offset % 3),)))
        if key is None:
            keyless.append(offset)
        else:
            latest[key] = offset
    steps = 0
    before = 1_000
    while before > len(latest) + len(keyless):
        gone = rig.engine.retain(rig.now_ms)
        steps += 1
        assert gone <= STEP
        after = rig.engine.shard_info(shard).records
        assert before - after == gone
        before = after
        assert steps < 100
    assert steps >= 1_000 // STEP
    assert rig.kept(shard) == sorted([*latest.values(), *keyless])
    for key, offset in latest.items():
        assert key is not None
        assert [record.offset for record in rig.engine.read_by_key(shard, key, 0).records()] == [offset]
    for number in range(3):
        tagged = rig.engine.read_by_tag(shard, b"t%d" % number, 0, 10_000).records()
        assert [record.offset for record in tagged] == [at for at in rig.kept(shard) if at % 3 == number]
    rig.now_ms += 1_000
    for _ in range(100):
        rig.engine.retain(rig.now_ms)
    found = {record.offset for record in rig.engine.read_by_offset(shard, 0, 10_000).records() if not record.value}
    assert found <= set(keyless), "a tombstone that is due was not removed"
    rig.close()


@pytest.mark.spec("B10")
@pytest.mark.promise("P8")
def test_retention_removes_a_bounded_part_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    shard = rig.shard(ShardConfig(durability=Durability.MEMORY, retention_records=10))
    for number in range(200):
        rig.engine.write(shard, Record(b"%d" % number, b"key"))
    # A step that used its limit keeps the position of the round. The next step may find the end of the round.
    removed = [gone for _ in range(20) if (gone := rig.engine.retain(rig.now_ms))]
    assert removed == [40, 40, 40, 40, 30]
    assert rig.engine.shard_info(shard).start_offset == 190
    rig.close()
