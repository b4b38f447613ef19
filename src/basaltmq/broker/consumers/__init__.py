"""Queues with consumers: dispatch, credit, stream queues."""
