"""Damage of queues: failed queues, recounts, row checks, and consistent rows after a repair."""
