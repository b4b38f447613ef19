"""HTTP/2 without I/O: framing, flow control, header compression."""
