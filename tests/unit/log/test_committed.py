"""COMMITTED and views of lanes: other processes never see a position that is too high."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.log_frames import encode_batch

from basaltmq.errors import CorruptionError, SegmentGoneError, StorageError, StoreReadOnlyError
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.log.committed import NAME, Committed, Mark, decode_mark, encode_mark, read_mark
from basaltmq.log.lane import Lane
from basaltmq.log.lane_options import LaneOptions
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import repair, scan
from basaltmq.log.segment import segment_name


def open_lane(path: Path, now_ms: int = 1_000_000, **options: int) -> Lane:
    return Lane.open(path, clock_ms=lambda: now_ms, random_u32=lambda: 77, options=LaneOptions(**options))


def put(lane: Lane, value: bytes, base: int = 0) -> int:
    parts = encode_batch(lane.seed, 1, base, ColumnBatch.from_records([Record(value)], 5), 5)
    return lane.append(parts, sum(map(len, parts)))


@pytest.mark.parametrize("is_doubted", [False, True])
def test_a_mark_survives_a_round_trip_and_every_changed_byte_is_detected(is_doubted: bool) -> None:
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
def test_the_published_position_advances_with_syncs_not_writes(tmp_path: Path) -> None:
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


def test_each_writer_has_a_new_epoch_even_if_the_clock_goes_back(tmp_path: Path) -> None:
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
def test_recovery_lowers_the_mark_before_it_truncates_the_lane(tmp_path: Path) -> None:
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


def test_a_mark_beyond_the_end_of_the_lane_is_corrected_at_open(tmp_path: Path) -> None:
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


def test_an_unwritable_mark_does_not_stop_syncs_and_is_deleted_if_it_cannot_be_lowered(
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


def test_recovery_of_an_intact_lane_keeps_the_mark(tmp_path: Path) -> None:
    lane = open_lane(tmp_path / "lane")
    put(lane, b"a")
    lane.sync()
    assert repair(lane, 0, tmp_path / "quarantine").quarantined == []
    assert (tmp_path / "lane" / NAME).exists()
    lane.close()


@pytest.mark.spec("B5")
def test_a_view_sees_complete_rolled_segments_and_no_torn_end(tmp_path: Path) -> None:
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


def test_a_deleted_segment_is_readable_in_a_view_only_while_it_is_open(tmp_path: Path) -> None:
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


def test_a_view_refuses_all_writes(tmp_path: Path) -> None:
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


def test_a_view_of_a_missing_lane_is_refused(tmp_path: Path) -> None:
    assert not LaneView.exists(tmp_path / "nothing")
    assert not LaneView.exists(tmp_path)
    (tmp_path / segment_name(0)).write_bytes(b"")
    assert LaneView.exists(tmp_path)
    with pytest.raises(CorruptionError, match="neither LANE nor"):
        LaneView(tmp_path)


def test_sync_to_syncs_each_segment_that_has_grown_and_no_other(
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
