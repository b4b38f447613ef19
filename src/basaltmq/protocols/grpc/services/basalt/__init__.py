"""The service basalt.v1.Queues."""
