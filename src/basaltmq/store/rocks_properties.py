"""The families of an open database, and the RocksDB properties that operators see, by Basalt's name."""

from __future__ import annotations

from typing import Final

from rocksdict import Rdict

from basaltmq.store.families import Family

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

SIZES: Final = tuple(PROPERTIES[name] for name in ("sst-bytes", "blob-bytes", "memtable-bytes"))

DATABASE_PROPERTIES: Final = {
    "running-compactions": "rocksdb.num-running-compactions",
    "background-errors": "rocksdb.background-errors",
}
"""Figures of the whole database. RocksDB returns the same value for every family, so a sum would be wrong."""

UNFLUSHED: Final = "rocksdb.num-immutable-mem-table"
"""Number of full memtables whose flush is not complete."""


def families_of(db: Rdict) -> list[Rdict]:
    """Return a handle per family of an open database. A family missing in a view of an older store maps to the default
    family, which is always empty."""
    present = set(Rdict.list_cf(db.path()))
    return [db.get_column_family(f.label) if f.label in present and f is not Family.DEFAULT else db for f in Family]
