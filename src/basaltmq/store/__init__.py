"""The bottom: an ordered key-value store with families, atomic batches, snapshots and group commit."""
