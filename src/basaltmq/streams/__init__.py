"""Streams: shards read by offset, kept by one of three engines behind one adapter."""
