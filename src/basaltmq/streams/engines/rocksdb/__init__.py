"""The engine that stores records as RocksDB rows."""
