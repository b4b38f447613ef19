"""Lease queues over gRPC as Fila's clients speak it (`fila.v1`), and what Basalt's own service shares with it."""
