"""Simulated crashes before and after every system call that changes a lane's files.

A kill at a random time rarely hits the gap between two calls. Here each call is a crash point: the lane's directory and
the list of confirmed frames are copied before and after it, and every copy is recovered. A lock excludes calls during a
copy, so each copy is consistent.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from basaltmq.log.frame import COLUMNAR, encode_frame, frame_bytes
from basaltmq.log.lane import Lane
from basaltmq.log.lane_options import LaneOptions
from basaltmq.log.recovery import repair

CALLS = ("writev", "pwritev", "pwrite", "fdatasync", "fsync", "unlink", "rename", "ftruncate")
STEPS = 45
SEED = 7


def open_lane(path: Path, options: LaneOptions | None = None) -> Lane:
    return Lane.open(path, clock_ms=lambda: 1, random_u32=lambda: SEED, options=options)


class CrashPoints:
    """Copies of a directory around every call, each with the frames that were confirmed by then."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source = source
        self._target = target
        self._lock = threading.Lock()
        self.confirmed: set[int] = set()
        self.points: list[tuple[str, Path, frozenset[int]]] = []

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._copy(f"before {name}")
                try:
                    return call(*args, **kwargs)
                finally:
                    self._copy(f"after {name}")

        return wrapped

    def _copy(self, where: str) -> None:
        path = self._target / f"{len(self.points):05d}"
        shutil.copytree(self._source, path)
        self.points.append((where, path, frozenset(self.confirmed)))


def write(lane: Lane, confirm: Callable[[int], None], rng: random.Random) -> None:
    """Append frames at both durability levels, with reads, rolls and syncs between them."""
    number = 0
    for _ in range(STEPS):
        waiting = []
        for _ in range(rng.randint(1, 3)):
            body = b"%d:" % number + b"x" * rng.choice((10, 700, 3000))
            is_synced = rng.random() < 0.7
            parts = encode_frame(lane.seed, COLUMNAR, 1, number, 1, 0, 0, 0, 0, body, 0)
            lane.append(parts, frame_bytes(len(body)), None, is_synced)
            if is_synced:
                waiting.append(number)
            else:
                confirm(number)
            number += 1
        if rng.random() < 0.2:
            lane.read(max(lane.start, lane.end - 400), 100)
        lane.sync_through_ring()
        for each in waiting:
            confirm(each)
        if rng.random() < 0.8:
            lane.move_ring_frames()
        if rng.random() < 0.1:
            lane.roll()


@pytest.mark.spec("B6", "D3")
@pytest.mark.promise("P1", "P3")
@pytest.mark.parametrize("moved_bytes_min", [1, 1 << 16])
def test_confirmed_frames_survive_a_crash_at_every_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved_bytes_min: int
) -> None:
    # Small enough for several rolls and wraps of the ring.
    options = LaneOptions(segment_bytes=24 << 10, ring_bytes=24 << 10, ring_after=1, moved_bytes_min=moved_bytes_min)
    lane = open_lane(tmp_path / "lane", options)
    crash = CrashPoints(tmp_path / "lane", tmp_path / "points")
    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, crash.around(name, getattr(os, name)))
        write(lane, crash.confirmed.add, random.Random(SEED))
        lane.close()
    assert len(crash.points) > 4 * STEPS
    for where, path, confirmed in crash.points:
        again = open_lane(path)
        found: list[int] = []
        bodies: dict[int, bytes] = {}

        def visit(each: Any, found: list[int] = found, bodies: dict[int, bytes] = bodies) -> None:
            found.append(each.header.base_offset)
            bodies[each.header.base_offset] = each.body

        repair(again, again.start, tmp_path / "quarantine", visit)
        again.close()
        assert confirmed <= bodies.keys(), f"{where}, {path}: lost {sorted(confirmed - bodies.keys())}"
        assert found == list(range(len(found))), f"{where}, {path}: {found}"
        assert all(body.startswith(b"%d:" % number) for number, body in bodies.items())
        shutil.rmtree(path)
