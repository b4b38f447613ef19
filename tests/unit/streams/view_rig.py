"""A writer with small segments on a store on disk, for tests of views."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.log.lane_options import LaneOptions
from basaltmq.store.api import Store
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.streams.adapter import Clock
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import TopicConfig
from basaltmq.streams.view import StreamView

START_MS = 1_700_000_000_000


class Writer:
    """Stands for the process that has the store open."""

    def __init__(self, path: Path, *, segment_bytes: int = 4096, lanes: int = 1) -> None:
        self.path = path
        self.now_ms = START_MS
        self._options = LaneOptions(segment_bytes=segment_bytes)
        self._lanes = lanes
        self.open()

    def clock_ms(self) -> int:
        return self.now_ms

    def open(self) -> None:
        self.store: RocksStore = open_store(self.path)
        self.plane = StreamPlane(self.store, self.clock_ms, makers={Engine.SEGMENT: partial(self._engine, self.store)})
        if (self.path / "log").is_dir():
            # Recover the log at open, as `Basalt.open` does. A plane opens the engine at the first use.
            self.plane.engines.get(Engine.SEGMENT)

    def _engine(
        self, managed: RocksStore, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
    ) -> SegmentEngine:
        return SegmentEngine(
            managed,
            shards,
            offsets,
            clock_ms,
            leaders,
            path=self.path / "log",
            options=self._options,
            lanes=self._lanes,
        )

    @property
    def engine(self) -> SegmentEngine:
        engine = self.plane.engines.get(Engine.SEGMENT)
        assert isinstance(engine, SegmentEngine)
        return engine

    def create(self, name: str, **config: Any) -> None:
        self.plane.topics.create(name, msgspec.convert(config, TopicConfig))

    def put(self, topic: str, *values: bytes | Record, partition: int = 0, wait: bool = True) -> int:
        """Append one batch and return its first offset."""
        records = [value if isinstance(value, Record) else Record(value) for value in values]
        [(_, append)] = self.plane.drivers.append_batch(topic, records, partition=partition)
        if wait:
            self.plane.drivers.wait(append)
        return append.base_offset

    def read_all(self, topic: str, partition: int = 0) -> list[StoredRecord]:
        found: list[StoredRecord] = []
        offset = self.plane.drivers.info(topic, partition).start_offset
        while True:
            batch = self.plane.drivers.read(topic, partition, offset)
            found += batch.records()
            if batch.next_offset == offset:
                return found
            offset = batch.next_offset

    def clean(self) -> None:
        """Run retention and cleaning until nothing is left to do."""
        for _ in range(50):
            self.engine.retain(self.now_ms)
        while self.engine._cleaner.clean():
            pass

    def close(self) -> None:
        self.plane.close()
        self.store.close()

    def kill(self) -> None:
        """End like a killed process: written data stays, data in memory is lost."""
        for lane in self.engine.lanes:
            lane.watermarks.close()
            lane.log.poison(RuntimeError("killed"))
            lane.log.close()
        self.engine.ceilings.ends.close(clear=False)
        self.plane.engines._open.pop(Engine.SEGMENT)
        self.store.poison(RuntimeError("killed"))
        self.plane.watermarks.close()
        self.store.close()


def seen(view: StreamView, topic: str, partition: int = 0) -> list[StoredRecord]:
    """Return all records of a partition that a view shows."""
    found: list[StoredRecord] = []
    offset = view.info(topic, partition).start_offset
    while True:
        batch = view.read(topic, partition, offset)
        found += batch.records()
        if batch.next_offset == offset:
            return found
        offset = batch.next_offset


def values(view: StreamView, topic: str, partition: int = 0) -> list[bytes]:
    return [(record.value or b"") for record in seen(view, topic, partition)]
