"""RocksDB options of a store, and the memory that all stores of a process share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
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
"""About 1 % false positives. More bits reduce them little."""

DELETION_WINDOW: Final = 1024
"""Window, in entries, of the collector that compacts SST files with many tombstones."""

BUFFERS_MAX: Final = 4
"""Memtables per family with message bodies. RocksDB stalls all writes when so many are full."""

UNFLUSHED_MAX: Final = 2
"""Number of full memtables at which large messages wait. The other two memtables are a reserve for small messages."""

FILES_ANY: Final = 1_000_000
"""More level-0 files than can exist, so that missing compaction never stalls writes."""


class SharedMemory:
    """One block cache and one write-buffer budget for all stores of a process, so that memory has one limit.

    The write-buffer budget is soft: exceeding it triggers memtable flushes while writes continue, up to four buffers
    per family. With a hard budget, an idle store, which flushes nothing, could stall all other stores.
    """

    def __init__(self, cache_bytes: int = 64 * MIB, write_buffer_bytes: int = 128 * MIB) -> None:
        self.cache = Cache(cache_bytes)
        self.write_buffers = WriteBufferManager(write_buffer_bytes, False)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Settings of one store."""

    memory: SharedMemory = field(default_factory=SharedMemory)
    statistics: bool = False
    """Collect RocksDB's counters. Costs a few percent of throughput."""
    stall_wait_ms_max: int = 30_000
    """How long a write waits for compaction before it raises StoreStalledError, in milliseconds."""
    open_files_max: int = 512
    """File handles that stay open. Beyond it RocksDB closes and reopens files."""
    wal_bytes_max: int = 128 * MIB
    """WAL size that triggers a flush of the oldest memtables. It bounds the replay at restart."""
    background_jobs: int = 2


def database_options(options: StoreOptions) -> Options:
    """Return the database-wide options. RocksDB rejects any WAL damage."""
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
    # The statistics thread would write to RocksDB's log every ten minutes, which Basalt does not read.
    db.set_stats_dump_period_sec(0)
    db.set_wal_recovery_mode(DBRecoveryMode.absolute_consistency())
    if options.statistics:
        db.enable_statistics()
    return db


def family_options(options: StoreOptions, damaged: Collection[str] = ()) -> dict[str, Options]:
    """Return the options of every family except the default one, which RocksDB requires and Basalt leaves empty.

    Families in `damaged` are not compacted (see `unreadable`).
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
    # Pin nothing. A trivial move from level 0, usual for a growing queue, keeps a file's pins, so the cache would grow
    # with the backlog beyond its limit.
    table.set_pin_l0_filter_and_index_blocks_in_cache(False)
    table.set_block_size(profile.block_bytes)
    # Partitions of 4 KiB: the whole filter of a file with a million rows does not fit a cache shard and would be read
    # again for every get.
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
        cf.set_max_write_buffer_number(BUFFERS_MAX)
        cf.set_enable_blob_files(True)
        cf.set_min_blob_size(profile.blob_bytes_min)
        cf.set_blob_file_size(64 * MIB)
        cf.set_enable_blob_gc(True)
        # Any blob file may be rewritten once half of the oldest ones is garbage.
        cf.set_blob_gc_age_cutoff(1.0)
        cf.set_blob_gc_force_threshold(0.5)
    return cf
