"""Storage engines of shards: memory, RocksDB and segments, with one interface."""
