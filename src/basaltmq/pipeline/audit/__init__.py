"""Audits of stores and queues with Spark."""
