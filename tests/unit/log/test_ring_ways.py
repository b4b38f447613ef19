"""By which calls a ring is written: the best that its file system has, and durable by each of them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.log.test_ring import SEED, copied, found, frame, gather, name_of, open_lane, ringed

from basaltmq.log import ring as ring_module
from basaltmq.log.ring import NAME


class Disk:
    """A file system that does not have every call, and writes less than it is asked to where `is_short`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: str, *, is_short: bool) -> None:
        self.way = way
        self.is_short = is_short
        self.calls: list[str] = []
        self._open, self._sync, self._write = os.open, os.fdatasync, os.pwritev
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)
        monkeypatch.setattr(os, "pwritev", self.pwritev)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and self.way != "direct":
            raise OSError(errno.EINVAL, "not here")
        return self._open(path, flags, mode)

    def fdatasync(self, fd: int) -> None:
        self.calls.append("sync")
        self._sync(fd)

    def pwritev(self, fd: int, parts: Sequence[bytes], at: int, flags: int = 0) -> int:
        if flags and self.way == "plain":
            raise OSError(errno.EOPNOTSUPP, "not here")
        self.calls.append(f"{'direct' if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else 'write'} {flags}")
        if self.is_short:
            with open(f"/proc/self/fd/{fd}", "r+b") as file:
                return os.pwrite(file.fileno(), b"".join(bytes(part) for part in parts)[:1000], at)
        return self._write(fd, parts, at, flags)


@pytest.mark.promise("P1")
@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize(
    ("way", "calls"),
    [("direct", [f"direct {os.RWF_DSYNC}"]), ("through", [f"write {os.RWF_DSYNC}"]), ("plain", ["write 0", "sync"])],
)
def test_a_ring_is_written_by_the_best_call_that_its_file_system_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, calls: list[str], is_short: bool
) -> None:
    lane_path = tmp_path / "lane"
    disk = Disk(monkeypatch, way, is_short=False)
    lane = ringed(lane_path)
    kept = lane.end
    disk.is_short = is_short
    for number in range(1, 5):
        gather(lane, number, bytes([number]) * 1500 * number)
        disk.calls.clear()
        lane.secure()
        assert disk.calls == ([*calls[:1], "sync"] if is_short else calls)
        assert lane.synced_position == lane.end
    disk.is_short = False
    monkeypatch.undo()
    assert found(copied(lane, tmp_path / "lost", kept), tmp_path) == [0, 1, 2, 3, 4]
    lane.close()


@pytest.mark.promise("P1")
def test_an_entry_that_is_larger_than_the_buffer_goes_through_the_page_cache(tmp_path: Path) -> None:
    ring = ring_module.Ring.create(tmp_path, 4 << 20)
    parts = [frame(number, bytes([number]) * 100_000) for number in range(15)]
    size_bytes = sum(map(len, parts))
    assert size_bytes > ring_module._BUFFER_BYTES
    assert ring.append(SEED, 0, 0, parts[:2], len(parts[0]) * 2)
    assert ring.append(SEED, len(parts[0]) * 2, 0, parts, size_bytes)
    assert ring.append(SEED, len(parts[0]) * 2 + size_bytes, 0, parts[:1], len(parts[0]))
    raw = (tmp_path / NAME).read_bytes()
    assert [(entry[0], entry[3]) for entry in ring_module._entries(SEED, raw)] == [
        (0, len(parts[0]) * 2),
        (len(parts[0]) * 2, size_bytes),
        (len(parts[0]) * 2 + size_bytes, len(parts[0])),
    ]
    ring.close()


@pytest.mark.promise("P1")
def test_frames_of_a_ring_are_written_again_even_where_their_segment_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sync that fails leaves pages that read well, are on no disk, and are not written by the next sync.
    lane = ringed(tmp_path / "lane")
    begin = lane.end
    frames = gather(lane, 1)
    lane.secure()
    lane.tidy()
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
