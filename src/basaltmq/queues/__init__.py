"""The queue plane: queues, messages and leases, and their storage format."""
