"""The common base of the engines: shard lookup, leader checks, committed offsets, and whole-shard operations.

`EngineBase` holds no records and no lock. Engines derive from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from basaltmq.durability import Durability
from basaltmq.errors import InvalidArgumentError
from basaltmq.log.batches.record import Record
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.streams.adapter import (
    READ_BYTES,
    READ_RECORDS,
    SHARDS_LISTED_MAX,
    Append,
    Budget,
    Clock,
    ReadBatch,
    Records,
    ShardInfo,
)
from basaltmq.streams.leaders import Leaders, OneNode, require_leader
from basaltmq.streams.offsets import Offsets, TopicPartition
from basaltmq.streams.shards import Engine, ShardMeta, Shards, ShardSpec


class EngineBase:
    """The part of a `StorageAdapter` that does not depend on the storage of records."""

    engine: Engine

    def __init__(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders | None = None
    ) -> None:
        self._store = store
        self._shards = shards
        self._offsets = offsets
        self._clock_ms = clock_ms
        self._leaders = leaders or OneNode()

    def create_shard(self, spec: ShardSpec) -> ShardMeta:
        if spec.engine is not self.engine:
            raise InvalidArgumentError(f"engine {self.engine} cannot create a shard of engine {spec.engine}")
        meta = self._shards.create([self.place(spec)])[0]
        self._sync_rows()
        return meta

    def place(self, spec: ShardSpec) -> ShardSpec:
        return spec

    def delete_shard(self, shard: int) -> None:
        batch = Batch()
        self.plan_delete(batch, shard)
        try:
            self._store.write(batch)
        except BaseException:
            self.revive(shard)
            raise
        self.forget(shard)
        self._sync_rows()

    def list_shard(self, after: int = 0, limit: int = SHARDS_LISTED_MAX) -> list[ShardInfo]:
        limit = min(limit, SHARDS_LISTED_MAX)
        metas = list(self._shards.listed(after, limit, self.engine))
        return [self.shard_info(meta.number) for meta in metas]

    def get_offset_by_group(self, group: str, shards: Sequence[int]) -> dict[int, int]:
        names = {shard: self._name_of(shard) for shard in shards}
        found = self._offsets.committed(group, list(names.values()))
        return {shard: found[at].offset for shard, at in names.items() if at in found}

    def commit_offset(self, group: str, offsets: Mapping[int, int]) -> None:
        self._offsets.commit(group, {self._name_of(shard): offset for shard, offset in offsets.items()})

    def write(self, shard: int, record: Record, durability: Durability | None = None) -> Append:
        return self.batch_write(shard, (record,), durability)

    def read_by_offset(
        self, shard: int, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch:
        return self._read(shard, offset, Budget(max_records, max_bytes))

    def read_by_tag(
        self, shard: int, tag: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch:
        return self._read(shard, offset, Budget(max_records, max_bytes), tag=tag)

    def read_by_key(
        self, shard: int, key: bytes, offset: int, max_records: int = READ_RECORDS, max_bytes: int = READ_BYTES
    ) -> ReadBatch:
        return self._read(shard, offset, Budget(max_records, max_bytes), key=key)

    def batch_write(self, shard: int, records: Records, durability: Durability | None = None) -> Append:
        raise NotImplementedError

    def _read(
        self, shard: int, offset: int, budget: Budget, *, tag: bytes | None = None, key: bytes | None = None
    ) -> ReadBatch:
        """Return records from an offset on, with this tag or key if one is given."""
        raise NotImplementedError

    def plan_delete(self, batch: Batch, shard: int) -> None:
        raise NotImplementedError

    def forget(self, *shards: int) -> None:
        raise NotImplementedError

    def revive(self, shard: int) -> None:
        raise NotImplementedError

    def shard_info(self, shard: int) -> ShardInfo:
        raise NotImplementedError

    def sync(self) -> None:
        self._sync_rows()

    def _sync_rows(self) -> None:
        """Sync the rows written to the store."""
        self._store.sync()

    def _name_of(self, shard: int) -> TopicPartition:
        meta = self._own(shard)
        return meta.topic_id, meta.partition

    def _own(self, shard: int) -> ShardMeta:
        """Return the row of a shard. Raises an error if the shard belongs to another engine."""
        meta = self._shards.get(shard)
        if meta.engine is not self.engine:
            raise InvalidArgumentError(f"shard {shard} belongs to engine {meta.engine}, not to {self.engine}")
        return meta

    def _require_leader(self, shard: int) -> None:
        require_leader(self._leaders, shard)

    def _level(self, meta: ShardMeta, durability: Durability | None) -> Durability:
        return meta.config.durability if durability is None else durability
