"""Scheduling of fsyncs: group commit, commits on the event loop, and callbacks after a sync."""
