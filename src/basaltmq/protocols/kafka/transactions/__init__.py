"""Kafka transactions and idempotent producers."""
