"""`basalt queue`: queues of a data directory or a running broker."""
