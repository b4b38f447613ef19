"""COMMITTED and views of lanes: what other processes are told, and that it is never more than is true."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.log_frames import encode_batch

from basaltmq.errors import CorruptionError, StorageError, StoreReadOnlyError
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.log.committed import NAME, Committed, Mark, decode_mark, encode_mark, read_mark
from basaltmq.log.lane import Lane, LaneOptions
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import repair, scan
from basaltmq.log.segment import SegmentGoneError, segment_name


def open_lane(path: Path, now_ms: int = 1_000_000, **options: int) -> Lane:
    return Lane.open(path, clock_ms=lambda: now_ms, random_u32=lambda: 77, options=LaneOptions(**options))


def put(lane: Lane, value: bytes, base: int = 0) -> int:
    parts = encode_batch(lane.seed, 1, base, ColumnBatch.from_records([Record(value)], 5), 5)
    return lane.append(parts, sum(map(len, parts)))


@pytest.mark.parametrize("is_doubted", [False, True])
def test_a_mark_survives_its_bytes_and_no_single_changed_byte_does(is_doubted: bool) -> None:
    raw = encode_mark(Mark(3, 1 << 40, is_doubted))
    assert decode_mark(raw) == Mark(3, 1 << 40, is_doubted)
    for at in range(len(raw)):
        for bits in (1, 0x80, raw[at] ^ encode_mark(Mark(3, 1 << 40, not is_doubted))[at] or 0xFF):
            changed = bytearray(raw)
            changed[at] ^= bits
            assert decode_mark(bytes(changed)) is None
        assert decode_mark(raw[:at]) is None
    assert decode_mark(raw + b"\0") is None


@pytest.mark.promise("P3")
def test_the_published_position_follows_syncs_not_writes(tmp_path: Path) -> None:
    lane = open_lane(tmp_path)
    assert read_mark(tmp_path) is None
    put(lane, b"a")
    lane.sync()
    synced = lane.end
    put(lane, b"b", 1)
    mark = read_mark(tmp_path)
    assert mark is not None
    assert mark.synced_position == synced < lane.end
    lane.close()
    closed = read_mark(tmp_path)
    assert closed is not None
    assert closed.synced_position == lane.end


def test_each_writer_has_an_epoch_of_its_own_even_with_a_clock_that_goes_back(tmp_path: Path) -> None:
    epochs: list[int] = []
    for now_ms in (1000, 2000, 500, 500):
        lane = open_lane(tmp_path, now_ms)
        put(lane, b"x", len(epochs))
        lane.close()
        mark = read_mark(tmp_path)
        assert mark is not None
        epochs.append(mark.epoch)
    assert epochs == sorted(set(epochs))


@pytest.mark.promise("P3")
@pytest.mark.promise("P7")
def test_where_recovery_cuts_the_lane_back_the_mark_goes_back_before(tmp_path: Path) -> None:
    path = tmp_path / "lane"
    lane = open_lane(path)
    put(lane, b"a")
    kept = lane.end
    put(lane, b"b", 1)
    lane.close()
    with open(path / segment_name(0), "r+b") as file:
        file.seek(kept + 80)
        file.write(b"\xff" * 8)
    seen: list[int] = []
    real = os.ftruncate

    def watched(fd: int, length: int) -> None:
        mark = read_mark(path)
        assert mark is not None
        seen.append(mark.synced_position)
        real(fd, length)

    again = open_lane(path, 2_000_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "ftruncate", watched)
        repair(again, 0, tmp_path / "quarantine")
    assert seen == [kept]
    put(again, b"c" * 500, 1)
    mark = read_mark(path)
    assert mark is not None
    assert mark.synced_position == kept < again.end
    again.close()


def test_a_mark_that_reaches_beyond_a_shortened_lane_is_put_right_at_open(tmp_path: Path) -> None:
    lane = open_lane(tmp_path)
    put(lane, b"a")
    kept = lane.end
    put(lane, b"b", 1)
    lane.close()
    os.truncate(tmp_path / segment_name(0), kept)
    again = open_lane(tmp_path)
    mark = read_mark(tmp_path)
    assert mark is not None
    assert mark.synced_position == kept
    again.close()


def test_a_mark_that_cannot_be_written_stops_no_sync_and_one_that_cannot_be_lowered_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = Committed(tmp_path, 1000, 0)
    committed.publish(64)

    def full(fd: int, raw: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwrite", full)
    committed.publish(128)
    mark = read_mark(tmp_path)
    assert mark is not None
    assert mark.synced_position == 64
    committed.lower(8)
    assert not (tmp_path / NAME).exists()
    committed.close()


def test_recovery_leaves_the_mark_where_it_is(tmp_path: Path) -> None:
    lane = open_lane(tmp_path / "lane")
    put(lane, b"a")
    lane.sync()
    assert repair(lane, 0, tmp_path / "quarantine").quarantined == []
    assert (tmp_path / "lane" / NAME).exists()
    lane.close()


@pytest.mark.spec("B5")
def test_a_view_sees_rolled_segments_whole_and_a_torn_end_not_at_all(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=600)
    for at in range(10):
        put(lane, b"v" * 100, at)
    view = LaneView(tmp_path)
    assert (view.start, view.end, view.seed) == (0, lane.end, 77)
    assert [each.header.base_offset for each in scan(view, 0)] == list(range(10))
    assert not view.has_changed()
    put(lane, b"w", 10)
    assert view.has_changed()
    view.relist()
    assert [each.header.base_offset for each in scan(view, 0)] == list(range(11))
    last = lane.segments()[-1].path
    lane.close()
    with open(last, "ab") as file:
        file.write(b"BSFM torn off")
    view.relist()
    assert [each.header.base_offset for each in scan(view, 0)] == list(range(11))
    view.close()


def test_a_roll_without_growth_is_a_change(tmp_path: Path) -> None:
    lane = open_lane(tmp_path)
    put(lane, b"a")
    view = LaneView(tmp_path)
    lane.roll()
    assert view.has_changed()
    view.relist()
    assert not view.has_changed()
    assert view.covers(0, lane.end)
    lane.close()
    view.close()


def test_a_segment_deleted_under_a_view_is_gone_unless_it_is_held_open(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=600)
    for at in range(12):
        put(lane, b"v" * 100, at)
    lane.sync()
    segments = lane.segments()
    view = LaneView(tmp_path)
    held = view.read(segments[0].start, 64)
    lane.delete(segments[0])
    lane.delete(segments[1])
    assert view.read(segments[0].start, 64) == held
    with pytest.raises(SegmentGoneError):
        view.read(segments[1].start, 64)
    view.relist()
    assert view.open_files() == 0
    assert not view.covers(segments[1].start, lane.end)
    assert view.covers(segments[2].start, lane.end)
    with pytest.raises(SegmentGoneError):
        view.read(segments[0].start, 64)
    lane.close()
    view.close()


def test_a_view_writes_nothing_and_says_so(tmp_path: Path) -> None:
    lane = open_lane(tmp_path)
    put(lane, b"a")
    lane.close()
    before = sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in os.scandir(tmp_path))
    view = LaneView(tmp_path)
    view.sync_to(view.end)
    segment = view.segments()[0]
    refused = (
        lambda: view.append((b"x",), 1),
        view.sync,
        view.roll,
        lambda: view.skip_to(9),
        lambda: view.cut(0, tmp_path / "q"),
        view.settle,
        lambda: view.delete(segment),
        lambda: view.poison(StorageError("x")),
    )
    for call in refused:
        with pytest.raises(StoreReadOnlyError):
            call()
    view.close()
    after = sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in os.scandir(tmp_path))
    assert after == before


def test_where_there_is_no_lane_a_view_says_so(tmp_path: Path) -> None:
    assert not LaneView.exists(tmp_path / "nothing")
    assert not LaneView.exists(tmp_path)
    (tmp_path / segment_name(0)).write_bytes(b"")
    assert LaneView.exists(tmp_path)
    with pytest.raises(CorruptionError, match="neither LANE nor"):
        LaneView(tmp_path)


def test_hardening_syncs_each_segment_that_has_grown_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = open_lane(tmp_path, segment_bytes=600)
    for at in range(12):
        put(lane, b"v" * 100, at)
    view = LaneView(tmp_path)
    synced: list[str] = []
    real = os.fdatasync

    def watched(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", watched)
    assert view.sync_to(view.end) == view.end
    assert synced == [segment.path.name for segment in view.segments()]
    synced.clear()
    assert view.sync_to(view.end) == view.end
    assert synced == []
    put(lane, b"w", 12)
    view.relist()
    view.sync_to(view.end)
    assert synced == [view.segments()[-1].path.name]
    view.close()
    lane.close()
