"""Properties of the segment engine only: damage, invalid input, memory, a stalled store.

The conformance suite tests the behaviour that all engines share.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.unit.streams.segment_rig import SegmentRig

from basaltmq.durability import Durability
from basaltmq.errors import (
    CorruptionError,
    DamagedFrameError,
    DiskFullError,
    LimitExceededError,
    OffsetOutOfRangeError,
    StorePoisonedError,
    StoreStalledError,
)
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import RECORD_BYTES_MAX, Record
from basaltmq.streams.adapter import BATCH_RECORDS_MAX
from basaltmq.streams.engines.segment import reader as segment_reader
from basaltmq.streams.engines.segment.reader import INDEX_WRITE_INTERVAL_MS


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x40
    path.write_bytes(raw)


@pytest.mark.spec("B6")
@pytest.mark.promise("P7")
@pytest.mark.parametrize("place", ["header", "body"])
def test_a_damaged_frame_raises_an_error_that_names_it_and_other_frames_are_readable(
    tmp_path: Path, place: str
) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for number in range(3):
        rig.put(shard, b"%d" % number, b"-")
    entry = next(rig.engine.index.entries(shard, 2))
    flip(rig.engine.lanes[0].log.segments()[0].path, entry.position + (20 if place == "header" else 90))
    assert [record.value for record in rig.engine.read_by_offset(shard, 0, 2).records()] == [b"0", b"-"]
    with pytest.raises(CorruptionError, match=rf"shard {shard}, offsets 2 to 3.*read on from offset 4"):
        rig.engine.read_by_offset(shard, 2).records()
    assert [record.value for record in rig.engine.read_by_offset(shard, 4).records()] == [b"2", b"-"]
    rig.close()


@pytest.mark.promise("P7")
def test_a_rebuild_over_damage_names_the_lost_offsets(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for number in range(4):
        rig.put(shard, b"%d" % number, b"-")
    entry = next(rig.engine.index.entries(shard, 2))
    path = rig.engine.lanes[0].log.segments()[0].path
    rig.close()
    flip(path, entry.position + 3)
    rig.wipe_index()
    rig.open()
    assert [str(loss) for loss in rig.engine.losses] == [f"shard {shard} has lost offsets 2 to 3"]
    assert [damage.begin for damage in rig.engine.damages] == [entry.position]
    assert [record.offset for record in rig.drained(shard)] == [0, 1, 4, 5, 6, 7]
    assert rig.put(shard, b"next") == 8
    rig.close()


@pytest.mark.promise("P11")
def test_a_full_disk_poisons_the_lane_and_written_records_survive_a_reopen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    rig.put(shard, b"kept")
    real = os.writev

    def half(fd: int, parts: Any) -> int:
        real(fd, [b"".join(parts)[:50]])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", half)
    with pytest.raises(DiskFullError):
        rig.put(shard, b"lost")
    monkeypatch.undo()
    with pytest.raises(StorePoisonedError):
        rig.put(shard, b"refused")
    assert [record.value for record in rig.drained(shard)] == [b"kept"]
    rig.crash()
    rig.open()
    assert len(rig.engine.quarantined) == 1
    assert rig.put(shard, b"again") == 1
    assert [record.value for record in rig.drained(shard)] == [b"kept", b"again"]
    rig.close()


@pytest.mark.promise("P1")
@pytest.mark.promise("P6")
def test_awaited_frames_are_written_before_their_index_rows_and_at_the_latest_by_the_sync(
    tmp_path: Path,
) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    path = rig.engine.lanes[0].log.segments()[0].path
    rig.engine.batch_write(shard, (Record(b"one"),), Durability.SYNCED)
    assert path.stat().st_size == 0
    rig.engine.index.flush()
    first = path.stat().st_size
    assert first == rig.engine.lanes[0].log.end > 0
    second = rig.engine.batch_write(shard, (Record(b"two"),), Durability.SYNCED)
    assert (path.stat().st_size, len(rig.drained(shard))) == (first, 0)
    rig.engine.wait(second)
    assert path.stat().st_size == rig.engine.lanes[0].log.synced_position > first
    assert [record.value for record in rig.drained(shard)] == [b"one", b"two"]
    rig.engine.batch_write(shard, (Record(b"three"),), Durability.SYNCED)
    rig.engine.batch_write(shard, (Record(b"four"),), Durability.WRITTEN)
    assert path.stat().st_size == rig.engine.lanes[0].log.end, "a write without a sync also writes the gathered frames"
    before = rig.rows()
    assert rig.rebuilt() == before
    rig.close()


@pytest.mark.spec("D2")
def test_index_rows_are_written_in_portions_while_no_frame_awaits_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    index = rig.engine.index
    rig.put(shard, b"0")
    gathered = index.rows
    rig.put(shard, b"1")
    assert index.rows > gathered, "no write is due"
    rig.now_ms += INDEX_WRITE_INTERVAL_MS
    rig.put(shard, b"2")
    assert index.rows <= gathered, "earlier rows are written"
    rig.engine.batch_write(shard, (Record(b"3"),), Durability.SYNCED)
    rig.now_ms += INDEX_WRITE_INTERVAL_MS
    before = index.rows
    last = rig.engine.batch_write(shard, (Record(b"4"),), Durability.SYNCED)
    assert index.rows > before, "a frame that awaits a sync is not written to its segment for the index"
    rig.engine.wait(last)
    real = rig.store.write

    def stalled(*_: Any, **__: Any) -> None:
        raise StoreStalledError("behind")

    monkeypatch.setattr(rig.store, "write", stalled)
    before = index.rows
    rig.put(shard, b"5")
    assert index.rows > before, "a portion that the store refuses does not fail the write"
    monkeypatch.setattr(rig.store, "write", real)
    rig.now_ms += INDEX_WRITE_INTERVAL_MS
    rig.put(shard, b"6")
    assert index.rows <= gathered
    monkeypatch.setattr(segment_reader, "INDEX_WRITE_ROWS_MAX", 0)
    rig.now_ms += INDEX_WRITE_INTERVAL_MS
    rig.put(shard, b"7")
    assert index.rows > gathered, "so many rows are written only at the limit"
    assert [record.value for record in rig.drained(shard)] == [b"%d" % at for at in range(8)]
    written = rig.rows()
    assert rig.rebuilt() == written
    rig.close()


@pytest.mark.promise("P8")
def test_a_stalled_store_refuses_the_write_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for _ in range(4):
        rig.put(shard, Record(b"x", timestamp_ms=1))
    monkeypatch.setattr(rig.engine.index, "rows_max", 4)

    def stalled(*_: Any, **__: Any) -> None:
        raise StoreStalledError("behind")

    real = rig.store.write
    monkeypatch.setattr(rig.store, "write", stalled)
    with pytest.raises(StoreStalledError):
        rig.put(shard, b"refused")
    assert len(rig.drained(shard)) == 4
    monkeypatch.setattr(rig.store, "write", real)
    assert rig.put(shard, b"y") == 4
    before = rig.rows()
    assert rig.rebuilt() == before
    rig.close()


@pytest.mark.promise("P8")
def test_states_of_idle_shards_are_evicted_and_reloaded_correctly(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shards = [rig.shard() for _ in range(50)]
    rig.engine._states._limit = 5
    for turn in range(3):
        for shard in shards:
            assert rig.put(shard, b"%d" % turn) == turn
    assert len(rig.engine._states) <= 5
    rig.engine.index.flush()
    assert len(rig.engine._states.loaded()) <= 5
    for shard in shards:
        assert [record.value for record in rig.drained(shard)] == [b"0", b"1", b"2"]
    rig.close()


@pytest.mark.spec("B6")
def test_columns_have_the_same_limits_as_records(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    with pytest.raises(LimitExceededError, match="record 0"):
        rig.engine.batch_write(shard, ColumnBatch.from_records([Record(bytes(RECORD_BYTES_MAX + 1))], 0))
    with pytest.raises(LimitExceededError, match="records"):
        rig.engine.batch_write(shard, ColumnBatch.from_records([Record(b"")] * (BATCH_RECORDS_MAX + 1), 0))
    holes = ColumnBatch.from_records([Record(b"a"), Record(b"b"), Record(b"c")], 0).select([True, False, True])
    assert holes is not None
    rig.engine.batch_write(shard, holes)
    assert [(record.offset, record.value) for record in rig.drained(shard)] == [(0, b"a"), (1, b"c")]
    rig.close()


@pytest.mark.promise("P3")
def test_a_read_ends_at_a_frame_boundary_and_partial_reads_return_every_record_once(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=700)
    shard = rig.shard()
    values = [b"%03d" % number for number in range(60)]
    for begin in range(0, 60, 4):
        rig.put(shard, *values[begin : begin + 4])
    for max_records in (1, 3, 4, 7, 100):
        for max_bytes in (0, 5, 12, 50, 10_000):
            at = 0
            found: list[bytes] = []
            while at < 60:
                batch = rig.engine.read_by_offset(shard, at, max_records, max_bytes)
                records = batch.records()
                assert 0 < len(records) <= max_records
                assert len(records) == 1 or sum(len(record.value or b"") for record in records) <= max_bytes
                assert batch.arrow().column("offset").to_pylist() == [record.offset for record in records]
                found += [(record.value or b"") for record in records]
                at = batch.next_offset
            assert found == values
    rig.close()


def test_shards_are_distributed_over_lanes_and_all_lanes_on_disk_are_opened(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, lanes=3)
    shards = [rig.shard() for _ in range(30)]
    for shard in shards:
        rig.put(shard, b"x")
    assert {rig.shards.get(shard).lane for shard in shards} == {0, 1, 2}
    rig.close()
    rig.lanes = 1
    rig.open()
    assert all(len(rig.drained(shard)) == 1 for shard in shards)
    rig.close()


@pytest.mark.promise("P1")
def test_a_failed_sync_fails_its_waiters_and_hides_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    append = rig.engine.batch_write(shard, [Record(b"x")], Durability.SYNCED)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(Exception, match="Input/output"):
        rig.engine.wait(append)
    monkeypatch.undo()
    assert rig.engine.read_by_offset(shard, 0).records() == []
    rig.crash()


@pytest.mark.promise("P3")
@pytest.mark.spec("B2")
@pytest.mark.parametrize("change", ["delete", "trim", "clean", "compact", "damage"])
def test_a_continued_read_sees_changes_made_since(tmp_path: Path, change: str) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=2048)
    shard = rig.shard(compact=True)
    for at in range(60):
        rig.put(shard, *(Record(b"%d" % at, b"k%d" % (each if at < 40 else at)) for each in range(4)))
    other = rig.engine.read_by_offset(shard, 0, 1000, 60)
    first = rig.engine.read_by_offset(shard, 0, 1000, 60)
    assert first.next_offset == other.next_offset
    reached = first.next_offset
    assert 0 < reached < 100
    assert reached % 4 == 0
    if change == "delete":
        rig.engine.delete_by_offset(shard, [reached, reached + 5])
    elif change == "trim":
        rig.engine.delete_records_before(shard, 120)
        with pytest.raises(OffsetOutOfRangeError):
            rig.engine.read_by_offset(shard, reached)
        reached = 120
    elif change == "clean":
        rig.engine.delete_by_offset(shard, list(range(reached + 1, 100)))
        rig.clean()
    elif change == "compact":
        rig.engine.retain(rig.now_ms + 10**9)
    else:
        entry = next(rig.engine.index.entries(shard, reached))
        segment = rig.engine.lanes[0].log.segment_at(entry.position)
        raw = bytearray(segment.path.read_bytes())
        raw[entry.position - segment.start + 80] ^= 1
        segment.path.write_bytes(raw)
        with pytest.raises(DamagedFrameError, match=f"offsets {reached} to {reached + 3}"):
            rig.engine.read_by_offset(shard, reached)
        reached += 4
    left = [record for record in rig.drained(shard) if record.offset >= reached] if change != "damage" else None
    seen = []
    at = reached
    while (batch := rig.engine.read_by_offset(shard, at, 1000, 60)).next_offset != at:
        seen += batch.records()
        assert batch.arrow().column("offset").to_pylist() == [record.offset for record in batch.records()]
        at = batch.next_offset
    if left is not None:
        assert seen == left
    assert at == 240
    rig.close()
