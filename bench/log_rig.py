"""Common code of the benches of the commit log: an engine on the measured disk, batches, rates.

`bench_path()` is on the disk of the repository, or in BASALT_BENCH_DIR.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from bench.row import Row

from basaltmq.durability import Durability
from basaltmq.log.batches.columnar import ColumnBatch
from basaltmq.log.batches.record import Record
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.offsets import PersistentOffsets
from basaltmq.streams.shards import Engine, ShardConfig, Shards, ShardSpec
from basaltmq.streams.watermark import Watermarks

RECORDS = 100
VALUE_BYTES = 256
ROUNDS = 5
MIB = 1 << 20


def clock_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def bench_path() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="basalt-bench-", dir=os.environ.get("BASALT_BENCH_DIR", Path.cwd())))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Rig:
    """An engine over a store, like in an embedded program."""

    def __init__(self, path: Path, progress: Callable[[int, int], None] | None = None) -> None:
        self.path = path
        self.store: RocksStore = open_store(path / "store")
        self.watermarks = Watermarks(self.store)
        self.shards = Shards(self.store, clock_ms)
        offsets = PersistentOffsets(self.store, self.watermarks.group, clock_ms)
        started = time.perf_counter()
        self.engine = SegmentEngine(
            self.store, self.shards, offsets, clock_ms, path=path / "log", progress=progress, in_loop=True
        )
        self.engine_s = time.perf_counter() - started
        """Start time of the engine on an open store."""

    def create(self, count: int, *, index_keys: bool = True) -> list[int]:
        config = ShardConfig(durability=Durability.WRITTEN, index_keys=index_keys)
        specs = [ShardSpec(uuid4(), 0, Engine.SEGMENT, config) for _ in range(count)]
        return [meta.number for meta in self.shards.create([self.engine.place(spec) for spec in specs])]

    def close(self) -> None:
        self.engine.close()
        self.watermarks.close()
        self.store.close()


def batch_of(number: int, keyed: bool = False) -> ColumnBatch:
    value = os.urandom(VALUE_BYTES)
    return ColumnBatch.from_records(
        [Record(value, b"key-%d" % (number + at) if keyed else None) for at in range(RECORDS)], clock_ms()
    )


def rows_of(*parts: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows of the parts in BASALT_BENCH_PARTS, separated by commas; of all parts if it is not set."""
    named = [name for name in os.environ.get("BASALT_BENCH_PARTS", "").split(",") if name]
    return [row for part in parts if not named or part.__name__ in named for row in part()]


def rate(count: int, action: Callable[[int], object]) -> float:
    """Return actions per second."""
    started = time.perf_counter()
    for number in range(count):
        action(number)
    return count / (time.perf_counter() - started)


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
