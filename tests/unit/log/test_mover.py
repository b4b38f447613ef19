"""Large groups: durable in the ring while another thread writes them to their segment, in order and without loss."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.log.test_ring import copied, found, frame, gather, ringed, watch_syncs

from basaltmq.errors import StorePoisonedError
from basaltmq.log import lane as lane_module
from basaltmq.log.committed import read_mark
from basaltmq.log.lane import Lane
from basaltmq.log.mover import MOVED_BYTES_MIN, Mover
from basaltmq.log.ring import SLOT_BYTES

WAIT_S = 30.0
LARGE = bytes(MOVED_BYTES_MIN)


def large_ring(path: Path) -> Lane:
    return ringed(path, ring_bytes=64 * SLOT_BYTES * (1 + MOVED_BYTES_MIN // SLOT_BYTES))


def size_of(lane: Lane) -> int:
    """Return the size of the segment's file."""
    return lane.segments()[-1].path.stat().st_size


@pytest.mark.promise("P1")
def test_a_large_group_is_durable_before_its_segment_is_synced(tmp_path: Path) -> None:
    lane = large_ring(tmp_path / "lane")
    kept = lane.end
    for round_, sizes in enumerate(((1, 0), (0, 0), (0, 1), (1, 1), (2, 0))):
        for at, size in enumerate(sizes):
            gather(lane, 1 + 2 * round_ + at, size * LARGE)
        lane.sync_through_ring()
        assert lane.synced_position == lane.end
    assert found(copied(lane, tmp_path / "lost", kept), tmp_path) == list(range(11))
    lane.move_ring_frames()
    assert size_of(lane) == lane.end
    mark = read_mark(lane.path)
    assert mark is not None
    assert mark.synced_position == lane.end
    assert found(copied(lane, tmp_path / "killed"), tmp_path) == list(range(11))
    lane.close()
    assert found(tmp_path / "lane", tmp_path) == list(range(11))


@pytest.mark.promise("P1")
def test_moved_frames_are_durable_only_after_the_ring_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = large_ring(tmp_path / "lane")
    kept = lane.end
    seen: list[int] = []

    def before(fd: int) -> None:
        lane._mover.wait()
        assert size_of(lane) == lane.end
        seen.append(lane.synced_position)
        mark = read_mark(lane.path)
        assert mark is None or mark.synced_position <= kept

    watch_syncs(monkeypatch, before)
    gather(lane, 1, LARGE)
    lane.sync_through_ring()
    assert seen == [kept]
    assert lane.synced_position == lane.end
    monkeypatch.undo()
    lane.close()


class Held:
    """Blocks the mover's thread before its write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write = os.writev
        self.begun = threading.Event()
        self.goes_on = threading.Event()
        monkeypatch.setattr(os, "writev", self)

    def __call__(self, fd: int, parts: Sequence[bytes]) -> int:
        if threading.current_thread().name == "basalt-move":
            self.begun.set()
            assert self.goes_on.wait(WAIT_S)
        return self._write(fd, parts)


@pytest.mark.promise("P1")
@pytest.mark.parametrize("is_more_gathered", [True, False])
@pytest.mark.parametrize("action", ["read", "append", "sync", "tidy", "roll"])
def test_operations_on_the_segment_wait_for_a_running_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, is_more_gathered: bool
) -> None:
    lane = large_ring(tmp_path / "lane")
    segment = lane.segments()[-1].path
    begin = lane.end
    held = Held(monkeypatch)
    expected = first = gather(lane, 1, LARGE)
    lane.sync_through_ring()
    assert held.begun.wait(WAIT_S)
    numbers = [0, 1]
    if is_more_gathered:
        expected += gather(lane, 2)
        numbers.append(2)
    read: list[bytes] = []

    def act() -> None:
        if action == "read":
            read.append(lane.read(begin, len(first)))
        elif action == "append":
            lane.append((frame(3),), len(frame(3)))
        elif action == "sync":
            lane.sync()
        elif action == "tidy":
            lane.move_ring_frames()
        else:
            lane.roll()

    other = threading.Thread(target=act)
    other.start()
    # The operation must wait. Without the wait it would have completed by now.
    other.join(0.05)
    assert segment.stat().st_size == begin
    mark = read_mark(lane.path)
    assert mark is None or mark.synced_position <= begin
    held.goes_on.set()
    other.join(WAIT_S)
    assert not other.is_alive()
    if action == "append":
        expected += frame(3)
        numbers.append(3)
    assert read == ([first] if action == "read" else [])
    lane.close()
    assert segment.read_bytes()[begin:] == expected
    assert found(tmp_path / "lane", tmp_path) == numbers


@pytest.mark.promise("P1")
def test_a_failed_segment_write_poisons_the_lane_and_the_ring_keeps_durable_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = large_ring(tmp_path / "lane")

    def full(fd: int, parts: Sequence[bytes]) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "writev", full)
    gather(lane, 1, LARGE)
    lane.sync_through_ring()
    lane._mover.wait()
    with pytest.raises(StorePoisonedError):
        gather(lane, 2)
    monkeypatch.undo()
    lane.close()
    assert found(tmp_path / "lane", tmp_path) == [0, 1]


def test_write_back_covers_only_written_bytes_and_never_a_closed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = large_ring(tmp_path)
    reported: list[tuple[str, int, int]] = []

    def start_write_back(fd: int, begin: int, size_bytes: int) -> None:
        assert os.fstat(fd).st_size >= begin + size_bytes
        reported.append((os.readlink(f"/proc/self/fd/{fd}"), begin, begin + size_bytes))

    monkeypatch.setattr(lane_module, "start_write_back", start_write_back)
    monkeypatch.setattr(lane_module, "WRITE_BACK_BYTES", 2 * MOVED_BYTES_MIN)
    begin = lane.end
    for number in (1, 2):
        assert reported == []
        gather(lane, number, LARGE)
        lane.sync_through_ring()
        lane.move_ring_frames()
    assert reported == [(str(lane.segments()[-1].path), begin, lane.end)]
    gather(lane, 3, LARGE)
    lane.sync_through_ring()
    lane.move_ring_frames()
    assert len(reported) == 1
    gather(lane, 7, LARGE + LARGE)
    lane.sync_through_ring()
    lane.roll()
    lane.sync()
    for number in (4, 5):
        assert len(reported) == 1
        gather(lane, number, LARGE)
        lane.sync_through_ring()
        lane.move_ring_frames()
    assert reported[1:] == [(str(lane.segments()[-1].path), 0, lane.end - lane.active_start)]
    lane.close()


def test_a_move_runs_in_the_calling_thread_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    mover = Mover()
    done: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    mover.begin()
    mover.run(lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()]
    assert not mover.is_busy
    monkeypatch.undo()
    mover.begin()
    mover.run(lambda: done.append(threading.get_ident()))
    mover.wait()
    assert len(done) == 2
    assert done[1] != done[0]
    mover.close()
