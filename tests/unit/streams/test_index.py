"""The consume-queue index: keys, lookups over buffered and written entries, time rows, rebuild."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.streams.segment_rig import INDEX, SegmentRig, explain

from basaltmq.errors import CorruptionError
from basaltmq.log.batches.record import Record
from basaltmq.store.batch import Batch
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.adapter import IfAllOlder
from basaltmq.streams.engines.segment.index.rows import Entry, SegmentStats

U64 = st.integers(0, (1 << 64) - 1)
U32 = st.integers(0, (1 << 32) - 1)


@given(U64, U64, U64)
def test_frame_keys_survive_a_round_trip_and_sort_by_shard_and_offset(shard: int, one: int, other: int) -> None:
    key = stream_keys.frame_key(shard, one)
    assert stream_keys.decode_frame_key(key) == (shard, one)
    assert (key < stream_keys.frame_key(shard, other)) == (one < other)
    assert stream_keys.decode_deleted_record_key(stream_keys.deleted_record_key(shard, one)) == (shard, one)
    with pytest.raises(CorruptionError):
        stream_keys.decode_deleted_record_key(key)


@given(U32, U64, U64)
def test_log_keys_survive_a_round_trip(lane: int, start: int, shard: int) -> None:
    assert stream_keys.decode_log_checkpoint_key(stream_keys.log_checkpoint_key(lane)) == lane
    assert stream_keys.decode_log_synced_key(stream_keys.log_synced_key(lane)) == lane
    assert stream_keys.decode_log_changed_key(stream_keys.log_changed_key(lane)) == lane
    assert stream_keys.decode_log_segment_key(stream_keys.log_segment_key(lane, start)) == (lane, start)
    assert stream_keys.decode_log_unsynced_key(stream_keys.log_unsynced_key(lane, start)) == (lane, start)
    with pytest.raises(CorruptionError):
        stream_keys.decode_log_unsynced_key(stream_keys.log_segment_key(lane, start))
    with pytest.raises(CorruptionError):
        stream_keys.decode_log_changed_key(stream_keys.log_synced_key(lane))
    assert stream_keys.decode_trimmed_shard_key(stream_keys.trimmed_shard_key(shard)) == shard
    with pytest.raises(CorruptionError):
        stream_keys.decode_log_synced_key(stream_keys.log_checkpoint_key(lane))


def test_entries_and_stats_survive_a_round_trip_and_other_lengths_are_refused() -> None:
    entry = Entry(9, 5, 4096, 800, 5, 77, 78, 1 << 63, 99, 3)
    assert Entry.decode(9, entry.encode()) == entry
    stats = SegmentStats()
    stats.add(80, 3, 9, 5)
    assert SegmentStats(stats.encode()).encode() == stats.encode()
    with pytest.raises(CorruptionError):
        Entry.decode(9, entry.encode()[:-1])
    with pytest.raises(CorruptionError):
        SegmentStats(b"short")


@pytest.mark.spec("D2")
@pytest.mark.parametrize("flush_after", [0, 3, 5])
def test_one_seek_finds_the_frame_of_an_offset_buffered_or_written(tmp_path: Path, flush_after: int) -> None:
    rig = SegmentRig(tmp_path)
    shard, other = rig.shard(), rig.shard()
    for number in range(5):
        rig.put(shard, b"a", b"b", b"c")
        rig.put(other, b"x")
        if number + 1 == flush_after:
            rig.engine.index.flush()
    for offset in range(15):
        found = list(rig.engine.index.entries(shard, offset))
        assert [entry.base_offset for entry in found] == list(range(offset // 3 * 3, 15, 3))
    assert list(rig.engine.index.entries(shard, 15)) == []
    rig.close()


@pytest.mark.spec("B2")
def test_lookups_of_unordered_times_are_exact_also_after_a_trim(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for time_ms in (100, 50, 60, 300, 200, 400):
        rig.put(shard, Record(b"", timestamp_ms=time_ms))
    find = rig.engine.get_offset_by_timestamp
    assert [find(shard, at, IfAllOlder.LATEST) for at in (10, 60, 101, 350, 401)] == [0, 0, 3, 5, 6]
    rig.engine.delete_records_before(shard, 1)
    assert [find(shard, at, IfAllOlder.LATEST) for at in (10, 55, 61, 350)] == [1, 2, 3, 5]
    before = rig.rows()
    after = rig.rebuilt()
    assert after == before, explain(before, after)
    rig.close()


@pytest.mark.spec("D3")
@pytest.mark.promise("P6", "P9")
def test_only_frames_after_the_checkpoint_are_read_at_start(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for _ in range(20):
        rig.put(shard, bytes(300))
    rig.engine.checkpoint()
    done = rig.engine.lanes[0].log.end
    rig.put(shard, b"tail")
    end = rig.engine.lanes[0].log.end
    rig.crash()
    rig.open()
    assert rig.progress == [(end - done, end - done)]
    assert rig.drained(shard)[-1].value == b"tail"
    rig.close()


@pytest.mark.spec("D3")
@pytest.mark.promise("P6")
def test_a_lost_index_is_rebuilt_identically_and_reports_progress(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path, segment_bytes=1000)
    shard = rig.shard()
    for number in range(30):
        rig.put(shard, Record(b"%d" % number, b"key %d" % (number % 4), (), (b"tag",), number, number * 5))
    rig.engine.delete_by_offset(shard, [3, 4])
    before = rig.rows()
    after = rig.rebuilt()
    assert after == before, explain(before, after)
    assert rig.progress[-1][0] == rig.progress[-1][1] > 0
    rig.close()


@pytest.mark.promise("P7")
def test_an_index_ahead_of_the_log_is_rolled_back(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for number in range(6):
        rig.put(shard, b"%d" % number)
    third = next(rig.engine.index.entries(shard, 3)).position
    rig.engine.index.settle()
    rig.crash()
    file = next((tmp_path / "log" / "0000").glob("*.log"))
    file.write_bytes(file.read_bytes()[:third])
    rig.open()
    assert [record.value for record in rig.drained(shard)] == [b"0", b"1", b"2"]
    assert rig.put(shard, b"again") == 3
    rig.close()


@pytest.mark.promise("P7")
def test_zeroed_frames_are_detected_although_the_file_size_is_right(tmp_path: Path) -> None:
    rig = SegmentRig(tmp_path)
    shard = rig.shard()
    for number in range(6):
        rig.put(shard, b"%d" % number)
    third = next(rig.engine.index.entries(shard, 3)).position
    rig.engine.index.settle()
    rig.crash()
    file = next((tmp_path / "log" / "0000").glob("*.log"))
    raw = file.read_bytes()
    file.write_bytes(raw[:third] + bytes(len(raw) - third))
    rig.open()
    assert [record.value for record in rig.drained(shard)] == [b"0", b"1", b"2"]
    assert rig.engine.quarantined
    rig.close()


@pytest.mark.spec("D4")
@pytest.mark.promise("P6", "P10")
@pytest.mark.parametrize("what", ["trim", "delete"])
def test_an_index_behind_the_shard_rows_after_a_power_loss_is_brought_up_to_date(tmp_path: Path, what: str) -> None:
    rig = SegmentRig(tmp_path)
    shard, other = rig.shard(), rig.shard()
    for number in range(6):
        rig.put(shard, Record(b"%d" % number, b"k", (), (b"t",)))
        rig.put(other, b"kept")
    rig.engine.checkpoint()
    old = dict(rig.store.scan(INDEX))
    end = rig.engine.lanes[0].log.end
    if what == "trim":
        rig.engine.delete_records_before(shard, 4)
    else:
        rig.engine.delete_shard(shard)
    rig.crash()
    # The disk has the synced shard rows, but neither the index nor the TRIM frame of the change.
    rig.wipe_index()
    batch = Batch()
    for key, value in old.items():
        batch.put(INDEX, key, value)
    rig.store.write(batch)
    os.truncate(next((tmp_path / "log" / "0000").glob("*.log")), end)
    rig.open()
    offsets = {stream_keys.decode_frame_key(key)[1] for key in rig.rows_of(shard) if key[:1] == b"O"}
    assert offsets == ({4, 5} if what == "trim" else set())
    before = rig.rows()
    after = rig.rebuilt()
    assert after == before, explain(before, after)
    assert len(rig.drained(other)) == 6
    rig.close()
