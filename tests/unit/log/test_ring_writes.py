"""The calls that write a ring: the fastest that the file system supports, and durable with each of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.log.test_ring import copied, found, gather, name_of, open_lane, ringed

from basaltmq.log.ring import NAME


class Disk:
    """A file system that may lack the call, and makes short writes if `is_short`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_call: bool) -> None:
        self.is_short = False
        self.calls: list[str] = []
        self._has_call = has_call
        self._sync, self._write = os.fdatasync, os.pwritev
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)
        monkeypatch.setattr(os, "pwritev", self.pwritev)

    def fdatasync(self, fd: int) -> None:
        self.calls.append("sync")
        self._sync(fd)

    def pwritev(self, fd: int, parts: Sequence[bytes], at: int, flags: int = 0) -> int:
        if flags and not self._has_call:
            raise OSError(errno.EOPNOTSUPP, "not here")
        self.calls.append("write and sync" if flags & os.RWF_DSYNC else "write")
        if self.is_short:
            return os.pwrite(fd, b"".join(parts)[:1000], at)
        return self._write(fd, parts, at, flags)


@pytest.mark.promise("P1")
@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize(("has_call", "calls"), [(True, ["write and sync"]), (False, ["write", "sync"])])
def test_a_ring_uses_the_fastest_call_that_its_file_system_supports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_call: bool, calls: list[str], is_short: bool
) -> None:
    lane_path = tmp_path / "lane"
    disk = Disk(monkeypatch, has_call=has_call)
    lane = ringed(lane_path)
    kept = lane.end
    disk.is_short = is_short
    for number in range(1, 5):
        gather(lane, number, bytes([number]) * 1500 * number)
        disk.calls.clear()
        lane.sync_through_ring()
        assert disk.calls == ([*calls[:1], "sync"] if is_short else calls)
        assert lane.synced_position == lane.end
    disk.is_short = False
    monkeypatch.undo()
    assert found(copied(lane, tmp_path / "lost", kept), tmp_path) == [0, 1, 2, 3, 4]
    lane.close()


@pytest.mark.promise("P1")
def test_replay_writes_ring_frames_even_if_the_segment_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A failed sync leaves pages that can be read, are not on disk, and are not written by the next sync.
    lane = ringed(tmp_path / "lane")
    begin = lane.end
    frames = gather(lane, 1)
    lane.sync_through_ring()
    lane.move_ring_frames()
    left = copied(lane, tmp_path / "left")
    lane.close()
    done: list[tuple[str, int, bytes]] = []
    real_write, real_sync = os.pwrite, os.fdatasync

    def pwrite(fd: int, data: bytes, at: int) -> int:
        done.append((name_of(fd), at, bytes(data)))
        return real_write(fd, data, at)

    def fdatasync(fd: int) -> None:
        done.append((name_of(fd), -1, b""))
        real_sync(fd)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    opened = open_lane(left)
    segment = opened.segments()[-1].path.name
    monkeypatch.undo()
    assert not (left / NAME).exists()
    assert done.index((segment, begin, frames)) < done.index((segment, -1, b""))
    opened.close()
