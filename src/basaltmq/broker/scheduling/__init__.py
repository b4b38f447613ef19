"""Scheduling on the event loop: turns, shares of connections, and background work in portions."""
