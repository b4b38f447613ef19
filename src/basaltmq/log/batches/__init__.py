"""Encodings of record batches: columns, Arrow, Kafka batches, and their compression."""
