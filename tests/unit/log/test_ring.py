"""The ring of a lane: durable before the segment, replayed after a crash."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from basaltmq.errors import StorageError, StorePoisonedError
from basaltmq.log import ring as ring_module
from basaltmq.log.frame import COLUMNAR, encode_frame
from basaltmq.log.lane import Lane
from basaltmq.log.lane_options import LaneOptions
from basaltmq.log.recovery import repair, scan
from basaltmq.log.ring import NAME, SLOT_BYTES

SEED = 77
WAIT_S = 30.0


def open_lane(path: Path, *, ring_bytes: int = 16 * SLOT_BYTES, segment_bytes: int = 1 << 20) -> Lane:
    options = LaneOptions(segment_bytes=segment_bytes, ring_bytes=ring_bytes, ring_after=1)
    return Lane.open(path, clock_ms=lambda: 1_000_000, random_u32=lambda: SEED, options=options)


def frame(number: int, body: bytes = b"") -> bytes:
    return b"".join(encode_frame(SEED, COLUMNAR, 1, number, 1, 0, 0, 0, 0, body or b"record %d" % number))


def gather(lane: Lane, number: int, body: bytes = b"") -> bytes:
    whole = frame(number, body)
    lane.append((whole[:72], whole[72:]), len(whole), gather=True)
    return whole


def ringed(path: Path, **options: int) -> Lane:
    """Return a lane with a ring and one durable frame, number 0."""
    lane = open_lane(path, **options)
    lane.sync()
    gather(lane, 0)
    lane.sync_through_ring()
    finish_work(lane)
    assert (path / NAME).exists()
    return lane


def finish_work(lane: Lane) -> None:
    """Wait for the background work of the lane."""
    worker = lane._worker
    if worker is not None:
        worker.join(WAIT_S)
        assert not worker.is_alive()


def watch_syncs(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Call `before` with the descriptor before each call that makes data durable."""
    real_sync, real_write = os.fdatasync, os.pwritev

    def fdatasync(fd: int) -> None:
        before(fd)
        real_sync(fd)

    def pwritev(fd: int, parts: Sequence[bytes], at: int, flags: int = 0) -> int:
        if flags & os.RWF_DSYNC:
            before(fd)
        return real_write(fd, parts, at, flags)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(os, "pwritev", pwritev)


def name_of(fd: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))


def copied(lane: Lane, target: Path, keep_bytes: int | None = None) -> Path:
    """Return the lane after a crash. With `keep_bytes`, a power loss truncates the last segment to that size."""
    shutil.copytree(lane.path, target)
    if keep_bytes is not None:
        os.truncate(target / lane.segments()[-1].path.name, keep_bytes)
    return target


def found(path: Path, tmp_path: Path) -> list[int]:
    """Return the frames of the repaired lane, and check that appending to it works."""
    lane = open_lane(path)
    numbers = [each.header.base_offset for each in scan(lane, 0)]
    repair(lane, 0, tmp_path / "quarantine")
    lane.settle()
    assert not (path / NAME).exists()
    assert [each.header.base_offset for each in scan(lane, 0)] == numbers
    gather(lane, 1000)
    lane.close()
    again = open_lane(path)
    assert [each.header.base_offset for each in scan(again, 0)] == [*numbers, 1000]
    again.close()
    return numbers


@pytest.mark.promise("P1")
def test_ring_frames_survive_a_power_loss_before_the_segment_has_them(tmp_path: Path) -> None:
    lane = ringed(tmp_path / "lane")
    kept = lane.end
    gather(lane, 1)
    gather(lane, 2)
    lane.sync_through_ring()
    assert lane.synced_position == lane.end
    assert lane.segments()[-1].path.stat().st_size == kept
    assert found(copied(lane, tmp_path / "killed"), tmp_path) == [0, 1, 2]
    lane.move_ring_frames()
    assert lane.segments()[-1].path.stat().st_size == lane.end
    assert found(copied(lane, tmp_path / "lost", kept), tmp_path) == [0, 1, 2]
    gather(lane, 3)
    lane.sync_through_ring()
    lane.move_ring_frames()
    assert found(copied(lane, tmp_path / "later", kept), tmp_path) == [0, 1, 2, 3]
    lane.close()
    assert not (tmp_path / "lane" / NAME).exists()


@pytest.mark.promise("P1")
def test_unsynced_ring_frames_are_not_durable_and_leave_no_trace(tmp_path: Path) -> None:
    lane = ringed(tmp_path / "lane")
    gather(lane, 1)
    lane.sync_through_ring()
    gather(lane, 2)
    assert found(copied(lane, tmp_path / "killed"), tmp_path) == [0, 1]
    lane.close()
    assert found(tmp_path / "lane", tmp_path) == [0, 1, 2]


def test_readers_see_ring_frames_before_and_after_the_move(tmp_path: Path) -> None:
    lane = ringed(tmp_path)
    begin = lane.end
    whole = gather(lane, 1) + gather(lane, 2)
    lane.sync_through_ring()
    more = gather(lane, 3)
    assert lane.read(begin, len(whole)) == whole
    assert lane.read(begin + len(whole), len(more)) == more
    lane.move_ring_frames()
    lane.sync_through_ring()
    lane.close()
    assert [each.header.base_offset for each in scan(open_lane(tmp_path), 0)] == [0, 1, 2, 3]


@pytest.mark.parametrize("is_tidied", [True, False])
def test_a_read_of_durable_frames_does_not_write_unsynced_frames_to_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tidied: bool
) -> None:
    lane = ringed(tmp_path / "lane")
    begin = lane.end
    durable = gather(lane, 1) + gather(lane, 2)
    lane.sync_through_ring()
    if is_tidied:
        lane.move_ring_frames()
    awaiting = gather(lane, 3)
    segment = lane.segments()[-1].path
    # The read requests more than is durable, like readers that do not know the end.
    assert lane.read(begin, 1 << 20) == durable
    assert lane.read(begin + 8, 16) == durable[8:24]
    assert segment.stat().st_size == begin + len(durable)
    synced: list[str] = []
    watch_syncs(monkeypatch, lambda fd: synced.append(name_of(fd)))
    lane.sync_through_ring()
    assert synced == [NAME]
    monkeypatch.undo()
    assert found(copied(lane, tmp_path / "cut", begin), tmp_path) == [0, 1, 2, 3]
    assert lane.read(begin, 1 << 20) == durable + awaiting
    gather(lane, 4)
    assert lane.read(lane.end - len(frame(4)), 1 << 20) == frame(4)
    lane.close()


def test_a_read_during_a_ring_write_returns_the_durable_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = ringed(tmp_path / "lane")
    begin = lane.end
    durable = gather(lane, 1)
    lane.sync_through_ring()
    later = gather(lane, 2)

    def meanwhile(fd: int) -> None:
        monkeypatch.undo()
        assert lane.read(begin, 1 << 20) == durable
        gather(lane, 3)

    watch_syncs(monkeypatch, meanwhile)
    lane.sync_through_ring()
    assert lane.synced_position == begin + len(durable) + len(later)
    lane.move_ring_frames()
    assert lane.segments()[-1].path.stat().st_size == lane.synced_position
    assert found(copied(lane, tmp_path / "killed"), tmp_path) == [0, 1, 2]
    lane.sync_through_ring()
    lane.close()
    assert found(tmp_path / "lane", tmp_path) == [0, 1, 2, 3]


@pytest.mark.promise("P1")
def test_frames_written_directly_are_synced_with_their_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = ringed(tmp_path)
    whole = frame(1)
    lane.append((whole,), len(whole))
    gather(lane, 2)
    synced: list[str] = []
    watch_syncs(monkeypatch, lambda fd: synced.append(name_of(fd)))
    lane.sync_through_ring()
    assert synced == [lane.segments()[-1].path.name]
    gather(lane, 3)
    lane.sync_through_ring()
    assert synced[1:] == [NAME]
    monkeypatch.undo()
    lane.close()


@pytest.mark.promise("P7")
def test_every_flipped_byte_of_a_ring_affects_only_its_own_frames(tmp_path: Path) -> None:
    lane = ringed(tmp_path / "lane")
    kept = lane.end
    for number in (1, 2):
        gather(lane, number)
        lane.sync_through_ring()
    assert len(frame(1)) == len(frame(2)) < SLOT_BYTES
    whole = 32 + len(frame(1))
    left = copied(lane, tmp_path / "left", kept)
    segment = left / lane.segments()[-1].path.name
    lane.close()
    pristine, before = (left / NAME).read_bytes(), segment.read_bytes()
    used = [at for at in range(0, len(pristine), SLOT_BYTES) if any(pristine[at : at + SLOT_BYTES])]
    assert len(used) == 2
    for slot, number in zip(used, (1, 2), strict=True):
        # Bytes after an entry are unused. The padding of a frame has no checksum and no meaning.
        for at in range(slot, slot + whole + 1):
            flipped = bytearray(pristine)
            flipped[at] ^= 1 << (at % 8)
            (left / NAME).write_bytes(flipped)
            segment.write_bytes(before)
            opened = open_lane(left)
            numbers = {each.header.base_offset for each in scan(opened, 0)}
            assert numbers >= {0, 1, 2} - {number}, f"byte {at} affected frames of other entries"
            opened.close()


@pytest.mark.promise("P7")
def test_a_ring_truncated_to_any_length_is_replayed(tmp_path: Path) -> None:
    lane = ringed(tmp_path / "lane")
    kept = lane.end
    for number in (1, 2):
        gather(lane, number)
        lane.sync_through_ring()
    left = copied(lane, tmp_path / "left", kept)
    segment = left / lane.segments()[-1].path.name
    lane.close()
    pristine, before = (left / NAME).read_bytes(), segment.read_bytes()
    lengths = [*range(0, 3 * SLOT_BYTES, 97), SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 2 * SLOT_BYTES, len(pristine)]
    seen = set()
    for length in sorted(lengths):
        (left / NAME).write_bytes(pristine[:length])
        segment.write_bytes(before)
        opened = open_lane(left)
        seen.add(tuple(each.header.base_offset for each in scan(opened, 0)))
        opened.close()
    assert seen <= {(0,), (0, 1), (0, 1, 2)}
    assert (0, 1, 2) in seen


def test_ring_space_is_reused_after_its_frames_are_synced_in_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = ringed(tmp_path / "lane", ring_bytes=6 * SLOT_BYTES)
    durable = [0]
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        size = os.fstat(fd).st_size
        is_ring = os.readlink(f"/proc/self/fd/{fd}").endswith(NAME)
        real(fd)
        if not is_ring:
            durable.append(size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    for number in range(1, 60):
        gather(lane, number, bytes([number]) * (3000 * (number % 3) + 1))
        lane.sync_through_ring()
        lane.move_ring_frames()
        if number % 10 == 9:
            # At any progress of the drains, the ring has everything that the segment may lose.
            left = copied(lane, tmp_path / f"left-{number}", max(durable))
            monkeypatch.undo()
            assert found(left, tmp_path) == list(range(number + 1))
            monkeypatch.setattr(os, "fdatasync", fdatasync)
    finish_work(lane)
    monkeypatch.undo()
    lane.close()
    assert found(tmp_path / "lane", tmp_path) == list(range(60))


@pytest.mark.promise("P1")
def test_without_room_in_the_ring_the_segment_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = ringed(tmp_path / "lane", ring_bytes=2 * SLOT_BYTES)
    monkeypatch.setattr(Lane, "_drain", lambda self: None)
    for number in range(1, 8):
        gather(lane, number)
        lane.sync_through_ring()
        lane.move_ring_frames()
        finish_work(lane)
        assert lane.synced_position == lane.end
    gather(lane, 8, bytes(3 * SLOT_BYTES))
    lane.sync_through_ring()
    assert lane.segments()[-1].path.stat().st_size == lane.synced_position == lane.end
    lane.close()
    assert found(tmp_path / "lane", tmp_path) == list(range(9))


@pytest.mark.promise("P1")
def test_ring_frames_of_a_rolled_segment_are_written_back_to_it(tmp_path: Path) -> None:
    lane = ringed(tmp_path / "lane", segment_bytes=400)
    kept = lane.end
    gather(lane, 1)
    lane.sync_through_ring()
    lane.move_ring_frames()
    lane.roll()
    whole = frame(2)
    lane.append((whole,), len(whole))
    first, last = lane.segments()
    left = copied(lane, tmp_path / "left")
    os.truncate(left / first.path.name, kept)
    os.truncate(left / last.path.name, 0)
    lane.close()
    assert found(left, tmp_path) == [0, 1]


@pytest.mark.promise("P10")
def test_replay_does_not_restore_frames_of_a_cleaned_segment(tmp_path: Path) -> None:
    lane = ringed(tmp_path / "lane")
    lane.roll()
    lane.sync()
    gather(lane, 1)
    lane.sync_through_ring()
    lane.move_ring_frames()
    lane.roll()
    lane.sync()
    gather(lane, 2)
    lane.sync_through_ring()
    lane.move_ring_frames()
    left = copied(lane, tmp_path / "killed")
    gone = lane.segments()[1].path.name
    os.unlink(left / gone)
    sizes = {each.name: each.stat().st_size for each in left.iterdir() if each.name != NAME}
    again = open_lane(left)
    assert {name: (left / name).stat().st_size for name in sizes} == sizes
    assert not (left / gone).exists()
    again.close()
    lane.close()


def test_a_lane_works_without_a_ring_if_none_can_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    lane = open_lane(tmp_path)
    lane.sync()
    monkeypatch.setattr(os, "write", full)
    gather(lane, 0)
    lane.sync_through_ring()
    finish_work(lane)
    monkeypatch.undo()
    gather(lane, 1)
    lane.sync_through_ring()
    lane.close()
    assert not (tmp_path / ring_module.DRAFT).exists()
    assert [each.header.base_offset for each in scan(open_lane(tmp_path), 0)] == [0, 1]


@pytest.mark.promise("P1", "P11")
def test_a_failed_ring_write_poisons_the_lane_and_confirms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = ringed(tmp_path)
    before = lane.synced_position
    gather(lane, 1)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "gone")

    watch_syncs(monkeypatch, fail)
    with pytest.raises(StorageError, match=NAME):
        lane.sync_through_ring()
    monkeypatch.undo()
    assert lane.synced_position == before
    with pytest.raises(StorePoisonedError):
        gather(lane, 2)
    lane.close()


@pytest.mark.promise("P1", "P11")
def test_ring_frames_survive_a_failed_segment_write_and_a_reopen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = ringed(tmp_path)
    gather(lane, 1)
    lane.sync_through_ring()

    def full(fd: int, parts: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StorageError):
        lane.move_ring_frames()
    monkeypatch.undo()
    with pytest.raises(StorePoisonedError):
        gather(lane, 2)
    lane.close()
    assert [each.header.base_offset for each in scan(open_lane(tmp_path), 0)] == [0, 1]


@pytest.mark.promise("P1", "P7")
def test_concurrent_writers_readers_and_syncs_lose_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    lane = ringed(tmp_path / "lane", ring_bytes=8 * SLOT_BYTES, segment_bytes=64 << 10)
    lock = threading.Lock()
    appended: dict[int, bytes] = {}
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(own: random.Random) -> None:
        for _ in range(150):
            with lock:
                number = len(appended) + 1
                whole = frame(number, own.randbytes(own.randrange(1, 3000)))
                position = lane.append((whole,), len(whole), gather=own.random() < 0.8)
                appended[position] = whole

    def sync() -> None:
        while not stop.is_set():
            lane.sync_through_ring()
            lane.move_ring_frames()

    def read(own: random.Random) -> None:
        while not stop.is_set():
            with lock:
                position = own.choice([*appended] or [0])
                whole = appended.get(position, b"")
            assert lane.read(position, len(whole)) == whole

    def guarded(action: object, *args: object) -> None:
        try:
            action(*args)  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    rng = random.Random(seed)
    writers = [threading.Thread(target=guarded, args=(write, random.Random(rng.random()))) for _ in range(2)]
    others = [
        threading.Thread(target=guarded, args=(sync,)),
        threading.Thread(target=guarded, args=(read, random.Random(rng.random()))),
    ]
    for thread in (*writers, *others):
        thread.start()
    for thread in writers:
        thread.join(WAIT_S)
    stop.set()
    for thread in others:
        thread.join(WAIT_S)
    assert not failures
    lane.sync_through_ring()
    assert found(copied(lane, tmp_path / "killed"), tmp_path) == list(range(301))
    lane.close()
    assert found(tmp_path / "lane", tmp_path) == list(range(301))


@pytest.mark.promise("P1")
@pytest.mark.parametrize("is_tidied", [True, False])
def test_a_close_removes_the_ring_only_after_its_frames_are_synced_in_their_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tidied: bool
) -> None:
    lane = ringed(tmp_path)
    gather(lane, 1)
    lane.sync_through_ring()
    if is_tidied:
        lane.move_ring_frames()
    segment = os.stat(lane.segments()[-1].path)
    synced_bytes: list[int] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        status = os.fstat(fd)
        if status.st_ino == segment.st_ino:
            synced_bytes.append(status.st_size)
        real(fd)

    def remove(path: Path) -> None:
        assert synced_bytes[-1:] == [lane.end], "the ring is removed before its frames are synced elsewhere"
        removed.append(path)

    removed: list[Path] = []
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(ring_module, "remove", remove)
    lane.close()
    assert removed == [tmp_path]


@pytest.mark.promise("P1")
def test_a_sync_without_new_data_does_not_touch_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = ringed(tmp_path)
    gather(lane, 1)
    lane.sync_through_ring()
    synced: list[int] = []
    watch_syncs(monkeypatch, synced.append)
    lane.sync_through_ring()
    lane.move_ring_frames()
    lane.sync_through_ring()
    assert synced == []
    monkeypatch.undo()
    lane.sync()
    watch_syncs(monkeypatch, synced.append)
    lane.sync()
    assert synced == []
    monkeypatch.undo()
    lane.close()
