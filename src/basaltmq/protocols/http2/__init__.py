"""HTTP/2 without I/O: bytes in, events out, and bytes to send; as much of it as gRPC needs, for both sides."""
