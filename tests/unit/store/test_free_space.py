"""Free space, the reserve for a full disk, and reclaiming the space of deleted rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from basaltmq.errors import DiskFullError, StorePoisonedError, VHostDownError, is_disk_full
from basaltmq.store.batch import Batch
from basaltmq.store.families import MIB, Family
from basaltmq.store.open import open_store
from basaltmq.store.space.free_space import CLEAR, ROOM_MIN_BYTES, FreeSpace
from basaltmq.store.space.reclaim import FREE_BYTES_MIN, REST_S_MIN, Reclaimer, reclaim
from basaltmq.store.space.reserve import Reserve

pytestmark = pytest.mark.spec("A11")


class Disk:
    """A disk of the size that the test sets, on which only the reserve uses space."""

    def __init__(self, path: Path, free: int, reserve: int = 0, least: int = 100) -> None:
        self.free = free
        self.reserve = Reserve(path, reserve)
        self.space = FreeSpace(path, free_min_bytes=lambda: least, reserve=self.reserve, free=self.left)

    def left(self, _: Path) -> int:
        held = self.reserve.path.stat().st_size if self.reserve.path.exists() else 0
        return self.free - held


def test_the_reserve_allocates_blocks_and_is_released_once(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path, MIB)
    assert reserve.missing_bytes == MIB
    reserve.keep()
    assert reserve.path.stat().st_blocks * 512 >= MIB
    assert reserve.missing_bytes == 0
    assert reserve.release()
    assert not reserve.release()
    assert reserve.missing_bytes == MIB
    reserve.keep()
    Reserve(tmp_path, MIB // 2).keep()
    assert reserve.path.stat().st_size == MIB // 2
    Reserve(tmp_path, 0).keep()
    assert not reserve.path.exists()


def test_a_reserve_that_does_not_fit_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, at: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    disk = Disk(tmp_path, 100 * MIB, reserve=MIB)
    assert disk.space.check() is None
    assert not disk.reserve.path.exists()


def test_after_a_full_disk_publishers_are_blocked_until_the_reserve_fits_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 100 * MIB, reserve=MIB)
    assert disk.space.check() is None
    assert disk.reserve.missing_bytes == 0
    disk.free = MIB
    disk.space.on_disk_full()
    assert not disk.reserve.path.exists()
    wanted = int(ROOM_MIN_BYTES * CLEAR) + MIB
    for free in (MIB, ROOM_MIN_BYTES, wanted - 1):
        disk.free = free
        reason = disk.space.check()
        assert reason is not None
        assert f"publishing resumes at {wanted} free bytes" in reason
        assert not disk.space.has_room()
    disk.free = wanted
    assert disk.space.has_room()
    assert disk.space.check() is None
    assert disk.reserve.missing_bytes == 0


def test_a_disk_without_room_for_the_reserve_works_without_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path, MIB, reserve=MIB)
    assert disk.space.check() is None
    assert not disk.reserve.path.exists()
    disk.free = 90
    assert disk.space.check() == f"low on disk: 90 bytes are free at {tmp_path}, the minimum is 100"


def test_a_full_disk_is_detected_in_wrapped_errors() -> None:
    wrapped = VHostDownError("down")
    wrapped.__cause__ = StorePoisonedError("poisoned", True)
    assert is_disk_full(wrapped)
    assert is_disk_full(DiskFullError("full"))
    assert not is_disk_full(StorePoisonedError("an I/O error"))
    again = StorePoisonedError(*StorePoisonedError("text", True).args)
    assert is_disk_full(again)
    assert str(again) == "text"


def test_space_is_reclaimed_only_with_room_for_a_compaction(tmp_path: Path) -> None:
    with_rows = open_store(tmp_path / "store")
    row_keys = [b"%08d" % number for number in range(64)]
    batch = Batch()
    for key in row_keys:
        batch.put(Family.MESSAGES, key, os.urandom(64 << 10))
    with_rows.write(batch)
    with_rows.flush()
    batch = Batch()
    for key in row_keys:
        batch.delete(Family.MESSAGES, key)
    with_rows.write(batch)
    before = with_rows.size_bytes()
    assert before > 4 * MIB
    reclaim(with_rows, lambda: False, free_bytes=lambda: FREE_BYTES_MIN - 1)
    assert with_rows.size_bytes() >= before
    reclaim(with_rows, lambda: False, free_bytes=lambda: 100 * MIB)
    assert with_rows.size_bytes() < MIB
    assert with_rows.background_errors() == 0
    with_rows.close()


def test_a_store_is_reclaimed_only_after_writes_and_with_pauses(tmp_path: Path) -> None:
    now_s = [10.0]
    store = open_store(tmp_path / "store")
    reclaimer = Reclaimer(store, clock_s=lambda: now_s[0])

    def step() -> bool:
        return reclaimer.step(lambda: False, lambda: 100 * MIB)

    assert step()
    now_s[0] += 100
    assert not step()
    batch = Batch()
    batch.put(Family.MESSAGES, b"key", b"value")
    store.write(batch)
    assert step()
    store.write(batch)
    assert not step()
    now_s[0] += REST_S_MIN
    assert step()
    store.close()
