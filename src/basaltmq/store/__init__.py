"""An ordered key-value store with column families, atomic batches, snapshots and group commit."""
