"""Frames of a shard scattered between those of others: located by the index, read like adjacent ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.unit.streams.segment_rig import SegmentRig

from basaltmq.errors import DamagedFrameError
from basaltmq.log.batches.record import Record

SEED = 20_261_116

pytestmark = [pytest.mark.spec("B2"), pytest.mark.promise("P3")]


def test_every_record_is_read_once_with_any_limits_and_order_of_frames(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    rig = SegmentRig(tmp_path, segment_bytes=1 << 14)
    shards = [rig.shard(), rig.shard(), rig.shard()]
    written: dict[int, list[Record]] = {shard: [] for shard in shards}
    for _ in range(400):
        shard = rng.choice(shards)
        records = [
            Record(
                rng.randbytes(rng.choice((0, 8, 8, 8, 40))),
                rng.choice((None, b"k", b"key-7")),
                timestamp_ms=rig.now_ms,
                expire_at_ms=rng.choice((0, 0, 0, 0, 0, rig.now_ms + 10**6)),
            )
            for _ in range(rng.choice((1, 2, 2, 3, 9)))
        ]
        written[shard] += records
        rig.put(shard, *records)
    rig.engine.index.settle()
    for shard in shards:
        for _ in range(6):
            found: list[tuple[int, bytes | None, bytes | None]] = []
            rows: list[tuple[int, bytes | None, bytes | None]] = []
            at = 0
            while at < len(written[shard]):
                batch = rig.engine.read_by_offset(shard, at, rng.choice((1, 5, 40, 1000)), rng.choice((1, 90, 5000)))
                records_read = [(each.offset, each.key, each.value) for each in batch.records()]
                assert records_read, f"seed {SEED}: nothing at {at} of {len(written[shard])}"
                assert records_read[-1][0] < batch.next_offset, f"seed {SEED}"
                found += records_read
                arrow = batch.arrow()
                rows += zip(*(arrow.column(name).to_pylist() for name in ("offset", "key", "value")), strict=True)
                at = batch.next_offset
            expected = [(offset, each.key, each.value) for offset, each in enumerate(written[shard])]
            assert found == expected, f"seed {SEED}"
            assert rows == expected, f"seed {SEED}"
    rig.close()


def test_damage_between_scattered_frames_is_reported_after_the_frames_before_it(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1 << 20)
    shard, other = rig.shard(), rig.shard()
    for at in range(20):
        rig.put(shard, b"%03d" % at, b"second")
        rig.put(other, b"other")
    rig.engine.index.settle()
    entry = next(rig.engine.index.entries(shard, 21))
    segment = rig.engine.lanes[0].log.segment_at(entry.position)
    raw = bytearray(segment.path.read_bytes())
    raw[entry.position - segment.start + 80] ^= 1
    segment.path.write_bytes(raw)
    before = rig.engine.read_by_offset(shard, 0)
    assert [each.offset for each in before.records()] == list(range(20))
    assert before.next_offset == 20
    with pytest.raises(DamagedFrameError, match="offsets 20 to 21"):
        rig.engine.read_by_offset(shard, before.next_offset)
    after = rig.engine.read_by_offset(shard, 22)
    assert [each.offset for each in after.records()] == list(range(22, 40))
    rig.close()


def test_scattered_frames_are_read_in_groups(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1 << 20)
    shard, other = rig.shard(), rig.shard()
    for _ in range(50):
        rig.put(shard, b"a", b"b")
        rig.put(other, b"c")
    rig.engine.index.settle()
    found = rig.engine.read_by_offset(shard, 0)
    assert len(found) == 100
    assert len(found._parts) == 1
    rig.close()
