"""Cleaning frees space, does not disturb readers, and never restores deleted records."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.unit.streams.segment_rig import SegmentRig, explain

from basaltmq.log.batches.record import Record
from basaltmq.log.frame import RELOCATED, REWRITTEN
from basaltmq.log.recovery import scan
from basaltmq.log.segment import SegmentState


def same_when_rebuilt(rig: SegmentRig) -> None:
    before = rig.rows()
    after = rig.rebuilt()
    assert after == before, explain(before, after)


@pytest.mark.spec("B10", "D4")
def test_segments_without_live_frames_are_deleted(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1000)
    shard = rig.shard()
    for _ in range(40):
        rig.put(shard, bytes(200))
    rig.engine.delete_records_before(shard, 38)
    rig.clean()
    assert len(rig.engine.lanes[0].log.segments()) <= 2
    assert [record.offset for record in rig.drained(shard)] == [38, 39]
    same_when_rebuilt(rig)
    rig.close()


@pytest.mark.spec("D4")
@pytest.mark.promise("P10")
def test_a_deleted_shard_leaves_no_rows_and_does_not_reappear(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard, other = rig.shard(), rig.shard()
    for number in range(5):
        rig.put(shard, Record(b"%d" % number, b"k", (), (b"t",), expire_at_ms=rig.now_ms + 10**6))
        rig.put(other, b"kept")
    rig.engine.delete_by_offset(shard, [2])
    assert rig.rows_of(shard)
    rig.engine.delete_shard(shard)
    assert rig.rows_of(shard) == []
    rig.crash()
    rig.open()
    assert rig.rows_of(shard) == []
    same_when_rebuilt(rig)
    assert rig.rows_of(shard) == []
    assert len(rig.drained(other)) == 5
    rig.close()


@pytest.mark.spec("E5", "B10")
def test_live_frames_of_a_half_empty_segment_move_and_keep_their_offsets(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=2000)
    busy, quiet = rig.shard(), rig.shard()
    for number in range(60):
        rig.put(busy, bytes(200))
        if number % 10 == 0:
            rig.put(quiet, Record(b"%d" % number, b"k%d" % number, (), (b"t",)))
    rig.engine.delete_records_before(busy, 59)
    size = sum(segment.size_bytes for segment in rig.engine.lanes[0].log.segments())
    rig.clean()
    log = rig.engine.lanes[0].log
    assert sum(segment.size_bytes for segment in log.segments()) < size / 3
    assert [record.value for record in rig.drained(quiet)] == [b"%d" % number for number in range(0, 60, 10)]
    assert [record.offset for record in rig.engine.read_by_key(quiet, b"k20", 0).records()] == [2]
    assert any(found.header.flags & RELOCATED for found in scan(log, log.start))
    same_when_rebuilt(rig)
    rig.close()


@pytest.mark.promise("P10")
@pytest.mark.parametrize("step", ["copied", "forgotten"])
def test_a_crash_in_the_middle_of_cleaning_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1500)
    busy, quiet = rig.shard(), rig.shard()
    for number in range(30):
        rig.put(busy, bytes(200))
        rig.put(quiet, b"%d" % number)
    rig.engine.delete_records_before(busy, 30)

    class Killed(Exception):
        pass

    def kill(*_: object) -> None:
        raise Killed

    name = "checkpoint" if step == "copied" else "delete"
    monkeypatch.setattr(rig.engine if step == "copied" else rig.engine.lanes[0].log, name, kill)
    with pytest.raises(Killed):
        rig.clean()
    rig.crash()
    rig.open()
    assert [record.value for record in rig.drained(quiet)] == [b"%d" % number for number in range(30)]
    same_when_rebuilt(rig)
    rig.clean()
    assert [record.value for record in rig.drained(quiet)] == [b"%d" % number for number in range(30)]
    same_when_rebuilt(rig)
    rig.close()


@pytest.mark.promise("P7")
def test_a_segment_with_damage_is_kept_for_the_operator(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1000)
    shard = rig.shard()
    for _ in range(12):
        rig.put(shard, bytes(200))
    first = rig.engine.lanes[0].log.segments()[0]
    raw = bytearray(first.path.read_bytes())
    raw[100] ^= 1
    first.path.write_bytes(raw)
    rig.engine.delete_records_before(shard, 12)
    rig.clean()
    assert first.path.exists()
    assert first.state is SegmentState.SEALED
    assert [damage.path for damage in rig.engine.damages] == [first.path]
    rig.close()


@pytest.mark.spec("B10")
def test_compaction_merges_small_frames_and_keeps_the_latest_per_key(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1 << 20)
    shard = rig.shard(compact=True)
    for number in range(200):
        rig.put(shard, Record(b"%d" % number, b"key %d" % (number % 3)))
    rig.put(shard, b"no key")
    rig.engine.retain(rig.now_ms)
    assert [record.offset for record in rig.drained(shard)] == [197, 198, 199, 200]
    assert len(list(rig.engine.index.entries(shard, 0))) <= 3
    log = rig.engine.lanes[0].log
    assert any(found.header.flags & REWRITTEN for found in scan(log, log.start))
    same_when_rebuilt(rig)
    assert rig.put(shard, b"next") == 201
    rig.close()


@pytest.mark.spec("B10")
def test_frames_with_expired_records_shrink_and_offsets_continue(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for _ in range(20):
        rig.put(shard, *(Record(bytes(50), expire_at_ms=rig.now_ms + 100) for _ in range(3)))
    rig.now_ms += 200
    assert rig.engine.retain(rig.now_ms) == 60
    assert rig.drained(shard) == []
    info = rig.engine.shard_info(shard)
    assert (info.start_offset, info.next_offset, info.records) == (0, 60, 0)
    assert len(list(rig.engine.index.entries(shard, 0))) == 1
    same_when_rebuilt(rig)
    assert rig.put(shard, b"next") == 60
    rig.close()


def test_readers_continue_while_cleaning_deletes_their_segments(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=3000)
    busy, quiet = rig.shard(), rig.shard()
    for number in range(150):
        rig.put(busy, bytes(100))
        rig.put(quiet, b"%d" % number)
    stop = threading.Event()
    faults: list[BaseException] = []
    rounds = [0]

    def read() -> None:
        try:
            while not stop.is_set():
                assert [record.value for record in rig.drained(quiet)] == [b"%d" % number for number in range(150)]
                rounds[0] += 1
        except BaseException as error:
            faults.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for start in range(10, 151, 10):
        rig.engine.delete_records_before(busy, start)
        rig.clean()
    stop.set()
    reader.join(60)
    assert not faults
    assert rounds[0]
    assert rig.engine.lanes[0].log.start > 0
    rig.close()


def files_bytes(rig: SegmentRig) -> int:
    return sum(each.stat().st_size for each in (rig.path / "log").rglob("0*.log"))


@pytest.mark.promise("P10")
@pytest.mark.parametrize("how", ["delete", "trim"])
def test_the_active_segment_is_cleaned_when_it_is_mostly_garbage(tmp_path: Path, how: str) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=256 << 20)
    shard, kept = rig.shard(), rig.shard()
    rig.put(kept, b"kept")
    for _ in range(6):
        rig.put(shard, bytes(1 << 20))
    assert files_bytes(rig) > 6 << 20
    if how == "delete":
        rig.engine.delete_shard(shard)
    else:
        rig.engine.delete_records_before(shard, 6)
    for _ in range(3):
        rig.engine.retain(rig.now_ms)
    assert files_bytes(rig) < 1 << 20
    assert [record.value for record in rig.engine.read_by_offset(kept, 0).records()] == [b"kept"]
    rig.close()


def test_little_garbage_in_the_active_segment_is_cleaned_only_when_space_is_low(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=256 << 20)
    shard = rig.shard()
    rig.put(shard, bytes(1 << 20))
    rig.engine.delete_records_before(shard, 1)
    for _ in range(3):
        rig.engine.retain(rig.now_ms)
    assert files_bytes(rig) > 1 << 20
    rig.engine.reclaim(lambda: True)
    assert files_bytes(rig) > 1 << 20
    rig.engine.reclaim(lambda: False)
    assert files_bytes(rig) < 1 << 16
    rig.close()
