"""Readers of RocksDB's files that find damage: SST files, blob files, MANIFEST, WAL, seals."""
