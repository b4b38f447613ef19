"""Exchanges, bindings and policies: which queues get a message."""
