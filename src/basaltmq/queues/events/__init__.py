"""Lifecycle events of messages, written to a topic."""
