"""Streams: shards read by offset, stored by one of three engines with one interface."""
