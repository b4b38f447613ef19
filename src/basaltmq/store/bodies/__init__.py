"""Large bodies: append-only files next to RocksDB, rows that point into them, and the reclaiming of their space."""
