"""A segment engine with small segments over a memory store, and dumps of its index."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from basaltmq.durability import Durability
from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.log.lane_options import LaneOptions
from basaltmq.store.api import ManagedStore
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.memory import MemoryStore
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.offsets import PersistentOffsets
from basaltmq.streams.shards import Engine, ShardConfig, Shards, ShardSpec
from basaltmq.streams.watermark import Watermarks

INDEX = Family.STREAM_INDEX


class SegmentRig:
    """One engine with its dependencies. `crash` leaves the state of a killed process."""

    def __init__(self, path: Path, *, segment_bytes: int = 4096, lanes: int = 1, store: Any = None) -> None:
        self.path = path
        self.now_ms = 1_700_000_000_000
        self.store: ManagedStore = store or MemoryStore()
        self.options = LaneOptions(segment_bytes=segment_bytes)
        self.lanes = lanes
        self.progress: list[tuple[int, int]] = []
        self.engine: SegmentEngine
        self.open()

    def clock_ms(self) -> int:
        return self.now_ms

    def open(self) -> None:
        self.watermarks = Watermarks(self.store)
        self.shards = Shards(self.store, self.clock_ms)
        self.offsets = PersistentOffsets(self.store, self.watermarks.group, self.clock_ms)
        self.progress.clear()
        self.engine = SegmentEngine(
            self.store,
            self.shards,
            self.offsets,
            self.clock_ms,
            path=self.path / "log",
            quarantine=self.path / "quarantine",
            lanes=self.lanes,
            options=self.options,
            random_u32=lambda: 7,
            progress=lambda done, total: self.progress.append((done, total)),
        )

    def close(self) -> None:
        self.engine.close()
        self.watermarks.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def crash(self) -> None:
        """Lose the frames gathered in memory, and keep the written ones."""
        for lane in self.engine.lanes:
            lane.watermarks.close()
            lane.log.poison(RuntimeError("killed"))
            lane.log.close()
        self.engine.ceilings.ends.close(clear=False)
        self.watermarks.close()

    def shard(self, **config: Any) -> int:
        config.setdefault("durability", Durability.WRITTEN)
        return self.engine.create_shard(ShardSpec(uuid4(), 0, Engine.SEGMENT, ShardConfig(**config))).number

    def put(self, shard: int, *values: bytes | Record) -> int:
        records = [value if isinstance(value, Record) else Record(value) for value in values]
        return self.engine.batch_write(shard, records).base_offset

    def rows(self) -> dict[bytes, bytes]:
        """Return the flushed index, without the synced position of the log, which is not derived."""
        self.engine.index.settle()
        return {key: value for key, value in self.store.scan(INDEX) if key[:1] not in b"PUX"}

    def wipe_index(self) -> None:
        batch = Batch()
        for key, _ in list(self.store.scan(INDEX)):
            batch.delete(INDEX, key)
        self.store.write(batch)

    def rebuilt(self) -> dict[bytes, bytes]:
        """Return the index after a loss and a rebuild from the log."""
        self.close()
        self.wipe_index()
        self.open()
        return self.rows()

    def drained(self, shard: int) -> list[StoredRecord]:
        at = self.engine.shard_info(shard).start_offset
        found: list[StoredRecord] = []
        while True:
            batch = self.engine.read_by_offset(shard, at)
            found += batch.records()
            if batch.next_offset == at:
                return found
            at = batch.next_offset

    def clean(self, rounds: int = 200) -> None:
        cleaner = self.engine._cleaner
        for _ in range(rounds):
            if not cleaner.clean():
                return
        raise AssertionError("cleaning never ends")

    def rows_of(self, shard: int) -> list[bytes]:
        number = shard.to_bytes(8, "big")
        return [key for key in self.rows() if key[:1] in b"OTKGDN" and key[1:9] == number] + [
            key for key in self.rows() if key[:1] == b"E" and stream_keys.decode_stream_expiry_key(key)[1] == shard
        ]


def explain(expected: dict[bytes, bytes], found: dict[bytes, bytes]) -> str:
    """Describe the differences of two indexes."""
    lines = [f"- {key!r}: {value.hex()}" for key, value in expected.items() if found.get(key) != value]
    lines += [f"+ {key!r}: {value.hex()}" for key, value in found.items() if expected.get(key) != value]
    return "\n".join(sorted(lines))
