"""Migration of topics to and from the segment engine, with records that are not durable yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.stream_engines import FakeClock

import basaltmq
from basaltmq.durability import Durability
from basaltmq.log.batches import record as record_module
from basaltmq.log.batches.record import Record
from basaltmq.store.api import Store
from basaltmq.store.open import open_store
from basaltmq.streams.adapter import Clock, StorageAdapter
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.plane import StreamPlane
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import TopicConfig


class Opened:
    """Open a store on disk with all three engines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        self.store = open_store(self.path / "store")
        self.plane = StreamPlane(self.store, FakeClock(), makers={Engine.SEGMENT: self._segment})

    def _segment(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
    ) -> StorageAdapter:
        managed: Any = store
        return SegmentEngine(managed, shards, offsets, clock_ms, leaders, path=self.path / "log")

    def close(self) -> None:
        self.plane.close()
        self.store.close()

    def reopen(self) -> None:
        self.close()
        self.open()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    made = Opened(tmp_path)
    yield made
    made.close()


def everything(plane: StreamPlane, partition: int) -> list[tuple[int, bytes]]:
    at = plane.drivers.info("orders", partition).start_offset
    found: list[tuple[int, bytes]] = []
    while True:
        batch = plane.drivers.read("orders", partition, at)
        found += [(each.offset, (each.value or b"")) for each in batch.records()]
        if batch.next_offset == at:
            return found
        at = batch.next_offset


@pytest.mark.spec("D5")
@pytest.mark.promise("P3", "P10")
def test_a_topic_is_unchanged_after_migrations_through_all_engines_and_restarts(opened: Opened) -> None:
    plane = opened.plane
    plane.topics.create("orders", TopicConfig(partitions=2, engine=Engine.SEGMENT))
    for number in range(600):
        plane.drivers.append("orders", Record(b"%d" % number, key=b"k%d" % (number % 9)), partition=number % 2)
    for partition in (0, 1):
        # The appends above requested `synced` without a waiter. They are not visible yet and must not be lost.
        assert plane.drivers.info("orders", partition).high_watermark < 300
    plane.engines.get(Engine.SEGMENT).sync()
    plane.drivers.delete_by_offset("orders", 0, [0, 7, 299])
    plane.drivers.delete_records_before("orders", 1, 11)
    plane.offsets.commit("g", {(plane.topics.get("orders").id, 1): 42})
    before = [everything(plane, partition) for partition in (0, 1)]
    for engine in (Engine.ROCKSDB, Engine.SEGMENT):
        opened.plane.migration.begin("orders", engine)
        opened.plane.migration.step("orders", 130)
        opened.reopen()
        progress = opened.plane.migration.progress("orders")
        assert progress.copied >= 100
        moved = opened.plane.migration.run("orders", engine)
        assert moved.config.engine is engine
        opened.reopen()
        assert [everything(opened.plane, partition) for partition in (0, 1)] == before
        assert [opened.plane.drivers.info("orders", p).next_offset for p in (0, 1)] == [300, 300]
        assert [each.committed for each in opened.plane.groups.lag("g")] == [42]
    assert len(list(opened.plane.shards.listed())) == 2


@pytest.mark.spec("D5")
@pytest.mark.promise("P1")
def test_records_without_a_waiter_are_migrated(opened: Opened) -> None:
    plane = opened.plane
    plane.topics.create("orders", TopicConfig(engine=Engine.SEGMENT))
    for number in range(2_500):
        _, append = plane.drivers.append("orders", Record(b"%d" % number), durability=Durability.SYNCED)
    plane.migration.run("orders", Engine.ROCKSDB)
    plane.drivers.wait(append)
    assert everything(plane, 0) == [(number, b"%d" % number) for number in range(2_500)]


def test_an_out_of_range_time_of_an_older_version_does_not_block_a_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with basaltmq.open(tmp_path) as db:
        with monkeypatch.context() as older:
            older.setattr(record_module, "TIMESTAMP_MS_MAX", (1 << 63) - 1)
            db.topic("old", engine="rocksdb").append([Record(b"x", timestamp_ms=(1 << 63) - 1)])
        db.streams.migration.run("old", Engine.SEGMENT)
        (moved,) = db.topic("old").read()
        assert (moved.value, moved.timestamp_ms) == (b"x", record_module.TIMESTAMP_MS_MAX)
