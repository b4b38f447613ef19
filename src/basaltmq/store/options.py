"""How a RocksDB store is opened: its settings, and the memory all stores of a process share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    WriteBufferManager,
)

from basaltmq.store.families import MIB, Family, Profile

BLOOM_BITS_PER_KEY: Final = 10
"""About 1 % false positives; more bits buy little."""

DELETION_WINDOW: Final = 1024
"""Entries looked at together by the collector that compacts files full of tombstones."""


FILES_ANY: Final = 1_000_000
"""More files of level 0 than there can be: writes are never held for want of compaction."""


class SharedMemory:
    """One block cache and one write-buffer budget for every store of a process, so that memory has one limit.

    The write-buffer budget is soft: passing it sends memory tables to disk, and writes go on meanwhile, up to two
    buffers per family. A hard one would let an idle store, which flushes nothing, stall all the others.
    """

    def __init__(self, cache_bytes: int = 64 * MIB, write_buffer_bytes: int = 128 * MIB) -> None:
        self.cache = Cache(cache_bytes)
        self.write_buffers = WriteBufferManager(write_buffer_bytes, False)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Settings of one store."""

    memory: SharedMemory = field(default_factory=SharedMemory)
    statistics: bool = False
    """Keep RocksDB's counters; costs a few per cent."""
    stall_wait_ms_max: int = 30_000
    """How long a write waits for compaction before it gives up with StoreStalledError."""
    open_files_max: int = 512
    """File handles kept open; RocksDB opens and closes beyond it."""
    wal_bytes_max: int = 128 * MIB
    """Past this the oldest memory tables are flushed, so that a restart replays at most this much."""
    background_jobs: int = 2


def database_options(options: StoreOptions, *, log_directory: Path | None = None, strict_wal: bool = True) -> Options:
    """Options of the database as a whole. `strict_wal` refuses any damage in the WAL instead of stopping at it."""
    db = Options(raw_mode=True)
    db.create_if_missing(True)
    db.create_missing_column_families(True)
    db.set_max_open_files(options.open_files_max)
    db.set_max_total_wal_size(options.wal_bytes_max)
    db.set_max_background_jobs(options.background_jobs)
    db.set_write_buffer_manager(options.memory.write_buffers)
    db.set_keep_log_file_num(4)
    db.set_max_log_file_size(4 * MIB)
    db.set_paranoid_checks(True)
    # The statistics thread writes to the log every ten minutes; nobody reads it there.
    db.set_stats_dump_period_sec(0)
    if strict_wal:
        db.set_wal_recovery_mode(DBRecoveryMode.absolute_consistency())
    else:
        db.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    if options.statistics:
        db.enable_statistics()
    if log_directory is not None:
        db.set_db_log_dir(str(log_directory))
    return db


def family_options(options: StoreOptions, damaged: Collection[str] = ()) -> dict[str, Options]:
    """Options of every family but the default one, which RocksDB insists on and we leave empty.

    Those that are `damaged` are not compacted (see `unreadable`).
    """
    found = {
        family.label: _profile_options(family.profile, options) for family in Family if family is not Family.DEFAULT
    }
    for label in damaged:
        if label in found:
            found[label].set_disable_auto_compactions(True)
            found[label].set_level_zero_slowdown_writes_trigger(FILES_ANY)
            found[label].set_level_zero_stop_writes_trigger(FILES_ANY)
    return found


def _profile_options(profile: Profile, options: StoreOptions) -> Options:
    table = BlockBasedOptions()
    table.set_block_cache(options.memory.cache)
    table.set_cache_index_and_filter_blocks(True)
    # Nothing is pinned: a file that is moved down from level 0 as it is, as those of a growing queue are, would keep
    # its pins, and the cache would grow with the backlog beyond its size.
    table.set_pin_l0_filter_and_index_blocks_in_cache(False)
    table.set_block_size(profile.block_bytes)
    # In parts of 4 KiB: the whole filter of a file of a million rows does not fit a shard of the cache, and would be
    # read again for every get.
    table.set_index_type(BlockBasedIndexType.two_level_index_search())
    table.set_partition_filters(True)
    if profile.bloom:
        table.set_bloom_filter(BLOOM_BITS_PER_KEY, False)
    cf = Options(raw_mode=True)
    cf.set_block_based_table_factory(table)
    cf.set_write_buffer_size(profile.write_buffer_bytes)
    cf.set_compression_type(DBCompressionType.lz4() if profile.compressed else DBCompressionType.none())
    if profile.deletes:
        cf.add_compact_on_deletion_collector_factory(DELETION_WINDOW, DELETION_WINDOW // 2, 0.5)
    if profile.blob_bytes_min is not None:
        cf.set_enable_blob_files(True)
        cf.set_min_blob_size(profile.blob_bytes_min)
        cf.set_blob_file_size(64 * MIB)
        cf.set_enable_blob_gc(True)
        # Any blob file may be rewritten, once half of the oldest ones is garbage.
        cf.set_blob_gc_age_cutoff(1.0)
        cf.set_blob_gc_force_threshold(0.5)
    return cf
