"""The stream plane put together: one object that opens everything over a store, in order, and closes it in reverse.

What is above (the embedded API, the command line, the broker) takes the parts it needs from here. Engines are made on
first use; the store, the catalog and what else shares the store stay their owner's.
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
from basaltmq.streams.topics import CREATE_TIMEOUT_MS, Topics
from basaltmq.streams.watermark import Watermarks


class OffsetStrategy(enum.StrEnum):
    """How commits of groups are kept; see `offsets`."""

    PERSISTENT = "persistent"
    CACHED = "cached"


class EngineMaker(Protocol):
    """Makes an engine that the plane itself does not know: `segment`, which needs a directory."""

    def __call__(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders
    ) -> StorageAdapter: ...


class StreamPlane:
    """Topics, engines, groups over one store."""

    def __init__(
        self,
        store: Store,
        clock_ms: Clock,
        *,
        catalog: Catalog | None = None,
        makers: Mapping[Engine, EngineMaker] | None = None,
        leaders: Leaders | None = None,
        offset_strategy: OffsetStrategy = OffsetStrategy.PERSISTENT,
        create_timeout_ms: int = CREATE_TIMEOUT_MS,
    ) -> None:
        """`makers` adds or replaces engines. A catalog handed in is open, and its owner's to close."""
        leaders = leaders or OneNode()
        self.store = store
        self.watermarks = Watermarks(store)
        self._owned_catalog: Catalog | None = None
        try:
            if catalog is None:
                catalog = self._owned_catalog = Catalog(store, Commits(store, self.watermarks.group))
                catalog.open()
            self.catalog = catalog
            self.shards = Shards(store, clock_ms)
            self.offsets = self._offsets(offset_strategy, clock_ms)
            self.engines = Engines(self._factories(clock_ms, leaders, makers or {}))
            self.topics = Topics(
                self.catalog,
                self.shards,
                self.offsets,
                self.watermarks.group,
                self.engines.get,
                create_timeout_ms=create_timeout_ms,
            )
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
        """The members of a group in this process; join it to consume."""
        return self._members.setdefault(name, GroupMembers(name, self.offsets, self.topics, self.drivers))

    def close(self) -> None:
        """Flush and make durable what waits. The store stays open. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        failure: BasaltError | None = None
        for close in (self.offsets.close, self.engines.close, self.topics.close, self.watermarks.close):
            try:
                close()
            except BasaltError as error:
                failure = failure or error
        if self._owned_catalog is not None:
            self._owned_catalog.close()
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
