"""Lease queues over gRPC in batches, with fencing tokens (`basalt.v1`)."""
