"""The index of the segment engine: offsets, times, keys, tags and transactions."""
