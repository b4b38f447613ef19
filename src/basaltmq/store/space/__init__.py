"""Disk space: size limits, free space, the reserve file, and compaction that frees space."""
