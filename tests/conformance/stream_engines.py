"""The stream engines that the conformance suite tests.

`ENGINES` lists them. A `Rig` is an engine with a manual clock, a store, and a gate that blocks syncs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID, uuid4

from basaltmq.durability import Durability
from basaltmq.log.batches.record import Record, StoredRecord
from basaltmq.store.api import Store
from basaltmq.store.memory import MemoryStore
from basaltmq.store.open import open_store
from basaltmq.streams.adapter import StorageAdapter
from basaltmq.streams.engines.memory import MemoryEngine
from basaltmq.streams.engines.rocksdb.engine import RocksdbEngine
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.offsets import PersistentOffsets
from basaltmq.streams.shards import Engine, ShardConfig, Shards, ShardSpec
from basaltmq.streams.watermark import Watermarks

START_MS = 1_700_000_000_000


class FakeClock:
    """A manual clock, which can also be set back."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class RemoteLeaders:
    """Names another node as the leader of some shards."""

    def __init__(self) -> None:
        self.elsewhere: dict[int, str] = {}

    def leader_of(self, shard: int) -> str:
        return self.elsewhere.get(shard, "")


class GatedStore:
    """A store whose syncs wait at a gate and whose writes can fail."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.fail_write: Exception | None = None
        self.fail_sync: Exception | None = None
        self.syncs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, *args: Any, **kwargs: Any) -> None:
        if self.fail_write is not None:
            raise self.fail_write
        self._store.write(*args, **kwargs)

    def sync(self) -> None:
        self.arrived.set()
        assert self.gate.wait(30), "the gate was never opened"
        if self.fail_sync is not None:
            raise self.fail_sync
        self.syncs += 1
        self._store.sync()


class Rig:
    """One engine over one store."""

    def __init__(self, name: str, path: Path, *, on_disk: bool = True) -> None:
        self.engine_name = Engine(name)
        self.is_durable = self.engine_name is not Engine.MEMORY
        self.clock = FakeClock()
        self.leaders = RemoteLeaders()
        self._path = path
        self._on_disk = on_disk
        self._memory = MemoryStore()
        self.open()

    def open(self) -> None:
        raw: Store = open_store(self._path / "store") if self._on_disk else _UnclosedStore(self._memory)
        self.store = GatedStore(raw)
        self.watermarks = Watermarks(self.store)
        self.shards = Shards(self.store, self.clock)
        self.offsets = PersistentOffsets(self.store, self.watermarks.group, self.clock)
        self.engine: StorageAdapter = ENGINES[self.engine_name](self)

    def close(self) -> None:
        self.store.gate.set()
        self.engine.close()
        self.watermarks.close()
        self.store.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def shard(self, topic_id: UUID | None = None, partition: int = 0, **config: Any) -> int:
        """Create a shard, by default with `written` durability (`memory` in the memory engine)."""
        config.setdefault("durability", Durability.WRITTEN if self.is_durable else Durability.MEMORY)
        spec = ShardSpec(topic_id or uuid4(), partition, self.engine_name, ShardConfig(**config))
        return self.engine.create_shard(spec).number

    @contextmanager
    def syncs_held(self) -> Iterator[None]:
        """Block the syncs of log and store inside the block."""
        hold = getattr(self.engine, "syncs_held", None)
        self.store.gate.clear()
        self.store.arrived.clear()
        try:
            if hold is None:
                yield
            else:
                with hold():
                    yield
        finally:
            self.store.gate.set()


class _UnclosedStore:
    """A memory store that keeps its rows after a close."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        pass


EngineMaker: TypeAlias = Callable[[Rig], StorageAdapter]


def _memory(rig: Rig) -> StorageAdapter:
    return MemoryEngine(rig.store, rig.shards, rig.offsets, rig.clock, rig.leaders)


def _rocksdb(rig: Rig) -> StorageAdapter:
    return RocksdbEngine(rig.store, rig.shards, rig.offsets, rig.clock, rig.leaders, watermarks=rig.watermarks)


def _gated(sync: Callable[[], None], store: GatedStore) -> Callable[[], None]:
    """A lane's sync that waits at the store's gate and fails like the store's."""

    def held() -> None:
        store.arrived.set()
        assert store.gate.wait(30), "the gate was never opened"
        if store.fail_sync is not None:
            raise store.fail_sync
        sync()

    return held


def _segment(rig: Rig) -> StorageAdapter:
    store: Any = rig.store
    engine = SegmentEngine(store, rig.shards, rig.offsets, rig.clock, rig.leaders, path=rig._path / "log")
    for lane in engine.lanes:
        lane.log.sync = _gated(lane.log.sync, rig.store)  # type: ignore[method-assign]
    return engine


ENGINES: dict[str, EngineMaker] = {"memory": _memory, "rocksdb": _rocksdb, "segment": _segment}


def record(value: bytes | str | int, **fields: Any) -> Record:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return Record(value=raw, **fields)


def fill(rig: Rig, shard: int, count: int, **fields: Any) -> None:
    rig.engine.wait(rig.engine.batch_write(shard, [record(number, **fields) for number in range(count)]))


def drained(rig: Rig, shard: int, offset: int | None = None) -> list[StoredRecord]:
    """Return all records from an offset on."""
    at = rig.engine.shard_info(shard).start_offset if offset is None else offset
    found: list[StoredRecord] = []
    while True:
        batch = rig.engine.read_by_offset(shard, at)
        found += batch.records()
        if batch.next_offset == at:
            return found
        assert batch.next_offset > at
        at = batch.next_offset


def offsets(rig: Rig, shard: int) -> list[int]:
    return [each.offset for each in drained(rig, shard)]
