"""After a failed sync: data that is only in the page cache is written again before it counts as durable."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.log.test_ring import copied, finish_work, frame, gather, name_of, open_lane, ringed

from basaltmq.errors import StorageError
from basaltmq.log.committed import Committed, read_mark
from basaltmq.log.lane import Lane
from basaltmq.log.lane_view import LaneView
from basaltmq.log.recovery import Damage, repair, scan
from basaltmq.log.ring import NAME, SLOT_BYTES


class Disk:
    """Simulates the content of a disk, as Linux handles syncs.

    A sync copies the data written since the last one. A failed sync does not, and the next sync has nothing to do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = 0
        """Syncs of segments that fail."""
        self._images: dict[str, bytearray] = {}
        self._dirty: dict[str, list[tuple[int, bytes]]] = {}
        self._real = os.writev, os.pwrite, os.fdatasync
        monkeypatch.setattr(os, "writev", self.writev)
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def writev(self, fd: int, parts: Sequence[bytes]) -> int:
        self._note(fd, os.fstat(fd).st_size, b"".join(parts))
        return self._real[0](fd, parts)

    def pwrite(self, fd: int, data: bytes, at: int) -> int:
        self._note(fd, at, bytes(data))
        return self._real[1](fd, data, at)

    def fdatasync(self, fd: int) -> None:
        name = name_of(fd)
        dirty = self._dirty.pop(name, [])
        if name.endswith(".log") and self.fails:
            self.fails -= 1
            raise OSError(errno.EIO, "a page could not be written")
        image = self._images.setdefault(name, bytearray())
        for at, data in dirty:
            image.extend(bytes(max(0, at + len(data) - len(image))))
            image[at : at + len(data)] = data
        self._real[2](fd)

    def _note(self, fd: int, at: int, data: bytes) -> None:
        name = name_of(fd)
        if name.endswith(".log"):
            self._dirty.setdefault(name, []).append((at, data))

    def lose_power(self, path: Path) -> None:
        """Reset the segments at `path` to the content of the disk."""
        for segment in path.glob("*.log"):
            segment.write_bytes(self._images.get(segment.name, b""))


def put(lane: Lane, number: int) -> None:
    whole = frame(number)
    lane.append((whole[:72], whole[72:]), len(whole))


def started(path: Path, tmp_path: Path) -> Lane:
    """Open a lane as an engine does."""
    lane = open_lane(path, segment_bytes=300)
    assert repair(lane, 0, tmp_path / "quarantine").cut is None
    lane.settle()
    return lane


def held(path: Path) -> tuple[list[int], list[Damage]]:
    damages: list[Damage] = []
    lane = open_lane(path)
    numbers = [each.header.base_offset for each in scan(lane, 0, damages)]
    lane.close()
    return numbers, damages


@pytest.mark.promise("P1", "P3")
@pytest.mark.parametrize("later_failures", [0, 1, 2])
def test_data_shown_after_a_failed_sync_and_restart_survives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later_failures: int
) -> None:
    path = tmp_path / "lane"
    disk = Disk(monkeypatch)
    lane = started(path, tmp_path)
    put(lane, 0)
    lane.sync()
    synced = lane.end
    for number in range(1, 9):
        put(lane, number)
    assert len(lane.segments()) > 2
    disk.fails = 1
    with pytest.raises(StorageError):
        lane.sync()
    lane.close()
    for _ in range(later_failures):
        # This start fails too: a killed process may leave the error to its successor.
        disk.fails = 1
        with pytest.raises(StorageError):
            started(path, tmp_path)
    mark = read_mark(path)
    assert mark is not None
    assert (mark.synced_position, mark.is_doubted) == (synced, True)
    assert LaneView(path).mark() == mark
    again = started(path, tmp_path)
    assert again.synced_position == again.end
    put(again, 9)
    again.sync()
    mark = read_mark(path)
    assert mark is not None
    assert (mark.synced_position, mark.is_doubted) == (again.end, False)
    disk.lose_power(path)
    assert held(path) == (list(range(10)), [])
    again.close()


def test_a_start_without_an_earlier_failure_rewrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = started(tmp_path / "lane", tmp_path)
    put(lane, 0)
    lane.sync()
    put(lane, 1)
    left = copied(lane, tmp_path / "left")
    lane.close()
    written: list[str] = []
    real = os.pwrite

    def pwrite(fd: int, data: bytes, at: int) -> int:
        written.append(name_of(fd))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    started(left, tmp_path).close()
    assert not [name for name in written if name.endswith(".log")]


@pytest.mark.promise("P1")
def test_a_failed_drain_does_not_hide_its_error_from_a_concurrent_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel reports an error once per open file. A duplicated descriptor shares that report.
    lane = ringed(tmp_path, ring_bytes=4 * SLOT_BYTES)
    shared: list[bool] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        if name_of(fd).endswith(".log"):
            before = os.lseek(lane._fd, 0, os.SEEK_CUR)
            os.lseek(fd, before + 1000, os.SEEK_SET)
            shared.append(os.lseek(lane._fd, 0, os.SEEK_CUR) != before)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    for number in (1, 2, 3):
        gather(lane, number)
        lane.sync_through_ring()
    finish_work(lane)
    monkeypatch.undo()
    assert shared == [False]
    lane.close()


@pytest.mark.promise("P1", "P7")
@pytest.mark.parametrize("is_head_old", [True, False])
def test_a_torn_ring_entry_mixed_from_two_entries_with_equal_bodies_is_ignored(
    tmp_path: Path, is_head_old: bool
) -> None:
    # Bodies of equal size and content, so every frame of the mixture matches its checksum.
    body = bytes(SLOT_BYTES)
    lane = ringed(tmp_path / "lane", ring_bytes=3 * SLOT_BYTES)
    rings: list[bytes] = []
    ends: list[int] = []
    for numbers in ((1, 2), (3, 4)):
        for number in numbers:
            gather(lane, number, body)
        lane.sync_through_ring()
        rings.append((lane.path / NAME).read_bytes())
        ends.append(lane.end)
        lane.move_ring_frames()
        lane.sync()
        finish_work(lane)
    front, rest = rings if is_head_old else reversed(rings)
    left = copied(lane, tmp_path / "left", None if is_head_old else ends[0])
    (left / NAME).write_bytes(front[:SLOT_BYTES] + rest[SLOT_BYTES:])
    lane.close()
    assert held(left) == ([0, 1, 2, 3, 4] if is_head_old else [0, 1, 2], [])


def test_a_closed_lane_does_not_write_to_a_file_that_reuses_its_descriptor(tmp_path: Path) -> None:
    lane = open_lane(tmp_path / "lane")
    put(lane, 0)
    lane.sync()
    committed = lane._committed
    fd = committed._fd
    lane.close()
    with open(tmp_path / "other", "wb") as other:
        os.dup2(other.fileno(), fd)
        committed.doubt(0)
        os.close(fd)
    assert (tmp_path / "other").stat().st_size == 0


@pytest.mark.promise("P1")
def test_data_stays_in_doubt_until_it_is_written_again(tmp_path: Path) -> None:
    committed = Committed(tmp_path, 1000, 0)
    committed.publish(64)
    committed.doubt(32)
    committed.publish(128)
    mark = read_mark(tmp_path)
    assert mark is not None
    assert (mark.synced_position, mark.is_doubted) == (64, True)
    committed.clear_doubt()
    committed.publish(128)
    mark = read_mark(tmp_path)
    assert mark is not None
    assert (mark.synced_position, mark.is_doubted) == (128, False)
    committed.close()


@pytest.mark.promise("P1")
def test_a_doubted_mark_is_not_overwritten_by_a_concurrent_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = Committed(tmp_path, 1, 0)
    committed.publish(8)
    write = os.pwrite
    doubting = threading.Thread(target=committed.doubt, args=(8,))

    def held_up(fd: int, data: bytes, at: int) -> int:
        if threading.current_thread() is not doubting:
            # The mark is encoded without the doubt.
            doubting.start()
            doubting.join(0.2)
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", held_up)
    committed.publish(16)
    doubting.join(30)
    mark = read_mark(tmp_path)
    assert mark is not None
    assert mark.is_doubted
    committed.close()
