"""gRPC server: listener, connections, calls, method types."""
