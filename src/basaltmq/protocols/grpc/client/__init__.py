"""gRPC client: channel, connection, calls."""
