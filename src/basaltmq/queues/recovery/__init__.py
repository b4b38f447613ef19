"""Damage of queues: failed queues, recounts, row checks, and mending after a repair."""
