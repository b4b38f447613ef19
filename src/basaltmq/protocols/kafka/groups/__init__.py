"""Kafka consumer groups: classic and KIP-848 protocols, offsets, assignment."""
