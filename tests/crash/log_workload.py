"""Workload of a child on streams in the commit log until it is killed, and the checks afterwards. Its lines:

    = shard offset value    after open: an existing record; then `opened`
    s shard start next      after open: the start and the end of the shard
    + shard offset value    an append is confirmed at the shard's level
    ? shard offset          a delete starts                - shard offset    it is confirmed
    ^ shard start           the start offset is being raised to this

Shards 0 and 1 use `synced`, shard 2 `written`. Values are unique, so that a reused offset is detected.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Final
from uuid import UUID

from tests.crash.harness import ERROR, Child, Emit

from basaltmq.durability import Durability
from basaltmq.errors import BasaltError
from basaltmq.log.batches.record import Record
from basaltmq.log.lane import Lane
from basaltmq.log.lane_options import LaneOptions
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.engines.segment.index.index import StreamIndex
from basaltmq.streams.offsets import PersistentOffsets
from basaltmq.streams.shards import Engine, ShardConfig, Shards, ShardSpec
from basaltmq.streams.watermark import Watermarks

LEVELS: Final = (Durability.SYNCED, Durability.SYNCED, Durability.WRITTEN)
SEGMENT_BYTES: Final = 16 << 10
RING_BYTES: Final = 32 << 10
"""Size of the ring: so small that it wraps several times before a kill."""
KEPT: Final = 150
"""Records that a shard keeps, so that dumps are short and segments become garbage."""


class Streams:
    """An engine over a store at a path, with a shard per level."""

    def __init__(self, base: Path) -> None:
        self.store = open_store(base / "store")
        self.watermarks = Watermarks(self.store)
        self.shards = Shards(self.store, _now_ms)
        offsets = PersistentOffsets(self.store, self.watermarks.group, _now_ms)
        self.engine = SegmentEngine(
            self.store,
            self.shards,
            offsets,
            _now_ms,
            path=base / "log",
            options=LaneOptions(segment_bytes=SEGMENT_BYTES, ring_bytes=RING_BYTES, ring_after=1, moved_bytes_min=1000),
        )
        self.numbers = [self._shard(at, level) for at, level in enumerate(LEVELS)]

    def _shard(self, at: int, level: Durability) -> int:
        topic = UUID(int=at + 1)
        found = self.shards.number_of(topic, 0)
        if found is not None:
            return found
        return self.engine.create_shard(ShardSpec(topic, 0, Engine.SEGMENT, ShardConfig(durability=level))).number

    def dump(self, emit: Emit) -> None:
        for at, number in enumerate(self.numbers):
            info = self.engine.shard_info(number)
            emit(f"s {at} {info.start_offset} {info.next_offset}")
            offset = info.start_offset
            while offset < info.high_watermark:
                batch = self.engine.read_by_offset(number, offset)
                for record in batch.records():
                    emit(f"= {at} {record.offset} {(record.value or b'').decode()}")
                offset = batch.next_offset
        emit("opened")

    def close(self) -> None:
        self.engine.close()
        self.watermarks.close()
        self.store.close()


def run(emit: Emit, path: str, seed: int) -> None:
    rng = random.Random(seed)
    streams = Streams(Path(path))
    streams.dump(emit)
    stop = threading.Event()
    writers = [
        threading.Thread(target=_write, args=(emit, streams, at, stop, random.Random(rng.getrandbits(32)), seed))
        for at in range(len(LEVELS))
    ]
    for writer in writers:
        writer.start()
    for _ in range(400):
        _manage(emit, streams, rng)
    stop.set()
    for writer in writers:
        writer.join()
    streams.close()


def check(emit: Emit, path: str) -> None:
    """Open, dump, and compare the index with a rebuilt one."""
    streams = Streams(Path(path))
    streams.dump(emit)
    streams.engine.index.settle()
    rows = {key: value for key, value in streams.store.scan(Family.STREAM_INDEX) if key[:1] not in b"PUX"}
    streams.close()
    store = open_store(Path(path) / "store")
    batch = Batch()
    batch.delete_range(Family.STREAM_INDEX, b"", b"\xff")
    store.write(batch)
    store.close()
    again = Streams(Path(path))
    again.engine.index.settle()
    rebuilt = {key: value for key, value in again.store.scan(Family.STREAM_INDEX) if key[:1] not in b"PUX"}
    emit(f"damages {len(again.engine.damages)}")
    for key in sorted(rows.keys() | rebuilt.keys()):
        if rows.get(key) != rebuilt.get(key):
            old, new = (each[key].hex() if key in each else "absent" for each in (rows, rebuilt))
            emit(f"differs {key[:1].decode()}{key[1:].hex()} {old} {new}")
    emit(f"index {'same' if rows == rebuilt else 'differs'}")
    again.close()


def run_ahead(emit: Emit, path: str, seed: int) -> None:
    """Write an index checkpoint with frames that the log has not synced, and wait to be killed."""
    rng = random.Random(seed)
    streams = Streams(Path(path))
    append = streams.engine.batch_write
    for number in streams.numbers * 10:
        append(number, [Record(b"%d" % rng.getrandbits(64), b"k") for _ in range(3)], Durability.WRITTEN)
    streams.engine.checkpoint()
    log = streams.engine.lanes[0].log
    emit(f"synced {log.end}")
    # Not enough to fill the segment, because a full one is synced.
    while log.end - log.active_start < SEGMENT_BYTES - 1000:
        append(rng.choice(streams.numbers), [Record(b"%d" % rng.getrandbits(64), b"k")], Durability.WRITTEN)
    streams.engine.index.flush_to_disk()
    emit(f"ahead {log.end}")
    threading.Event().wait(60)


def check_taken_back(emit: Emit, path: str) -> None:
    """Open, report the end of the log and whether the index was rebuilt, and compare it with a rebuilt one."""
    real = StreamIndex.wipe

    def wipe(self: StreamIndex) -> None:
        emit("built again")
        real(self)

    StreamIndex.wipe = wipe  # type: ignore[method-assign]
    try:
        streams = Streams(Path(path))
    finally:
        StreamIndex.wipe = real  # type: ignore[method-assign]
    emit(f"end {streams.engine.lanes[0].log.end}")
    streams.close()
    check(emit, path)


def _write(emit: Emit, streams: Streams, at: int, stop: threading.Event, rng: random.Random, seed: int) -> None:
    number = streams.numbers[at]
    sequence = 0
    while not stop.is_set():
        values = []
        for _ in range(rng.randint(1, 4)):
            sequence += 1
            values.append(f"{seed:x}.{at}.{sequence}.{'x' * rng.choice((0, 30, 800))}")
        append = streams.engine.batch_write(number, [Record(value.encode(), b"k") for value in values])
        streams.engine.wait(append)
        for offset, value in enumerate(values, append.base_offset):
            emit(f"+ {at} {offset} {value}")


def _manage(emit: Emit, streams: Streams, rng: random.Random) -> None:
    at = rng.randrange(len(LEVELS))
    number = streams.numbers[at]
    info = streams.engine.shard_info(number)
    what = rng.randrange(8)
    if what == 0:
        streams.store.flush(Family.STREAM_INDEX)
    elif what == 1:
        streams.engine.retain(_now_ms())
    elif what == 2 and info.records > KEPT:
        start = info.high_watermark - rng.randint(1, KEPT)
        emit(f"^ {at} {start}")
        streams.engine.delete_records_before(number, start)
    elif what == 3 and info.high_watermark > info.start_offset:
        offset = rng.randrange(info.start_offset, info.high_watermark)
        emit(f"? {at} {offset}")
        streams.engine.delete_by_offset(number, [offset])
        emit(f"- {at} {offset}")
    elif what == 4:
        streams.engine.index.flush()
    else:
        try:
            streams.engine.read_by_key(number, b"k", info.start_offset).records()
        except BasaltError:
            # The start was raised meanwhile.
            return


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Expectation:
    """The lines of the children, and checks of their dumps."""

    def __init__(self, levels: tuple[Durability, ...]) -> None:
        self.levels = levels
        """Durability levels that survive this kind of crash."""
        self.checks = 0
        self._confirmed: dict[int, dict[int, str]] = defaultdict(dict)
        self._going: dict[int, set[int]] = defaultdict(set)
        self._gone: dict[int, set[int]] = defaultdict(set)
        self._start: dict[int, int] = defaultdict(int)
        self._shown: dict[int, dict[int, str]] = defaultdict(dict)
        self._ends: dict[int, tuple[int, int]] = {}

    def receive_line(self, line: str) -> None:
        kind, *rest = line.split(" ")
        if kind == "=":
            self._shown[int(rest[0])][int(rest[1])] = rest[2]
        elif kind == "s":
            self._ends[int(rest[0])] = (int(rest[1]), int(rest[2]))
        elif kind == "+":
            self._confirmed[int(rest[0])][int(rest[1])] = rest[2]
        elif kind == "?":
            self._going[int(rest[0])].add(int(rest[1]))
        elif kind == "-":
            self._gone[int(rest[0])].add(int(rest[1]))
        elif kind == "^":
            self._start[int(rest[0])] = max(self._start[int(rest[0])], int(rest[1]))
        elif kind == "opened":
            self._compare()

    def _compare(self) -> None:
        self.checks += 1
        for at, level in enumerate(LEVELS):
            shown, confirmed = self._shown[at], self._confirmed[at]
            start, following = self._ends[at]
            assert start <= max(self._start[at], 0), f"shard {at} begins at {start} without a request"
            if level in self.levels:
                for offset, value in confirmed.items():
                    if offset >= start and offset not in self._going[at]:
                        assert shown.get(offset) == value, (
                            f"shard {at} offset {offset}: {shown.get(offset)} not {value}"
                        )
                    assert offset < following, f"shard {at} would reuse offset {offset}"
                assert not self._gone[at] & shown.keys(), f"shard {at} shows deleted records again"
                held = set(range(start, following)) - self._going[at]
                assert held <= shown.keys(), f"shard {at} has holes: {sorted(held - shown.keys())[:5]}"
            # From here on, the dump is the expected state. Unconfirmed missing records were not written.
            self._confirmed[at] = dict(shown)
            self._going[at] = {offset for offset in self._going[at] if offset < following and offset not in shown}
            self._gone[at] = {offset for offset in self._gone[at] if offset < following}
            self._shown[at] = {}


def ride(child: Child, expectation: Expectation, rng: random.Random) -> None:
    """Read lines, kill the child some time after its open, and read the remaining lines."""
    left = rng.randint(1, 400)
    is_open = False
    said: list[str] = []
    try:
        for line in child.lines(timeout_s=60):
            if said or line == ERROR:
                said.append(line)
                continue
            expectation.receive_line(line)
            is_open = is_open or line == "opened"
            if is_open:
                left -= 1
                if left == 0:
                    child.kill()
    finally:
        child.kill()
        child.close()
    assert not said, "\n".join(said)


def run_unsynced(emit: Emit, path: str) -> None:
    """Write the index to disk, then fill three segments without any sync, and wait to be killed."""
    streams = Streams(Path(path))
    streams.engine.wait(streams.engine.batch_write(streams.numbers[0], [Record(b"first")], Durability.SYNCED))
    streams.engine.checkpoint()
    Lane.sync = lambda self: None  # type: ignore[method-assign]
    log = streams.engine.lanes[0].log
    while len(log.segments()) < 3:
        streams.engine.batch_write(streams.numbers[0], [Record(bytes(800), b"k")], Durability.WRITTEN)
    emit("filled")
    threading.Event().wait(60)


def run_recovered(emit: Emit, path: str) -> None:
    """Open, append durably, report the losses and the next offset, and wait to be killed."""
    streams = Streams(Path(path))
    number = streams.numbers[0]
    first = streams.engine.shard_info(number).next_offset
    streams.engine.wait(streams.engine.batch_write(number, [Record(b"durable")], Durability.SYNCED))
    emit(f"{len(streams.engine.losses)} {first}")
    threading.Event().wait(60)
