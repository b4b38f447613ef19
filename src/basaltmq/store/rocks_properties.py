"""RocksDB properties that operators see, by Basalt's name."""

from __future__ import annotations

from typing import Final

PROPERTIES: Final = {
    "sst-bytes": "rocksdb.total-sst-files-size",
    "blob-bytes": "rocksdb.total-blob-file-size",
    "memtable-bytes": "rocksdb.cur-size-all-mem-tables",
    "estimated-rows": "rocksdb.estimate-num-keys",
    "estimated-live-bytes": "rocksdb.estimate-live-data-size",
    "pending-compaction-bytes": "rocksdb.estimate-pending-compaction-bytes",
    "level-0-files": "rocksdb.num-files-at-level0",
}
"""Figures of each family."""

DATABASE_PROPERTIES: Final = {
    "running-compactions": "rocksdb.num-running-compactions",
    "background-errors": "rocksdb.background-errors",
}
"""Figures of the whole database. RocksDB returns the same value for every family, so a sum would be wrong."""
