"""Basalt: a message broker and message store for Python teams, on RocksDB."""

__version__ = "0.1.0"
