"""Encodings of record batches: columns, Kafka batches, and their compression."""
