"""The memory and RocksDB engines for a read-only view beside the writing process.

A view of a RocksDB topic reads the WAL, which may be written but not synced. fdatasync needs no write permission, so
the view syncs the WAL before it reads. A power loss then cannot revoke what a reader saw. A WAL file that has
disappeared was flushed to SST files, which are durable.
"""

from __future__ import annotations

from pathlib import Path

from basaltmq.store.api import Store
from basaltmq.store.directory import os_error, sync_data
from basaltmq.store.integrity.wal import wal_files
from basaltmq.streams.adapter import Clock, ShardInfo
from basaltmq.streams.engines.memory import MemoryEngine
from basaltmq.streams.engines.rocksdb.engine import RocksdbEngine
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import Shards


class RocksdbView(RocksdbEngine):
    """The RocksDB engine over a read-only view of the store."""

    def __init__(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders, *, database: Path
    ) -> None:
        sync_wal(database)
        super().__init__(store, shards, offsets, clock_ms, leaders)


class MemoryView(MemoryEngine):
    """Memory shards of another process. A view cannot read their records, so it reports them as empty."""

    def shard_info(self, shard: int) -> ShardInfo:
        meta = self._own(shard)
        return ShardInfo(meta, meta.start_offset, meta.start_offset, meta.start_offset, 0, 0)


def sync_wal(database: Path) -> None:
    """Sync all WAL files to disk."""
    for path in wal_files(database):
        try:
            sync_data(path)
        except OSError as error:
            raise os_error(error, path) from error
