"""Messages of the gRPC services, generated from `proto/` when Basalt is built; nothing here is written by hand."""
