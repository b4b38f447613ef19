"""Commit-log lanes: columnar batches in frames, frames in segment files."""
