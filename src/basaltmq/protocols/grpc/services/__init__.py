"""The gRPC services of the broker. `fila` and `basalt` do not import each other; this package holds what both use."""
