"""The memory and RocksDB engines beside the process that writes.

What a RocksDB topic's view shows was read from the WAL, written but perhaps not synced. Syncing a file does not need
the right to write it, so the WAL is made durable here before anything is read from it: what a reader sees, a power
loss cannot take back. A log that is gone by then was flushed into tables, which are durable.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from basaltmq.store.api import Store
from basaltmq.store.directory import os_error
from basaltmq.store.integrity.wal import wal_files
from basaltmq.streams.adapter import Clock, ShardInfo
from basaltmq.streams.engines.memory import MemoryEngine
from basaltmq.streams.engines.rocksdb.engine import RocksdbEngine
from basaltmq.streams.leaders import Leaders
from basaltmq.streams.offsets import Offsets
from basaltmq.streams.shards import Shards


class SeenRocksdb(RocksdbEngine):
    """The RocksDB engine over a view of the store."""

    def __init__(
        self, store: Store, shards: Shards, offsets: Offsets, clock_ms: Clock, leaders: Leaders, *, database: Path
    ) -> None:
        harden_wal(database)
        super().__init__(store, shards, offsets, clock_ms, leaders)


class UnseenMemory(MemoryEngine):
    """Shards whose records are in the memory of another process: as seen from here there are none."""

    def shard_info(self, shard: int) -> ShardInfo:
        meta = self._own(shard)
        return ShardInfo(meta, meta.start_offset, meta.start_offset, meta.start_offset, 0, 0)


def harden_wal(database: Path) -> None:
    """Return when everything in the WAL so far is durable."""
    for path in wal_files(database):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise os_error(error, path) from error
        try:
            os.fdatasync(fd)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EINVAL):
                raise os_error(error, path) from error
        finally:
            os.close(fd)
