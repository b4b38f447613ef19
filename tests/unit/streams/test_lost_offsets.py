"""Offsets that a log lost with its tail are not assigned again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.streams.segment_rig import SegmentRig, explain

from basaltmq.durability import Durability
from basaltmq.log.recovery import Loss, LostTail
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.lost_offsets import COMMITTED_AHEAD_MAX
from basaltmq.streams.engines.segment.producers_row import Known, Producer, decode_row, encode_row

pytestmark = [pytest.mark.promise("P7", "P10"), pytest.mark.spec("B6")]


def only_segment(rig: SegmentRig) -> Path:
    return next((rig.path / "log" / "0000").glob("*.log"))


def filled(path: Path, **config: object) -> tuple[SegmentRig, int]:
    """Write offsets 0 to 9 in five frames."""
    rig = SegmentRig(path)
    shard = rig.shard(**config)
    for _ in range(5):
        rig.put(shard, b"a", b"b")
    return rig, shard


def position_of(rig: SegmentRig, shard: int, offset: int) -> int:
    return next(rig.engine.index.entries(shard, offset)).position


def commit(rig: SegmentRig, shard: int, group: str, offset: int) -> None:
    meta = rig.shards.get(shard)
    rig.offsets.commit(group, {(meta.topic_id, meta.partition): offset})


@pytest.mark.parametrize("is_removed", [True, False])
def test_offsets_of_a_lost_synced_tail_are_not_reused(tmp_path: Path, is_removed: bool) -> None:
    rig, shard = filled(tmp_path)
    other = rig.shard()
    kept = 0 if is_removed else position_of(rig, shard, 6)
    rig.close()
    if is_removed:
        only_segment(rig).unlink()
    else:
        os.truncate(only_segment(rig), kept)
    rig.open()
    first_lost = 0 if is_removed else 6
    assert [type(each) for each in rig.engine.losses] == [LostTail, Loss]
    assert rig.engine.losses[1] == Loss(shard, first_lost, 9)
    assert rig.put(shard, b"new") == 10
    assert rig.put(other, b"first") == 0, "a shard without loss continues at its next offset"
    expected = [*range(first_lost), 10]
    assert [record.offset for record in rig.drained(shard)] == expected
    rows = rig.rows()
    rebuilt = rig.rebuilt()
    assert rebuilt == rows, explain(rows, rebuilt)
    assert rig.put(shard, b"newer") == 11
    assert [record.offset for record in rig.drained(shard)] == [*expected, 11]
    rig.close()


def test_offsets_of_a_damaged_last_synced_frame_are_not_reused(tmp_path: Path) -> None:
    rig, shard = filled(tmp_path)
    rig.engine.checkpoint()
    rig.put(shard, b"c", b"d")
    at = rig.engine.lanes[0].log.end
    rig.put(shard, b"lost " * 20)
    rig.engine.lanes[0].log.sync()
    rig.crash()
    with open(only_segment(rig), "r+b") as file:
        file.seek(at + 100)
        file.write(b"\xff" * 8)
    rig.open()
    assert rig.engine.lanes[0].log.end == at, "the damaged frame was truncated"
    assert Loss(shard, 12, 12) in rig.engine.losses
    assert rig.put(shard, b"new") == 13
    rig.close()


def test_an_unsynced_lost_frame_leaves_no_offset_gap(tmp_path: Path) -> None:
    rig, shard = filled(tmp_path)
    rig.engine.checkpoint()
    at = rig.engine.lanes[0].log.end
    rig.put(shard, b"torn" * 20)
    rig.crash()
    os.truncate(only_segment(rig), at + 100)
    rig.open()
    assert not rig.engine.losses
    assert rig.put(shard, b"new") == 10
    rig.close()


def test_a_group_that_committed_lost_records_skips_no_new_records(tmp_path: Path) -> None:
    """Records at `written` were read and committed, and a power loss removed them before a sync."""
    rig, shard = filled(tmp_path)
    wild = rig.shard()
    rig.put(wild, b"x")
    rig.engine.checkpoint()
    at = rig.engine.lanes[0].log.end
    rig.put(shard, b"c", b"d", b"e")
    rig.engine.index.settle()
    commit(rig, shard, "readers", 12)
    commit(rig, shard, "slow readers", 3)
    commit(rig, wild, "mistaken", 2 + COMMITTED_AHEAD_MAX)
    rig.crash()
    os.truncate(only_segment(rig), at)
    rig.open()
    assert not rig.engine.losses, "no record confirmed at synced is lost"
    assert rig.put(shard, b"new") == 12
    assert [record.offset for record in rig.drained(shard)] == [*range(10), 12]
    assert rig.put(wild, b"y") == 1, "a commit far beyond the log is ignored"
    rig.close()


def test_a_producer_may_send_a_lost_batch_again(tmp_path: Path) -> None:
    rig, shard = filled(tmp_path, durability=Durability.SYNCED)
    kept = position_of(rig, shard, 6)
    known = Known()
    known[77] = Producer(0)
    known[77].batches.extend([(0, 1, 4), (2, 3, 6), (4, 5, 8)])
    batch = Batch()
    batch.put(Family.PRODUCERS, stream_keys.producers_key(shard), encode_row(10, known))
    rig.store.write(batch)
    rig.close()
    os.truncate(only_segment(rig), kept)
    rig.open()
    assert rig.engine.shard_info(shard).next_offset == 10
    raw = rig.store.get(Family.PRODUCERS, stream_keys.producers_key(shard))
    assert raw is not None
    assert list(decode_row(raw)[1][77].batches) == [(0, 1, 4)]
    rig.close()
