"""Workload of a child on the log with a full or failing disk. It reports what it observes; the test checks it."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from uuid import UUID

import pytest
from tests.crash.faults import attempt
from tests.crash.harness import Emit, Shim

from basaltmq.durability import Durability
from basaltmq.errors import BasaltError
from basaltmq.log.batches.record import Record
from basaltmq.log.lane_options import LaneOptions
from basaltmq.store.open import open_store
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.offsets import PersistentOffsets
from basaltmq.streams.shards import Engine, ShardConfig, Shards, ShardSpec
from basaltmq.streams.watermark import Watermarks

CONFIRMED = 8
ATTEMPTS = 30
"""Appends on the failing disk: enough to drain the ring and to roll a segment."""

OPTIONS = LaneOptions(segment_bytes=96 << 10, ring_bytes=64 << 10, ring_after=1, moved_bytes_min=2000)


class Streams:
    """An engine with one shard."""

    def __init__(self, base: Path, options: LaneOptions = OPTIONS) -> None:
        self.store = open_store(base / "store")
        self.watermarks = Watermarks(self.store)
        shards = Shards(self.store, _now_ms)
        offsets = PersistentOffsets(self.store, self.watermarks.group, _now_ms)
        self.engine = SegmentEngine(self.store, shards, offsets, _now_ms, path=base / "log", options=options)
        found = shards.number_of(UUID(int=1), 0)
        if found is None:
            spec = ShardSpec(UUID(int=1), 0, Engine.SEGMENT, ShardConfig(durability=Durability.SYNCED))
            found = self.engine.create_shard(spec).number
        self.shard = found

    def append(self, number: int, size_bytes: int) -> int:
        """Append a record. Return its offset when it is durable."""
        append = self.engine.write(self.shard, Record(b"%d " % number + b"x" * size_bytes))
        self.engine.wait(append)
        return append.base_offset

    def held(self) -> dict[int, int]:
        """Return the appended numbers by offset."""
        info = self.engine.shard_info(self.shard)
        found: dict[int, int] = {}
        offset = info.start_offset
        while offset < info.high_watermark:
            batch = self.engine.read_by_offset(self.shard, offset)
            found.update((record.offset, int((record.value or b"").split()[0])) for record in batch.records())
            offset = batch.next_offset
        return found

    def close(self) -> None:
        self.engine.close()
        self.watermarks.close()
        self.store.close()


def fill(emit: Emit, path: str, control: str, ops: str, pattern: str, code: int, half: int, size_bytes: int) -> None:
    """Confirm records, make the disk fail, append until the log stops, heal the disk, and check the reopened log."""
    base = Path(path)
    shim = Shim(base.parent, Path(control))
    streams = Streams(base)
    confirmed = {streams.append(number, size_bytes): number for number in range(CONFIRMED)}
    _have_ring(streams)
    shim.fail(ops, pattern, code, half=bool(half))
    errors: list[BasaltError] = []
    for number in range(CONFIRMED, CONFIRMED + ATTEMPTS):
        try:
            confirmed[streams.append(number, size_bytes)] = number
        except BasaltError as error:
            errors.append(error)
            if len(errors) > 1:
                break
    emit(f"confirmed {len(confirmed) - CONFIRMED}")
    emit(f"failed {len(errors)}")
    for name, seen in zip(("first", "then"), errors, strict=False):
        emit(f"{name} {type(seen).__name__} {seen}")
    shim.heal()
    if errors:
        attempt(emit, "healed", lambda: streams.append(0, 10))
    attempt(emit, "closing", streams.engine.close)
    streams.watermarks.close()
    streams.store.close()
    _look(emit, base, confirmed)


def doubt(emit: Emit, path: str, control: str, size_bytes: int) -> None:
    """Let the sync of a segment fail, heal the disk, reopen, and report what the start wrote again."""
    base = Path(path)
    shim = Shim(base.parent, Path(control))
    streams = Streams(base, LaneOptions(ring_bytes=0))
    confirmed = {streams.append(number, size_bytes): number for number in range(CONFIRMED)}
    shim.fail("fdatasync", "*.log", errno.EIO)
    attempt(emit, "sync", lambda: streams.append(CONFIRMED, size_bytes))
    shim.heal()
    attempt(emit, "closing", streams.engine.close)
    streams.watermarks.close()
    streams.store.close()
    again: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real = os.pwrite

        def pwrite(fd: int, data: bytes, at: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
                again.append(len(data))
            return real(fd, data, at)

        patch.setattr(os, "pwrite", pwrite)
        streams = Streams(base)
    emit(f"again {sum(again)}")
    streams.close()
    _look(emit, base, confirmed)


def _have_ring(streams: Streams) -> None:
    """Wait until the lane uses a ring."""
    log = streams.engine.lanes[0].log
    worker = log._worker
    assert worker is not None
    worker.join(60)
    assert log._ring is not None


def _look(emit: Emit, base: Path, confirmed: dict[int, int]) -> None:
    streams = Streams(base)
    held = streams.held()
    emit(f"lost {sum(held.get(offset) != number for offset, number in confirmed.items())}")
    emit(f"damages {len(streams.engine.damages)}")
    following = streams.append(-1, 3000)
    emit(f"goes on {following not in confirmed and streams.held()[following] == -1}")
    streams.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
