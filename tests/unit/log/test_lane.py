"""Lanes: appending, rolling, reading, syncing, failing."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from basaltmq.errors import (
    CorruptionError,
    DiskFullError,
    SegmentGoneError,
    StorageError,
    StoreClosedError,
    StorePoisonedError,
    StoreTooNewError,
)
from basaltmq.log import lane as lane_module
from basaltmq.log import marker as marker_module
from basaltmq.log.lane import Lane
from basaltmq.log.lane_options import LaneOptions
from basaltmq.log.marker import MARKERS
from basaltmq.log.segment import IOV_MAX, SegmentState, parse_segment_name, segment_name


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


def open_lane(path: Path, clock: Clock | None = None, **options: int) -> Lane:
    return Lane.open(path, clock_ms=clock or Clock(), random_u32=lambda: 77, options=LaneOptions(**options))


def put(lane: Lane, data: bytes) -> int:
    return lane.append((data,), len(data))


def test_positions_are_consecutive_and_bytes_are_read_back(tmp_path: Path) -> None:
    lane = open_lane(tmp_path / "lane")
    first = put(lane, b"a" * 16)
    second = lane.append((b"b" * 8, b"", b"c" * 8), 16)
    assert (first, second, lane.end) == (0, 16, 32)
    assert lane.read(16, 16) == b"b" * 8 + b"c" * 8
    assert lane.read(16, 1000) == b"b" * 8 + b"c" * 8
    lane.close()
    again = open_lane(tmp_path / "lane")
    assert (again.end, again.seed) == (32, 77)
    assert put(again, b"d" * 8) == 32
    again.close()


@pytest.mark.spec("B5")
def test_segments_roll_by_size_and_go_through_their_states(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=64)
    for _ in range(3):
        put(lane, bytes(40))
    states = [segment.state for segment in lane.segments()]
    assert states == [SegmentState.SEALING, SegmentState.SEALING, SegmentState.WRITE]
    assert [segment.start for segment in lane.segments()] == [0, 40, 80]
    assert lane.synced_position == 0
    lane.sync()
    assert lane.synced_position == lane.end == 120
    assert [segment.state for segment in lane.segments()][:2] == [SegmentState.SEALED] * 2
    gone = lane.segments()[0]
    lane.delete(gone)
    assert gone.state is SegmentState.DELETING
    assert lane.start == 40
    with pytest.raises(SegmentGoneError):
        lane.read(0, 8)
    assert lane.read(40, 40) == bytes(40)
    lane.close()


def test_a_frame_larger_than_a_segment_gets_a_separate_segment(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=64)
    put(lane, bytes(8))
    assert put(lane, bytes(800)) == 8
    assert put(lane, bytes(8)) == 808
    assert [segment.size_bytes for segment in lane.segments()] == [8, 800, 8]
    lane.close()


@pytest.mark.spec("B5")
def test_segments_roll_by_age_and_are_younger_if_the_clock_goes_back(tmp_path: Path) -> None:
    clock = Clock()
    lane = open_lane(tmp_path, clock, segment_age_ms=1000)
    put(lane, bytes(8))
    clock.now_ms += 999
    put(lane, bytes(8))
    assert len(lane.segments()) == 1
    clock.now_ms += 1
    put(lane, bytes(8))
    assert len(lane.segments()) == 2
    clock.now_ms -= 500_000
    put(lane, bytes(8))
    assert len(lane.segments()) == 2
    clock.now_ms += 501_000
    put(lane, bytes(8))
    assert len(lane.segments()) == 3
    lane.close()


def test_an_empty_segment_is_not_rolled_for_its_age(tmp_path: Path) -> None:
    clock = Clock()
    lane = open_lane(tmp_path, clock, segment_age_ms=1000)
    clock.now_ms += 5000
    put(lane, bytes(8))
    assert len(lane.segments()) == 1
    lane.close()


def gather(lane: Lane, data: bytes) -> int:
    return lane.append((data[:8], data[8:]), len(data), gather=True)


@pytest.mark.promise("P1")
def test_gathered_frames_are_written_together_by_the_sync_that_makes_them_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = open_lane(tmp_path)
    put(lane, b"a" * 16)
    calls: list[str] = []
    real_writev, real_fdatasync = os.writev, os.fdatasync

    def writev(fd: int, parts: Sequence[bytes]) -> int:
        calls.append("writev")
        return real_writev(fd, parts)

    def fdatasync(fd: int) -> None:
        calls.append("fdatasync")
        real_fdatasync(fd)

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert [gather(lane, each * 16) for each in (b"b", b"c", b"d")] == [16, 32, 48]
    assert (lane.end, lane.segments()[0].path.stat().st_size, calls) == (64, 16, [])
    lane.sync()
    assert calls[:2] == ["writev", "fdatasync"]
    assert lane.synced_position == 64
    assert lane.segments()[0].path.read_bytes() == b"a" * 16 + b"b" * 16 + b"c" * 16 + b"d" * 16
    lane.close()


@pytest.mark.promise("P1")
def test_gathered_frames_precede_later_appends(tmp_path: Path) -> None:
    lane = open_lane(tmp_path)
    gather(lane, b"a" * 16)
    put(lane, b"b" * 16)
    assert lane.segments()[0].path.read_bytes() == b"a" * 16 + b"b" * 16
    lane.close()


def test_gathered_frames_are_readable_and_written_to_their_segment(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=64)
    gather(lane, b"a" * 40)
    assert lane.read(0, 40) == b"a" * 40
    gather(lane, b"b" * 16)
    assert gather(lane, b"c" * 40) == 56
    assert [segment.path.stat().st_size for segment in lane.segments()] == [56, 0]
    assert lane.read(40, 16) == b"b" * 16
    assert lane.read(56, 40) == b"c" * 40
    gather(lane, b"d" * 8)
    lane.close()
    again = open_lane(tmp_path, segment_bytes=64)
    assert again.read(96, 8) == b"d" * 8
    again.close()


def test_gathered_bytes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "GATHERED_BYTES_MAX", 64)
    lane = open_lane(tmp_path)
    path = lane.segments()[0].path
    for written in (0, 0, 96, 96, 96, 192):
        gather(lane, bytes(32))
        assert path.stat().st_size == written
    lane.close()


@pytest.mark.promise("P1")
def test_a_failed_write_of_gathered_frames_fails_the_sync_and_poisons_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = open_lane(tmp_path)
    gather(lane, b"a" * 16)

    def full(fd: int, parts: Sequence[bytes]) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(DiskFullError):
        lane.sync()
    monkeypatch.undo()
    assert lane.synced_position == 0
    for refused in (lambda: put(lane, b"b" * 8), lane.sync, lane.write_gathered):
        with pytest.raises(StorePoisonedError):
            refused()
    lane.close()


def test_short_writes_and_many_parts_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = open_lane(tmp_path)
    real = os.writev

    def short(fd: int, parts: Sequence[bytes | memoryview]) -> int:
        return real(fd, [memoryview(b"".join(parts))[:7]])

    monkeypatch.setattr(os, "writev", short)
    data = bytes(range(100))
    lane.append([data[at : at + 10] for at in range(0, 100, 10)], 100)
    monkeypatch.undo()
    many = [bytes((at % 256,)) * 3 for at in range(IOV_MAX * 2 + 5)]
    position = lane.append(many, 3 * len(many))
    assert lane.read(0, 100) == data
    assert lane.read(position, 3 * len(many)) == b"".join(many)
    lane.close()


@pytest.mark.promise("P11")
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFullError), (errno.EIO, StorageError)])
def test_a_failed_write_poisons_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    lane = open_lane(tmp_path)
    put(lane, b"kept" * 2)
    real = os.writev
    calls = []

    def fail(fd: int, parts: Sequence[bytes]) -> int:
        calls.append(1)
        if len(calls) == 1:
            return real(fd, [b"abc"])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "writev", fail)
    with pytest.raises(kind, match="log"):
        put(lane, b"x" * 16)
    monkeypatch.undo()
    with pytest.raises(StorePoisonedError, match="open the store again"):
        put(lane, b"x" * 16)
    with pytest.raises(StorePoisonedError):
        lane.sync()
    assert lane.end == 8
    assert lane.read(0, 100) == b"kept" * 2
    lane.close()


@pytest.mark.promise("P1", "P11")
def test_a_failed_sync_poisons_the_lane_and_keeps_the_synced_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = open_lane(tmp_path)
    put(lane, bytes(8))

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageError):
        lane.sync()
    monkeypatch.undo()
    assert lane.synced_position == 0
    with pytest.raises(StorePoisonedError):
        lane.sync()
    lane.close()


@pytest.mark.promise("P8")
def test_open_descriptors_are_bounded_for_any_number_of_segments(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=8, read_files_max=3)
    for at in range(20):
        put(lane, bytes((at,)) * 8)
    lane.sync()
    for at in range(20):
        assert lane.read(8 * at, 8) == bytes((at,)) * 8
    assert lane.open_files() <= 4
    lane.close()


@pytest.mark.promise("P8")
def test_reads_continue_when_the_process_runs_out_of_descriptors(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=8)
    for at in range(6):
        put(lane, bytes((at,)) * 8)
    lane.sync()
    lane.read(0, 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use, hard))
    try:
        for at in range(6):
            assert lane.read(8 * at, 8) == bytes((at,)) * 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    lane.close()


def test_readers_run_in_parallel_with_the_writer_through_rolls_and_deletes(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=4096, read_files_max=4)
    stop = threading.Event()
    faults: list[BaseException] = []

    def read() -> None:
        at = 0
        try:
            while not stop.is_set():
                end = lane.end
                at = at + 8 if at + 8 < end else lane.start
                if at >= end:
                    continue
                try:
                    found = lane.read(at, 8)
                except SegmentGoneError:
                    at = lane.start
                    continue
                assert found == at.to_bytes(8, "little")
        except BaseException as error:
            faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(6000):
        put(lane, lane.end.to_bytes(8, "little"))
        if lane.end % 16384 == 0:
            lane.sync()
            lane.delete(lane.segments()[0])
    stop.set()
    for reader in readers:
        reader.join(30)
    assert not faults
    lane.close()


def test_a_read_of_a_deleted_segment_completes(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=8)
    put(lane, b"a" * 8)
    put(lane, b"b" * 8)
    lane.sync()
    segment = lane.segments()[0]
    lane.read(0, 8)
    held = lane._files._open[0]
    lane.delete(segment)
    assert os.pread(held.fd, 8, 0) == b"a" * 8
    assert not segment.path.exists()
    lane.close()


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    lane = open_lane(tmp_path, segment_bytes=8)
    put(lane, b"a" * 8)
    put(lane, b"b" * 8)
    lane.segments()[0].path.unlink()
    with pytest.raises(CorruptionError, match=r"00000000000000000000\.log is missing"):
        lane.read(0, 8)
    lane.close()


@pytest.mark.promise("P7")
def test_a_lane_opens_with_one_intact_marker_and_not_without(tmp_path: Path) -> None:
    open_lane(tmp_path).close()
    (tmp_path / MARKERS[0]).write_bytes(b"00000000 {}")
    assert open_lane(tmp_path).seed == 77
    (tmp_path / MARKERS[1]).write_bytes(b"00000000 {}")
    with pytest.raises(CorruptionError, match="LANE"):
        open_lane(tmp_path)
    for name in MARKERS:
        (tmp_path / name).unlink()
    with pytest.raises(CorruptionError, match="restore"):
        open_lane(tmp_path)


def test_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_module, "FORMAT_VERSION", 9)
    open_lane(tmp_path).close()
    monkeypatch.undo()
    with pytest.raises(StoreTooNewError, match=r"9.*1"):
        open_lane(tmp_path)


def test_a_closed_lane_raises(tmp_path: Path) -> None:
    lane = open_lane(tmp_path)
    lane.close()
    lane.close()
    with pytest.raises(StoreClosedError):
        put(lane, b"x" * 8)


def test_positions_are_not_reused_after_a_skip(tmp_path: Path) -> None:
    lane = open_lane(tmp_path)
    put(lane, bytes(8))
    lane.skip_to(4096)
    assert put(lane, bytes(8)) == 4096
    lane.close()
    assert [segment.start for segment in open_lane(tmp_path).segments()] == [0, 4096]


@pytest.mark.parametrize("name", ["1.log", "0" * 20, "0" * 19 + "a.log", "٠" * 20 + ".log", ".log"])
def test_other_file_names_are_not_segments(name: str) -> None:
    assert parse_segment_name(name) is None
    assert parse_segment_name(segment_name(1 << 62)) == 1 << 62
