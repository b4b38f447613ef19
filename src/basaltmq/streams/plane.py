"""The stream plane: opens all stream components over one store and closes them in order.

The embedded API, the command line and the broker take the components they need from `StreamPlane`. Engines are created
on first use. The caller owns the store.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.commits import Commits
from basaltmq.errors import BasaltError
from basaltmq.store.api import Store
from basaltmq.streams.adapter import Clock, StorageAdapter
from basaltmq.streams.drivers import Drivers, EngineFactory, Engines
from basaltmq.streams.engines.memory import MemoryEngine
from basaltmq.streams.engines.rocksdb.engine import RocksdbEngine
from basaltmq.streams.groups import GroupMembers, Groups
from basaltmq.streams.leaders import Leaders, OneNode
from basaltmq.streams.migration import Migration
from basaltmq.streams.offsets import CachedOffsets, Offsets, PersistentOffsets
from basaltmq.streams.orphans import Orphans
from basaltmq.streams.shards import Engine, Shards
from basaltmq.streams.topics import Topics
from basaltmq.streams.watermark import Watermarks


class OffsetStrategy(enum.StrEnum):
    """How committed group offsets are stored; see `streams/offsets.py`."""

    PERSISTENT = "persistent"
    CACHED = "cached"


class EngineMaker(Protocol):
    """Creates an engine that needs more than the plane has: `segment` needs a directory."""

    def __call__(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
    ) -> StorageAdapter: ...


class StreamPlane:
    """Topics, engines and consumer groups over one store."""

    def __init__(
        self,
        store: Store,
        clock_ms: Clock,
        *,
        makers: Mapping[Engine, EngineMaker] | None = None,
        leaders: Leaders | None = None,
        offset_strategy: OffsetStrategy = OffsetStrategy.PERSISTENT,
    ) -> None:
        """`makers` adds or replaces engines."""
        leaders = leaders or OneNode()
        self.store = store
        self.watermarks = Watermarks(store)
        try:
            self.catalog = Catalog(store, Commits(store, self.watermarks.group))
            self.catalog.open()
            self.shards = Shards(store, clock_ms)
            self.offsets = self._offsets(offset_strategy, clock_ms)
            self.engines = Engines(self._factories(clock_ms, leaders, makers or {}))
            self.topics = Topics(self.catalog, self.shards, self.offsets, self.watermarks.group, self.engines.get)
        except BaseException:
            self.watermarks.close()
            raise
        self.drivers = Drivers(self.topics, self.shards, self.engines)
        self.groups = Groups(self.offsets, self.topics, self.drivers)
        self.migration = Migration(self.topics, self.shards, self.engines)
        self.orphans = Orphans(store, self.catalog, self.topics, self.shards, self.offsets, self.engines.get)
        self.engines.on_retain(self.orphans.sweep)
        self._members: dict[str, GroupMembers] = {}
        self._closed = False

    def group(self, name: str) -> GroupMembers:
        """Return the members of a group in this process. Consumers call its `join`."""
        return self._members.setdefault(name, GroupMembers(name, self.offsets, self.topics, self.drivers))

    def close(self) -> None:
        """Flush and sync pending writes. The store stays open. Idempotent."""
        if self._closed:
            return
        self._closed = True
        failure: BasaltError | None = None
        for close in (self.offsets.close, self.engines.close, self.topics.close, self.watermarks.close):
            try:
                close()
            except BasaltError as error:
                failure = failure or error
        self.catalog.close()
        if failure is not None:
            raise failure

    def _offsets(self, strategy: OffsetStrategy, clock_ms: Clock) -> Offsets:
        if strategy is OffsetStrategy.CACHED:
            return CachedOffsets(self.store, self.watermarks.group, clock_ms)
        return PersistentOffsets(self.store, self.watermarks.group, clock_ms)

    def _factories(
        self, clock_ms: Clock, leaders: Leaders, makers: Mapping[Engine, EngineMaker]
    ) -> dict[Engine, EngineFactory]:
        factories: dict[Engine, EngineFactory] = {
            Engine.MEMORY: lambda: MemoryEngine(self.store, self.shards, self.offsets, clock_ms, leaders),
            Engine.ROCKSDB: lambda: RocksdbEngine(
                self.store, self.shards, self.offsets, clock_ms, leaders, watermarks=self.watermarks
            ),
        }
        for engine, maker in makers.items():
            factories[engine] = lambda maker=maker: maker(  # type: ignore[misc]
                self.store, self.shards, self.offsets, clock_ms, leaders
            )
        return factories
