"""Retention, expiry and compaction, for every stream engine (SPEC B10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.stream_engines import ENGINES, START_MS, Rig, offsets, record

from basaltmq.durability import Durability
from basaltmq.errors import InvalidConfigError
from basaltmq.log.batches.record import Record
from basaltmq.streams.adapter import IfAllOlder
from basaltmq.streams.engines.segment.engine import SegmentEngine


@pytest.fixture(params=sorted(ENGINES))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.spec("B2", "B10")
def test_expired_records_are_hidden_and_then_removed(rig: Rig) -> None:
    shard = rig.shard()
    now = rig.clock.now_ms
    rig.engine.batch_write(
        shard,
        [
            record("a", key=b"k", tags=(b"t",), expire_at_ms=now + 10),
            record("b", key=b"k", tags=(b"t",)),
            record("c", key=b"k", tags=(b"t",), expire_at_ms=now + 20),
        ],
    )
    assert offsets(rig, shard) == [0, 1, 2]
    rig.clock.now_ms = now + 10
    assert offsets(rig, shard) == [1, 2]
    assert [each.offset for each in rig.engine.read_by_key(shard, b"k", 0).records()] == [1, 2]
    assert [each.offset for each in rig.engine.read_by_tag(shard, b"t", 0).records()] == [1, 2]
    assert rig.engine.get_offset_by_timestamp(shard, now, IfAllOlder.LATEST) == 1
    rig.clock.now_ms = now + 20
    assert retained(rig) == 2
    assert retained(rig) == 0
    info = rig.engine.shard_info(shard)
    assert (info.records, info.next_offset) == (1, 3)
    assert offsets(rig, shard) == [1]


def retained(rig: Rig) -> int:
    """Run retention until nothing is left to do."""
    total = 0
    for _ in range(50):
        gone = rig.engine.retain(rig.clock.now_ms)
        if not gone:
            return total
        total += gone
    raise AssertionError("retention does not come to an end")


@pytest.mark.spec("B10")
def test_retention_by_count_keeps_the_latest(rig: Rig) -> None:
    limited, free = rig.shard(retention_records=3), rig.shard()
    for number in range(10):
        rig.engine.write(limited, record(number))
        rig.engine.write(free, record(number))
    assert retained(rig) == 7
    assert offsets(rig, limited) == [7, 8, 9]
    assert offsets(rig, free) == list(range(10))
    assert rig.engine.shard_info(limited).start_offset == 7


@pytest.mark.spec("B10")
def test_retention_by_time_removes_the_oldest_records(rig: Rig) -> None:
    shard = rig.shard(retention_ms=1_000)
    for step in (0, 100, 200, 5_000):
        rig.clock.now_ms = START_MS + step
        rig.engine.write(shard, record(step))
    rig.clock.now_ms = START_MS + 1_100
    retained(rig)
    assert offsets(rig, shard) == [2, 3]
    rig.clock.now_ms = START_MS + 9_000
    retained(rig)
    assert offsets(rig, shard) == []
    assert rig.engine.write(shard, record("x")).base_offset == 4


@pytest.mark.spec("B10")
def test_future_timestamp_does_not_block_retention(rig: Rig) -> None:
    shard = rig.shard(retention_ms=1_000)
    rig.engine.write(shard, record("from the future", timestamp_ms=START_MS * 2))
    rig.clock.now_ms += 1_001
    assert retained(rig) == 1


@pytest.mark.spec("B10")
def test_retention_by_size_respects_the_limit(rig: Rig) -> None:
    shard = rig.shard(retention_bytes=20_000)
    for _ in range(100):
        rig.engine.write(shard, record(b"x" * 1_000))
    assert retained(rig) > 0
    info = rig.engine.shard_info(shard)
    assert info.size_bytes <= 20_000
    assert info.records >= 10
    assert offsets(rig, shard) == list(range(100 - info.records, 100))


@pytest.mark.spec("B10")
@pytest.mark.promise("P3")
def test_compaction_keeps_the_latest_per_key_at_its_offset(rig: Rig) -> None:
    shard = rig.shard(compact=True, tombstone_retention_ms=1_000)
    for number, key in enumerate((b"a", b"b", b"a", None, b"c", b"b", None, b"a")):
        rig.engine.write(shard, record(number, key=key))
    retained(rig)
    assert offsets(rig, shard) == [3, 4, 5, 6, 7]
    rig.engine.write(shard, Record(None, b"b"))
    retained(rig)
    assert offsets(rig, shard) == [3, 4, 6, 7, 8]
    rig.clock.now_ms += 1_000
    retained(rig)
    assert offsets(rig, shard) == [3, 4, 6, 7]
    assert rig.engine.write(shard, record("x", key=b"b")).base_offset == 9
    assert [each.offset for each in rig.engine.read_by_key(shard, b"b", 0).records()] == [9]
    assert [each.offset for each in rig.engine.read_by_key(shard, b"a", 0).records()] == [7]


@pytest.mark.spec("B10")
def test_compaction_requires_the_key_index_except_in_segments(rig: Rig) -> None:
    if not isinstance(rig.engine, SegmentEngine):
        with pytest.raises(InvalidConfigError, match="index_keys"):
            rig.shard(compact=True, index_keys=False)
        return
    shard = rig.shard(compact=True, index_keys=False)
    for number, key in enumerate((b"a", b"b", b"a", None, b"c", b"b", None, b"a")):
        rig.engine.write(shard, record(number, key=key))
    retained(rig)
    assert offsets(rig, shard) == [3, 4, 5, 6, 7]


@pytest.mark.spec("B10")
@pytest.mark.promise("P1")
def test_invisible_record_does_not_supersede_a_visible_one(rig: Rig) -> None:
    if not rig.is_durable:
        pytest.skip("everything is seen at once in memory")
    shard = rig.shard(compact=True)
    rig.engine.write(shard, record("old", key=b"k"))
    rig.engine.write(shard, record("other", key=b"l"))
    with rig.syncs_held():
        append = rig.engine.write(shard, record("new", key=b"k"), Durability.SYNCED)
        rig.engine.retain(rig.clock.now_ms)
        assert offsets(rig, shard) == [0, 1]
    rig.engine.wait(append)
    retained(rig)
    assert offsets(rig, shard) == [1, 2]
